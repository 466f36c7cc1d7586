"""The constructor's arguments, checked before anything is started."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from paceline import reductions
from paceline.comm.collectives import backend_of, carries
from paceline.comm.device import accelerator_type, is_accelerator, why_without_streams
from paceline.compression import Compressor
from paceline.data import Balance, GlobalBatches
from paceline.ddp.step_shares import StepShares
from paceline.errors import ConfigurationError
from paceline.reductions import NarrowMean, Reduction


def choose_process_groups(process_group: Any, device_mesh: Any) -> list[ProcessGroup]:
    """Return the groups to reduce over. Several take turns, bucket by bucket."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if not hasattr(device_mesh, "get_group"):
            raise ConfigurationError(
                f"device_mesh={device_mesh!r} is not a device mesh. Make one: "
                "torch.distributed.device_mesh.init_device_mesh(device_type, (num_ranks,))."
            )
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return [device_mesh.get_group(mesh_dim=0)]
    if process_group is None:
        return [dist.distributed_c10d._get_default_group()]
    groups = list(process_group) if isinstance(process_group, (list, tuple)) else [process_group]
    if not groups:
        raise ValueError("process_group=[] names no process group; leave it out to use the default one.")
    for group in groups:
        if not isinstance(group, ProcessGroup):
            raise ConfigurationError(
                f"process_group: {group!r} is no process group, or this rank is not a member of it. Wrap the module on "
                "the group's members only. torch.distributed.new_group() makes one."
            )
    members = [dist.get_process_group_ranks(group) for group in groups] if len(groups) > 1 else []
    if any(ranks != members[0] for ranks in members):
        raise ValueError(
            f"process_group: the groups that take turns must have the same ranks in the same order, got {members}."
        )
    return groups


def check_module(parameters: Sequence[Parameter]) -> None:
    """Refuse a module that cannot be wrapped, in torch's words."""
    if not any(parameter.requires_grad for parameter in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    types = {parameter.device.type for parameter in parameters}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, "
            f"but input module parameters locate in {types}."
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    if any(parameter.is_sparse for parameter in parameters):
        raise RuntimeError("No support for sparse tensors.")


def choose_devices(
    parameters: Sequence[Parameter], device_ids: Sequence[Any] | None, output_device: Any
) -> tuple[list[int] | None, int | None]:
    """Apply torch's rules to `device_ids` and `output_device`. Return both as indices."""
    if device_ids is not None and (isinstance(device_ids, str) or not isinstance(device_ids, Sequence)):
        raise ConfigurationError(
            f"device_ids={device_ids!r} is not a list. Give a list of one device, such as [0], or nothing on the CPU."
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {parameter.device for parameter in parameters}
    if not device_ids or len(devices) > 1 or next(iter(devices)).type == "cpu":
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, "
                f"but got device_ids {device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return None, None
    indices = [torch._utils._get_device_index(device, True) for device in device_ids]
    output = device_ids[0] if output_device is None else output_device
    return indices, torch._utils._get_device_index(output, True)


def check_device(parameters: Sequence[Parameter], process_groups: Sequence[ProcessGroup]) -> None:
    """Refuse an accelerator without streams, and a device for which a group has no backend."""
    for device in dict.fromkeys(p.device for p in parameters if p.device.type != "meta"):
        if is_accelerator(device) and (why := why_without_streams(device)) is not None:
            raise ConfigurationError(
                f"the module is on {device}, but {why}. Paceline orders gradients and their exchange by streams: move "
                "the module to the CPU or to this process's accelerator."
            )
        for group in process_groups:
            if not carries(group, device):
                raise ConfigurationError(
                    f"the module is on {device}, and the process group's backend {backend_of(group)!r} does not "
                    f"support it. Move the module, or open the group for both: "
                    f'dist.init_process_group("cpu:gloo,{accelerator_type() or "cuda"}:..."), or "paceline", which '
                    "takes them through the host's memory."
                )


ONE_WRAPPER = (
    "A module is synchronized by one wrapper: wrap the whole once, or its parts one by one and not the whole. A "
    "framework that wraps by itself (accelerate.prepare, Trainer, Lightning) takes the bare module."
)


def check_not_wrapped(module: Module) -> None:
    """Refuse a module of which a part is synchronized already. Its gradients would be reduced twice."""
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            where = f"its part {name!r}" if name else "it"
            raise ConfigurationError(
                f"cannot wrap this {type(module).__name__}: {where} is a {type(part).__name__} already. {ONE_WRAPPER}"
            )


def choose_buffer_policy(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """Return whether to synchronize buffers before forwards, and whether at the start."""
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated and "
            "its value is ignored when `forward_sync_buffers` is provided.",
            FutureWarning,
            stacklevel=4,
        )
    elif broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. IMPORTANT: unlike "
            "`broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at init.",
            FutureWarning,
            stacklevel=4,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    wanted = True if broadcast_buffers is None else broadcast_buffers
    return wanted, wanted


def check_delayed(named: Any, hooked: Any) -> None:
    """Refuse one of two arguments without the other, in torch's words."""
    if (named is None) != (hooked is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )


def choose_reduction(
    reduction: Reduction | str | None, compression: Compressor | Reduction | str | None, mixed_precision: Any
) -> Reduction:
    """Return the reduction that was asked for, or the mean in the dtype of `mixed_precision`."""
    narrow = mixed_precision and (mixed_precision.reduce_dtype or mixed_precision.param_dtype)
    given = {"reduction": reduction, "compression": compression}
    for name, value in given.items() if narrow else ():
        if value is None or value == "none":
            continue
        raise ConfigurationError(
            f"{name}={value!r} and mixed_precision with gradients reduced in {narrow}: both decide how "
            f"gradients are combined. Leave out {name}, or give mixed_precision reduce_dtype=None and param_dtype=None."
        )
    return NarrowMean(narrow) if narrow else reductions.choose_reduction(reduction, compression)


def choose_shares(
    batch_sampler: GlobalBatches | None,
    balance: Balance | str | None,
    process_group: ProcessGroup,
    device: torch.device,
) -> StepShares | None:
    """Return the connection between the module and the sampler of its batches; None without one."""
    if balance is not None and not isinstance(balance, Balance) and balance != "auto":
        raise ConfigurationError(f'balance={balance!r}: give "auto", or a paceline.data.Balance.')
    if batch_sampler is None:
        if balance is not None:
            raise ConfigurationError(
                f"balance={balance!r} moves samples between ranks, so it needs the loader's GlobalShuffle, "
                "TokenShuffle or GlobalStream as batch_sampler=."
            )
        return None
    if not isinstance(batch_sampler, GlobalBatches):
        raise ConfigurationError(
            f"batch_sampler={type(batch_sampler).__name__}: a GlobalShuffle, TokenShuffle or GlobalStream of "
            "paceline.data knows every rank's samples. With another sampler leave it out, and give weight=."
        )
    chosen = Balance() if balance == "auto" else balance
    assert not isinstance(chosen, str)
    return StepShares(batch_sampler, chosen, process_group.rank(), process_group.size(), device)


def warn_of_ignored(check_reduction: bool, static_graph: bool, find_unused: bool, lazy_buckets: bool) -> None:
    """Warn of arguments that have no effect."""
    if lazy_buckets:
        warnings.warn(
            "lazy_bucket_allocation=True is ignored. With it, torch's class copies gradients out of buckets and "
            "frees these between backwards. Paceline's gradients are the buckets, so there is no second copy to be "
            "freed.",
            UserWarning,
            stacklevel=3,
        )
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid using it.",
            FutureWarning,
            stacklevel=3,
        )
    if static_graph and find_unused:
        warnings.warn(
            "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` will detect unused "
            "parameters automatically, so you do not need to set find_unused_parameters=true.",
            UserWarning,
            stacklevel=3,
        )
