"""Methods of torch's own reducer and logger that frameworks call, and `_get_ddp_logging_data`.

Times of the logging data are nanoseconds, under torch's keys.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.collectives import backend_of
from paceline.ddp.open_forwards import Owner
from paceline.ddp.reducer import Reducer
from paceline.ddp.step import BackwardPass
from paceline.ddp.torch_compat.dynamo import refuse_compiled_autograd
from paceline.errors import ProtocolError
from paceline.observe import StepTiming


class TorchsReducer(Reducer):
    """A reducer with the methods of torch's that frameworks call."""

    _is_static = True  # whether that was the same in each

    def begin(self, owner: Owner | None = None) -> BackwardPass:
        """Begin as every reducer does, unless compiled autograd runs the backward: raise ConfigurationError then."""
        refuse_compiled_autograd()
        return super().begin(owner)

    def set_static_graph(self) -> None:
        """Declare the graph static, before the first step."""
        if self.num_steps > 0 or self.step.used_before:
            raise RuntimeError(
                f"_set_static_graph() was called after {self.num_steps} synchronized steps. The first backward is the "
                "one that counts a static graph, so call it before, or pass static_graph=True to the constructor."
            )
        self.setting.expect(self.setting.find_unused_parameters, static_graph=True)
        self.tracker.pending.expect_static_graph()

    def check_finished(self) -> None:
        """Raise if a backward began and was not completed."""
        if self.step.backward is not None:
            raise ProtocolError(
                "Expected to have finished reduction in the prior iteration before starting a new one: "
                "the last backward raised before all gradients were there."
            )

    def _get_local_used_map(self) -> Tensor:
        """Return how many ranks used each parameter in the last synchronized backward, shape (parameters,), int32."""
        words = self.verdict.status.words[: len(self.managed)]
        return words.real.round().to(torch.int32)

    def _note_unused(self, backward: BackwardPass) -> None:
        self._is_static = self._is_static and self.unused in (None, backward.unused)
        super()._note_unused(backward)

    def _ddp_graph_static(self) -> bool:
        """Return whether every backward used the same parameters here, as far as they were looked for."""
        return self._is_static or not self.setting.find_unused_parameters

    # What Lightning calls itself where a training step runs its own backwards within forward.

    def _rebuild_buckets(self) -> bool:
        """Return False. Buckets are laid out again when the first synchronized backward ends."""
        return False

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Watch these outputs of a forward that has not returned yet; without any, the first gradient tells."""
        self.open_forwards.announce_backward()
        if outputs:
            self.watch([tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None])

    def _delay_all_reduce(self) -> None:
        """Return at once: a static graph's first step is reduced when its backward ends."""


# Optimizers that step within backward (`torch.distributed.optim._apply_optimizer_in_backward`). Torch runs them as soon
# as a gradient is there, which is before it was reduced; ours run when the parameter's bucket has come back.
IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"


def take_over_optimizers(parameters: Iterable[Parameter]) -> Callable[[Parameter], None] | None:
    """Remove hooks that would run optimizers early; returns what to call on a reduced gradient, or None."""
    handles = sys.modules[IN_BACKWARD].param_to_optim_hook_handle_map if IN_BACKWARD in sys.modules else None
    if not handles:
        return None
    found = [handle for parameter in parameters for handle in handles.get(parameter, ())]
    for handle in found:
        handle.remove()
    return _step_in_backward if found else None


def _step_in_backward(parameter: Any) -> None:
    """Run the parameter's own optimizers, if it has any; `.grad` is None afterwards."""
    optimizers = getattr(parameter, "_in_backward_optimizers", None)
    if optimizers:
        for optimizer in optimizers:
            optimizer.step()
        parameter.grad = None


NAMES_IN_CPP = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}
EPOCH_NS = time.time_ns() - time.perf_counter_ns()
"""The wall clock's time at our clock's zero. It is read once, so that moments only grow."""

ENVIRONMENT = "MASTER_ADDR MASTER_PORT TORCH_DISTRIBUTED_DEBUG CUDA_VISIBLE_DEVICES"
OF_BACKEND = {
    "gloo": " GLOO_SOCKET_IFNAME GLOO_DEVICE_TRANSPORT",
    "nccl": " NCCL_SOCKET_IFNAME TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_ASYNC_ERROR_HANDLING NCCL_DEBUG NCCL_NTHREADS"
    " NCCL_IB_TIMEOUT",
}


def logging_data(wrapped: Any) -> dict[str, Any]:
    """Return a flat dictionary of strings and integers."""
    steps = wrapped.reducer.timings.recent()
    times, error = _times(steps) if steps else {}, wrapped._paceline_error
    return {**_construction(wrapped), **_buckets(wrapped), **times, **error}


class Logger:
    """The reader of the logging data, under the names of torch's `ddp.logger`."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = weakref.ref(wrapped)

    def _get_ddp_logging_data(self) -> Any:
        wrapped = self._wrapped()
        data = {} if wrapped is None else wrapped._get_ddp_logging_data()

        return SimpleNamespace(
            strs_map={key: value for key, value in data.items() if isinstance(value, str)},
            ints_map={key: value for key, value in data.items() if not isinstance(value, str)},
        )


def _construction(wrapped: Any) -> dict[str, Any]:
    parameters, group = wrapped.reducer.managed.parameters, wrapped.process_group
    backend = backend_of(group)
    variables = (ENVIRONMENT + OF_BACKEND.get(backend, "")).split()
    dtypes = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in parameters)
    flags = ("find_unused_parameters", "gradient_as_bucket_view", "is_multi_device_module")
    if_asked = {
        "comm_hook": wrapped._paceline_hook_name,
        "join_uneven_inputs": int(wrapped._paceline_coordinator.joining.was_used),
        "static_graph": int(wrapped.static_graph),
    }
    return {
        "world_size": group.size(),
        "rank": group.rank(),
        "module_name": type(wrapped.module).__name__,
        "device_ids": _join(wrapped.device_ids or []),
        "output_device": -1 if wrapped.output_device is None else wrapped.output_device,
        "broadcast_buffers": int(wrapped.forward_sync_buffers),
        "has_sync_bn": int(wrapped._paceline_coordinator.has_sync_batch_norm),
        "bucket_sizes": _join(wrapped._paceline_initial_bucket_sizes),
        "bucket_cap_bytes": wrapped.bucket_bytes_cap,
        "dtypes": _join(NAMES_IN_CPP.get(name, name) for name in dtypes),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "iteration": max(0, wrapped.reducer.num_steps - 1),  # torch counts the step that is under way
        "backend_name": backend,
        "gloo_num_threads": 2,
        **{name: int(getattr(wrapped, name)) for name in flags},
        **{name.lower().replace("torch_nccl", "nccl"): os.environ.get(name, "N/A") for name in variables},
        **{key: value for key, value in if_asked.items() if value},
    }


def _buckets(wrapped: Any) -> dict[str, Any]:
    reducer = wrapped.reducer
    buckets, managed = reducer.buckets, reducer.managed
    unused = [managed.parameters[i] for b in buckets for i in b.unused_members() if not managed.sparse[i]]
    rebuilt = {
        "rebuilt_bucket_sizes": _join(bucket.size_bytes for bucket in buckets),
        "rebuilt_per_bucket_param_indices": _join(" ".join(map(str, bucket.members)) for bucket in buckets),
    }
    return {
        "has_rebuilt_buckets": int(reducer.cuts.has_followed),
        "prev_iteration_grad_ready_order_indices": _join(dict.fromkeys(reducer.tracker.order)),
        "num_buckets_reduced": len(buckets) if reducer.num_steps else 0,
        "unused_parameter_size": sum(p.numel() * p.element_size() for p in unused),
        **(rebuilt if reducer.cuts.has_followed else {}),
    }


def _times(steps: Sequence[StepTiming]) -> dict[str, int]:
    moments, durations = _moments(steps[-1]), [_durations(_moments(step)) for step in steps]
    averages = {f"avg_{key}": int(mean(each[key] for each in durations)) for key in durations[0]}
    return moments | durations[-1] | averages


def _moments(step: StepTiming) -> dict[str, int]:
    """Return torch's moments; communication starts with the first launch."""
    moments_s = {
        "forward_compute_time_start": step.started_s - step.last_forward_s,
        "backward_compute_time_start": step.started_s,
        "backward_compute_time_end": step.started_s + step.backward_s,
        "backward_comm_time_start": step.buckets[0].launched_s,
        "backward_comm_time_end": max(bucket.done_s for bucket in step.buckets),
    }
    return {key: EPOCH_NS + int(moment_s * 1e9) for key, moment_s in moments_s.items()}


def _durations(moments: dict[str, int]) -> dict[str, int]:
    """Return torch's durations; communication overlaps until backward has computed."""
    forward, backward, computed, launched, done = moments.values()
    return {
        "forward_compute_time": backward - forward,
        "backward_compute_time": computed - backward,
        "backward_comm_time": done - launched,
        "backward_compute_comm_overlap_time": max(0, min(done, computed) - launched),
    }


def _join(values: Any) -> str:
    return ", ".join(map(str, values))
