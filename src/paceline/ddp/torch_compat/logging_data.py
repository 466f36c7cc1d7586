"""`_get_ddp_logging_data()`: facts of the module and of its last steps, under torch's keys. Times are nanoseconds."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from statistics import mean
from types import SimpleNamespace
from typing import Any

from paceline.comm.collectives import backend_of
from paceline.observe import StepTiming

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
    """Reads the logging data, as `ddp.logger` of torch's class does."""

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
    untouched = [
        managed.parameters[i] for b in buckets for i in b.untouched_members() if not managed.sparse[i]
    ]
    rebuilt = {
        "rebuilt_bucket_sizes": _join(bucket.size_bytes for bucket in buckets),
        "rebuilt_per_bucket_param_indices": _join(" ".join(map(str, bucket.members)) for bucket in buckets),
    }
    return {
        "has_rebuilt_buckets": int(reducer.cuts.has_followed),
        "prev_iteration_grad_ready_order_indices": _join(dict.fromkeys(reducer.tracker.order)),
        "num_buckets_reduced": len(buckets) if reducer.num_steps else 0,
        "unused_parameter_size": sum(p.numel() * p.element_size() for p in untouched),
        **(rebuilt if reducer.cuts.has_followed else {}),
    }


def _times(steps: Sequence[StepTiming]) -> dict[str, int]:
    """Return the last step's moments and durations, and the durations' averages over the kept steps."""
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
