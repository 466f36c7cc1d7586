"""The attributes and methods of torch's class that integrations use, over our own reducer.

Nothing here takes part in a gradient's way. Whatever torch's class has and is not here is inherited and needs no
reducer (`scatter`, `gather`, `to_kwargs`, `train`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from paceline.comm.collectives import backend_of
from paceline.comm.peers import Peers
from paceline.ddp import arguments
from paceline.ddp.buffers import BROADCAST_BYTES, Broadcast
from paceline.ddp.logging_data import logging_data
from paceline.reductions import Mean, NarrowMean, Reduction

if TYPE_CHECKING:
    from paceline.ddp.buffers import Buffers
    from paceline.ddp.plan import BucketCaps
    from paceline.ddp.reducer import Reducer


class TorchSurface:
    """Mixed into `DistributedDataParallel` in front of torch's class."""

    if TYPE_CHECKING:
        module: Module
        reducer: Reducer
        process_group: Any
        _process_groups: list[Any]
        _reduce_groups: list[Any]
        _peers: Peers
        _buffer_sync: Buffers
        _caps: BucketCaps
        _module_parameters: list[Any]
        parameters_to_ignore: set[str]
        forward_sync_buffers: bool
        find_unused_parameters: bool
        static_graph: bool
        device: torch.device
        _delay_all_reduce_params: list[Any]
        _logged_error: dict[str, Any]
        _reduction: Reduction

        def _build_reducer(self, managed: Any) -> None: ...

    @property
    def broadcast_buffers(self) -> bool:
        """The former name of `forward_sync_buffers`, which torch 2.8 has as an attribute of its own."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _init_torch_surface(self) -> None:
        self.logger = _Logger(self)
        self.buffer_hook: _BufferCommHook | None = None
        self.broadcast_bucket_size = BROADCAST_BYTES
        self.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        self.bucket_bytes_cap = max(self._caps.caps_bytes)
        self.bucket_bytes_cap_list = list(self._caps.caps_bytes)
        self._comm_hook: tuple[Any, Any] | None = None
        self._comm_hooks: list[tuple[Any, Any]] = []
        self._comm_hook_name = ""
        self._buffer_futures: list[Any] = []
        self._divide_by_initial_world_size = True
        self._joins_uneven_inputs = False
        self._authoritative_rank = 0
        self._use_python_reducer = False
        self._lazy_init_ran = True
        self._ddp_sink_clone = True

    # ---- communication hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket) -> Future[Tensor]` combine the ranks' gradients instead of taking the mean.

        Args:
            state: Handed to the hook; keeps what it needs from step to step.
            hook: Called on every bucket, in the same order on every rank; returns a future whose value has the shape of
                `bucket.buffer()` and replaces it. Divides by the number of ranks itself. Torch's own hooks
                (`torch.distributed.algorithms.ddp_comm_hooks`) all work, on Gloo too.

        Contract:
            Local; all ranks must register the same, before the first backward, once.

        Raises:
            TypeError, ValueError, RuntimeError: In torch's words.
        """
        from paceline.ddp.comm_hooks import make_reduction  # noqa: PLC0415 (torch's hooks are slow to import)

        if self._comm_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if not isinstance(self._reduction, Mean | NarrowMean):
            raise RuntimeError(  # noqa: TRY004  as torch for a second hook
                f"register_comm_hook: gradients are combined by reduction={self._reduction!r}, which the hook would "
                "replace. Leave out either."
            )
        reduction = make_reduction(state, hook, backend_of(self.process_group))
        self._comm_hook = (hook, state)
        self._comm_hooks.append((hook, state))
        self._comm_hook_name = reduction.name
        self._reduction = self.reducer.reduction = reduction

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from paceline.ddp.comm_hooks import builtin_hook  # noqa: PLC0415 (as above)

        self.register_comm_hook(self.process_group, builtin_hook(comm_hook_type))
        self._comm_hook_name = str(comm_hook_type)

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

    def _buffer_hook_goes(self, location: str) -> bool:
        return self.buffer_hook is not None and self.buffer_hook.buffer_comm_hook_location.name == location

    def _run_buffer_hook(self) -> None:
        if self.buffer_hook is not None:
            futures = self.buffer_hook.buffer_comm_hook(
                self.buffer_hook.buffer_comm_hook_state, self.named_module_buffers
            )
            self.reducer.wait_at_end(list(futures or ()))

    def _has_synchronized_buffers(self) -> bool:
        return self.forward_sync_buffers and bool(self._buffer_sync.named())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        return self._buffer_sync.named()

    @property
    def modules_buffers(self) -> list[Tensor]:
        return list(self._buffer_sync.named().values())

    def will_sync_module_buffers(self) -> bool:
        return self._has_synchronized_buffers()

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Give all ranks one rank's tensors, by default the buffers. Collective; blocks."""
        tensors = self.modules_buffers if bufs is None else list(bufs)
        if self.process_group.size() > 1:
            Broadcast(tensors, self.process_group, authoritative_rank).finish(
                self._peers, "broadcasting tensors"
            )

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        self._default_broadcast_coalesced(tensors, buffer_size, authoritative_rank)

    def _sync_buffers(self) -> None:
        self._buffer_sync.synchronize()

    # ---- reports

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What the module is and how its steps went: strings and integers under torch's keys, times in ns."""
        return logging_data(self)  # type: ignore[arg-type]

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Checked as torch does; every step is recorded whatever the rate."""
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.has_rebuilt_buckets

    @property
    def _distributed_rank(self) -> int:
        return int(self.process_group.rank())

    # ---- graph and reducer

    def _set_static_graph(self) -> None:
        """Declare the graph static, before the first step."""
        if self.static_graph:
            return
        self.reducer.set_static_graph()
        self.static_graph = True

    def _remove_autograd_hooks(self) -> None:
        """From now on gradients stay local."""
        self.reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward was not completed; otherwise every backward is, when it returns."""
        self.reducer.check_finished()

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Not needed: sparse gradients find each other's coordinates."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Not needed: outputs are returned as the module made them."""
        self._ddp_sink_clone = val

    def _update_process_group(self, new_process_group: Any) -> None:
        """Reduce over another process group from now on. Local; parameters are not copied, hooks stay.

        Args:
            new_process_group: A group that contains this rank; every member must switch in the same step.
        """
        old = self.reducer
        old.remove_hooks()
        self.process_group = new_process_group
        self._process_groups = self._reduce_groups = [new_process_group]
        self._peers = Peers(
            new_process_group, f"group {new_process_group.group_name}", self.device.type == "cpu"
        )
        self._reduction.prepare(old.managed.named(), new_process_group)
        self._buffer_sync.move_to(new_process_group, self._peers)
        self._build_reducer(old.managed)
        self.reducer.timings = old.timings

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        managed = arguments.manage(self.module, self.parameters_to_ignore, self._delay_all_reduce_params)
        return list(managed.parameters), list(managed.sparse)

    def _build_debug_param_to_name_mapping(self, parameters: Iterable[Any]) -> dict[int, str]:
        return dict(enumerate(self.reducer.managed.names))

    def _get_parameters(self, m: Module, recurse: bool = True) -> Iterator[Any]:
        yield from m.parameters(recurse)

    def _check_default_group(self) -> None:
        if len(self._process_groups) > 1 or self.process_group != dist.distributed_c10d._get_default_group():
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        self._logged_error = {"has_error": 1, "error": err_msg, "iteration": 0}
        raise err_type(err_msg)


class _Logger:
    """What `ddp.logger` is used for: reading the logging data."""

    def __init__(self, wrapped: TorchSurface) -> None:
        self._wrapped = weakref.ref(wrapped)

    def _get_ddp_logging_data(self) -> Any:
        wrapped = self._wrapped()
        data = {} if wrapped is None else wrapped._get_ddp_logging_data()

        return SimpleNamespace(
            strs_map={key: value for key, value in data.items() if isinstance(value, str)},
            ints_map={key: value for key, value in data.items() if not isinstance(value, str)},
        )
