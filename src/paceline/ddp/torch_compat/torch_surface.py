"""The attributes and methods of torch's class that integrations use, over our own reducer.

Nothing here takes part in a gradient's way. Whatever torch's class has and is not here is inherited and needs no
reducer (`scatter`, `gather`, `train`).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn import Module, Parameter
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from paceline.comm.collectives import backend_of
from paceline.ddp.arguments import ONE_WRAPPER, check_comm_hook, check_join, choose_devices
from paceline.ddp.buffers import BROADCAST_BYTES, BufferHook
from paceline.ddp.joining import Shadow
from paceline.ddp.mixed_precision import mark_low_precision
from paceline.ddp.reducer import Reducer
from paceline.ddp.torch_compat.torchs_reducer import Logger, TorchsReducer, logging_data, take_over_optimizers
from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.ddp.coordinator import StepCoordinator
    from paceline.ddp.setting import Setting

_UNCHANGED = (
    "module",
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "mixed_precision",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "lazy_bucket_allocation",
)
"""Arguments that are kept, under their names, as they were given."""


class WrappedAlready:
    """An attribute that is not there, except to torch's constructor, which is told that it cannot wrap the module."""

    def __get__(self, wrapped: Any, owner: type) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__")
        if wrapped is not None and asker == "torch.nn.parallel.distributed":
            raise ConfigurationError(
                f"cannot wrap this {owner.__name__}: it is Paceline's DistributedDataParallel, so it synchronizes its "
                f"gradients already. {ONE_WRAPPER}"
            )
        raise AttributeError("_ddp_params_and_buffers_to_ignore")


class TorchSurface:
    """Mixed into `DistributedDataParallel` in front of torch's class."""

    if TYPE_CHECKING:
        module: Module
        static_graph: bool
        mixed_precision: Any
        _paceline_setting: Setting
        _paceline_coordinator: StepCoordinator
        _paceline_error: dict[str, Any]

        @property
        def reducer(self) -> TorchsReducer: ...

    _paceline_reducer_class: type[Reducer] = TorchsReducer

    @property
    def broadcast_buffers(self) -> bool:
        """Return `forward_sync_buffers` under its former name, which torch 2.8 has as an attribute of its own."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _paceline_name_as_torch(self, given: Any) -> None:
        """Set torch's attributes for the constructor's arguments, and for what follows from them."""
        setting = self._paceline_setting
        for name in _UNCHANGED:
            setattr(self, name, getattr(given, name))
        if given.device_mesh is not None:
            self.device_mesh = given.device_mesh
        self.parameters_to_ignore = setting.ignored
        self._module_parameters, self._delay_all_reduce_params = setting.parameters, setting.delayed
        self.device_ids, self.output_device = choose_devices(
            setting.parameters, given.device_ids, given.output_device
        )
        self.device = setting.device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in setting.parameters}) > 1
        self.bucket_bytes_cap_default = setting.given_caps is None
        has_list = given.bucket_cap_mb_list is not None
        self.bucket_bytes_cap_list = list(setting.caps.caps_bytes) if has_list else []
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True

    def _paceline_let_synchronize(self, wanted: bool) -> None:
        self.require_backward_grad_sync = wanted

    def _paceline_take_over_optimizers(self) -> Callable[[Parameter], None] | None:
        return take_over_optimizers(self._paceline_setting.parameters)

    def _paceline_init_torch_surface(self) -> None:
        self.logger = Logger(self)
        self.buffer_hook: _BufferCommHook | None = None
        self.broadcast_bucket_size = BROADCAST_BYTES
        self.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        self._comm_hooks: list[tuple[Any, Any]] = []
        self._paceline_hook_name = ""
        self._use_python_reducer = False
        self._lazy_init_ran = True
        self._ddp_sink_clone = True
        if self.mixed_precision is not None:
            mark_low_precision(self.module, self.mixed_precision.param_dtype)

    # What torch's constructor reads first of a module that it is to wrap.
    _ddp_params_and_buffers_to_ignore = WrappedAlready()

    def _paceline_check_not_within(self, outer: Any) -> None:
        """Refuse to be a part of another wrapper's module, deeper than its constructor can be told so."""
        if outer is not None and outer is not self and any(part is self for part in outer.modules()):
            raise ConfigurationError(
                f"this module is synchronized by Paceline and lies within what {type(outer).__module__}."
                f"{type(outer).__name__} wraps, which would reduce its gradients twice. {ONE_WRAPPER}"
            )

    @property
    def bucket_bytes_cap(self) -> int:
        return int(max(self._paceline_setting.caps.caps_bytes))

    @property
    def process_group(self) -> Any:
        """Return the group over which gradients are reduced; the first of several that take turns."""
        return self._paceline_setting.process_groups[0]

    # ---- communication hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket) -> Future[Tensor]` combine the ranks' gradients, as torch's method of this name.

        The hook divides by the number of ranks itself. Torch's own (`torch.distributed.algorithms.ddp_comm_hooks`) all
        work, on Gloo too. Local; all ranks register the same, once, before the first backward.
        """
        from paceline.ddp.torch_compat.comm_hooks import make_reduction, name_of  # noqa: PLC0415 (torch's hooks are slow)

        try:
            reduction = make_reduction(state, hook, backend_of(self.process_group))
        except (TypeError, ValueError) as error:
            self._log_and_throw(type(error), str(error))
        if self._comm_hooks:
            why = "register_comm_hook or register_builtin_comm_hook can only be called once."
            self._log_and_throw(RuntimeError, why)
        try:
            overlaps_forward = self._paceline_coordinator.forward_overlap is not None
            check_comm_hook(self._paceline_setting.reduction, overlaps_forward)
        except RuntimeError as error:
            self._log_and_throw(RuntimeError, str(error))
        self._comm_hooks.append((hook, state))
        self._paceline_hook_name = name_of(hook)
        self._paceline_setting.reduce_by(reduction)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from paceline.ddp.torch_compat.comm_hooks import builtin_hook  # noqa: PLC0415 (as above)

        self.register_comm_hook(self.process_group, builtin_hook(comm_hook_type))
        self._paceline_hook_name = str(comm_hook_type)

    def _paceline_register_again(
        self, hooks: Sequence[tuple[Any, Any]], name: str, buffer_hook: _BufferCommHook | None
    ) -> None:
        """Register in a copy what the original had: hooks and their states, and what the first one was called."""
        for hook, state in hooks:
            from paceline.ddp.torch_compat.comm_hooks import forget_buckets  # noqa: PLC0415 (as above)

            forget_buckets(state)
            self.register_comm_hook(state, hook)
        self._paceline_hook_name = name
        if buffer_hook is not None:
            self._register_buffer_comm_hook(
                buffer_hook.buffer_comm_hook_state,
                buffer_hook.buffer_comm_hook,
                buffer_hook.buffer_comm_hook_location,
            )

    # ---- buffers

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let `hook(state, {name: buffer})` synchronize the buffers, before or after each training forward."""
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__name__}")
        self.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)
        runs_before_forward = comm_hook_location == _BufferCommHookLocation.PRE_FORWARD
        self._paceline_coordinator.buffers.set_hook(BufferHook(hook, state, runs_before_forward))

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        return self._paceline_coordinator.buffers.named()

    @property
    def modules_buffers(self) -> list[Tensor]:
        return list(self._paceline_coordinator.buffers.named().values())

    def will_sync_module_buffers(self) -> bool:
        return self._paceline_coordinator.has_synchronized_buffers()

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Give all ranks one rank's tensors, by default the buffers. Collective; blocks."""
        tensors = self.modules_buffers if bufs is None else list(bufs)
        self._paceline_coordinator.broadcast_tensors(tensors, authoritative_rank, "broadcasting tensors")

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        self._default_broadcast_coalesced(tensors, buffer_size, authoritative_rank)

    def _sync_buffers(self) -> None:
        self._paceline_coordinator.buffers.synchronize()

    # ---- uneven inputs

    def join_hook(self, **kwargs: Any) -> Shadow:
        """Return the hook that `Join` runs on a rank that has no more batches."""
        self._paceline_coordinator.joining.begin(kwargs.get("divide_by_initial_world_size", True))
        return Shadow(self, self._paceline_coordinator)  # type: ignore[arg-type]

    @property
    def _join_config(self) -> _JoinConfig:
        """Return the settings of the `Join` around the module. Torch assigns them while it makes a `Join`."""
        config: _JoinConfig = self.__dict__["_join_config"]
        return config

    @_join_config.setter
    def _join_config(self, config: _JoinConfig) -> None:
        if config.enable:
            check_join(self, config.throw_on_early_termination)
        self.__dict__["_join_config"] = config

    @property
    def join_device(self) -> torch.device:
        return self._paceline_coordinator.membership.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    @property
    def _divide_by_initial_world_size(self) -> bool:
        return self._paceline_coordinator.joining.divides_by_all

    @property
    def _authoritative_rank(self) -> int:
        return self._paceline_coordinator.joining.authoritative_rank

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        self._paceline_coordinator.take_final_model(is_last_joiner)

    # ---- reports

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return logging_data(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Checked as torch does; every step is recorded whatever the rate."""
        if sample_rate < 1:
            why = "DDP runtime logging sample rate should be equal or greater than 1"
            self._log_and_throw(ValueError, why)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.cuts.has_followed

    @property
    def _distributed_rank(self) -> int:
        return int(self.process_group.rank())

    # ---- graph and reducer

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        self.reducer.set_static_graph()
        self.static_graph = True

    def _remove_autograd_hooks(self) -> None:
        self.reducer.tracker.stop()

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward was not completed; otherwise every backward is, when it returns."""
        self.reducer.check_finished()

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Ignore the ids: sparse gradients find each other's coordinates."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Keep the value. Outputs are returned as the module made them."""
        self._ddp_sink_clone = val

    def _update_process_group(self, new_process_group: Any) -> None:
        """Rebuild without copying parameters and comparing steps. All new members switch in the same step."""
        self._paceline_coordinator.membership.rebuild(new_process_group, same_step=False)

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        managed = self._paceline_setting.managed(self.module)
        return list(managed.parameters), list(managed.sparse)

    def _check_default_group(self) -> None:
        has_several = len(self._paceline_setting.process_groups) > 1
        if has_several or self.process_group != dist.distributed_c10d._get_default_group():
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor",
            )

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        self._paceline_error = {"has_error": 1, "error": f"{err_type}: {err_msg}"}
        raise err_type(err_msg)


class _DefaultGroup:
    """A communication hook's state in a copy that is being made: there it is the default process group."""

    def __reduce__(self) -> Any:
        return dist.distributed_c10d._get_default_group, ()


def without_group(state: Any) -> Any:
    """Return a communication hook's state for a copy: as it is, but a process group cannot be copied."""
    return _DefaultGroup() if isinstance(state, dist.ProcessGroup) else state


# ---- state dicts with or without the prefix `module.`, which torch's own have

_PREFIX = "module."


def restore_names(
    wrapper: Module,
    state: MutableMapping[str, Any],
    prefix: str,
    *_: Any,  # metadata, strict, and lists of keys and errors
) -> None:
    """Put the prefix back where it is missing, before loading, so that both forms load.

    A part of a state may fit in both forms, where the module has a child called `module`: then it is the wrapper's own.
    """
    own = set(wrapper.module.state_dict())  # type: ignore[union-attr]
    names = [name for name in state if name.startswith(prefix)]
    bare = {name.removeprefix(prefix) for name in names}
    of_wrapper = {name.removeprefix(_PREFIX) for name in bare if name.startswith(_PREFIX)}
    if len(bare & own) > len(of_wrapper & own):
        given = {prefix + _PREFIX + name.removeprefix(prefix): name for name in names}
        state.update({restored: state.pop(name) for restored, name in given.items()})
        wrapper._paceline_restored_names = (given, *_lend_versions(state, prefix))  # type: ignore[assignment]


def _lend_versions(state: MutableMapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put the prefix before the names of modules' versions, in the caller's mapping, which `load_state_dict` reads.

    Returns the mapping, and what it was.
    """
    modules = getattr(state, "_metadata", None) or {}
    before = dict(modules)
    for name, facts in before.items():
        if f"{name}.".startswith(prefix) or not prefix:
            rest = f"{name}.".removeprefix(prefix).removesuffix(".") if name else ""
            modules[(prefix + _PREFIX + rest).removesuffix(".")] = facts
    return modules, before


def take_back_names(wrapper: Module, incompatible: Any) -> None:
    """Restore the given names and the caller's mapping, after loading."""
    given, modules, before = wrapper.__dict__.pop("_paceline_restored_names", ({}, {}, {}))
    modules.clear()
    modules.update(before)
    unexpected = incompatible.unexpected_keys
    unexpected[:] = [given.get(name, name) for name in unexpected]
