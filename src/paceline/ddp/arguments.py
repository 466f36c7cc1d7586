"""The constructor's arguments, checked before anything is started, by themselves and against each other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
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
from paceline.ddp import sync_batch_norm
from paceline.ddp.droppable import Unit
from paceline.ddp.forward_overlap import outstanding
from paceline.ddp.layout import ManagedParameters
from paceline.ddp.step_shares import StepShares
from paceline.errors import ConfigurationError
from paceline.reductions import Mean, NarrowMean, Reduction


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


_MOST_NAMED = 3


def _refuse(option: str, beside: Mapping[str, object], advice: str) -> None:
    """Raise ConfigurationError if any value of `beside` is true, and name those: the option excludes them."""
    if found := [what for what, is_there in beside.items() if is_there]:
        named = "; nor with ".join(found[:_MOST_NAMED])
        raise ConfigurationError(f"{option} is not possible with {named}{advice}")


def check_linear(managed: ManagedParameters, reduction: Reduction) -> None:
    """Refuse sparse gradients beside a reduction that is not linear: they are always averaged."""
    sparse = [name for name, is_sparse in zip(managed.names, managed.sparse, strict=True) if is_sparse]
    if sparse and not reduction.is_linear:
        raise ConfigurationError(
            f"{reduction!r} combines dense gradients only, and {', '.join(sparse)} would have sparse ones, which are "
            "averaged. Build the embedding with sparse=False, or leave out reduction."
        )


def check_skipping(units: Sequence[Unit], reduction: Reduction, **given: object) -> None:
    """Refuse to leave buckets out beside what needs every bucket, such as these arguments, by name."""
    not_here = {f"{name}={value!r}": value for name, value in given.items()}
    not_here[f"gradients combined by {reduction!r}"] = reduction.needs_all_buckets
    option = "droppable" if units else "skip_all_reduce_unused_params"
    _refuse(option, not_here, ": that needs every bucket in every step. Use one of them.")


def check_forward_overlap(
    module: Module,  # the whole
    managed: ManagedParameters,
    process_groups: Sequence[ProcessGroup],  # over which they are reduced
    reduction: Reduction,
    given: Any,  # the constructor's arguments, as attributes
) -> None:
    """Refuse `overlap_forward` beside options under which it would give other results."""
    wanted = given.overlap_forward
    if wanted not in (True, "always"):
        raise ConfigurationError(
            f'overlap_forward={wanted!r} must be True, False or "always" (without asking whether it pays).'
        )
    parts = list(module.modules())
    named = managed.named()
    for parameter in managed.parameters:
        outstanding.complete(parameter)  # it may have been wrapped before
    takers = "only the mean, or BoundedLoss without servers"
    not_here = {
        "a module on several devices": len({p.device for p in managed.parameters}) > 1,
        "init_sync=False (it opens a process group)": not given.init_sync,
        "several process groups": len(process_groups) > 1,
        f"gradients combined by {reduction!r} ({takers})": not reduction.pieces_at_once,
        f"gradients on an accelerator combined by {reduction!r} (only the mean)": type(reduction) is not Mean
        and managed.parameters[0].device.type != "cpu",
        "mixed_precision (it reads all parameters before forward; torch.autocast does not)": given.mixed_precision,
        "sparse gradients": any(managed.sparse),
        "a compiled or scripted part": any(
            isinstance(part, torch.jit.ScriptModule)
            or part._compiled_call_impl is not None
            or hasattr(part, "_orig_mod")
            for part in parts
        ),
        **{
            f"{name}, a {type(p).__name__} (only torch.nn.Parameter)": type(p) is not Parameter
            for name, p in named.items()
        },
    }
    advice = ". Leave out overlap_forward, or the other. `paceline explain is not possible with` says more."
    _refuse("overlap_forward", not_here, advice)


def check_join(model: Any, throws_early: bool) -> None:
    """Raise ConfigurationError if the model needs something that a rank without batches cannot do.

    With `throws_early`, all ranks leave the context as soon as one has no more batches.
    """
    if model.process_group.size() > 1 and not throws_early and sync_batch_norm.are_in_use(model):
        raise ConfigurationError(
            "join() and synchronized batch normalisation: each forward of these layers waits for all ranks, but a rank "
            "without batches runs none. Pass throw_on_early_termination=True, use BatchNorm, or give all ranks equally "
            "many batches."
        )
    if why := model.membership.why_together:
        raise ConfigurationError(
            f"join() is not possible: {why}, and a rank without batches makes no steps. Give all ranks equally many "
            "batches."
        )
    if model.forward_overlap is not None:
        raise ConfigurationError(
            "join() and overlap_forward: a rank without batches has no forward to overlap with, and would keep the "
            "others waiting. Leave out overlap_forward, or give all ranks equally many batches."
        )


def check_comm_hook(reduction: Reduction, overlaps_forward: bool) -> None:
    """Refuse a communication hook beside what it would replace or disturb. Raises torch's RuntimeError."""
    if not isinstance(reduction, Mean | NarrowMean):
        raise RuntimeError(  # noqa: TRY004  torch's class
            f"register_comm_hook: gradients are combined by reduction={reduction!r}, which the hook would "
            "replace. Leave out one of them."
        )
    if overlaps_forward:
        raise RuntimeError(
            "register_comm_hook and overlap_forward: pieces of buckets are summed, which the hook would replace. Leave "
            "out one of them."
        )
