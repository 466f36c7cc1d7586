"""`_get_ddp_logging_data()`: what the module is and how its steps went, under torch's keys."""

from __future__ import annotations

import os
import time
import weakref
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch

from paceline.comm.collectives import backend_of
from paceline.ddp.reducer import Reducer
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
"""What turns our moments into those of a clock on the wall, as torch's are; one for all, so that they only grow."""

ENVIRONMENT = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
OF_GLOO = {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"}
OF_NCCL = {
    "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
    "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
    "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "nccl_debug": "NCCL_DEBUG",
    "nccl_nthreads": "NCCL_NTHREADS",
    "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
}


def logging_data(wrapped: Any) -> dict[str, Any]:
    """A flat dictionary of strings and integers; times in nanoseconds."""
    error: dict[str, Any] = wrapped._paceline_error
    return _construction(wrapped) | _environment(wrapped) | _used(wrapped) | _runtime(wrapped) | error


class Logger:
    """What `ddp.logger` is used for: reading the logging data."""

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
    reducer: Reducer = wrapped.reducer
    parameters = reducer.managed.parameters
    return {
        "world_size": wrapped.process_group.size(),
        "rank": wrapped.process_group.rank(),
        "module_name": type(wrapped.module).__name__,
        "device_ids": _join(wrapped.device_ids or []),
        "output_device": -1 if wrapped.output_device is None else wrapped.output_device,
        "broadcast_buffers": int(wrapped.forward_sync_buffers),
        "has_sync_bn": int(wrapped._paceline_steps.has_sync_batch_norm),
        "bucket_sizes": _join(wrapped._paceline_initial_bucket_sizes),
        "bucket_cap_bytes": wrapped.bucket_bytes_cap,
        "dtypes": _join(dict.fromkeys(_name_in_cpp(p.dtype) for p in parameters)),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "find_unused_parameters": int(wrapped.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapped.gradient_as_bucket_view),
        "is_multi_device_module": int(wrapped.is_multi_device_module),
        "iteration": max(0, reducer.num_steps - 1),  # torch counts the step that is under way
        "backend_name": backend_of(wrapped.process_group),
        "gloo_num_threads": 2,
    }


def _used(wrapped: Any) -> dict[str, Any]:
    """What is there only where it was asked for."""
    asked = {
        "comm_hook": wrapped._paceline_hook_name,
        "join_uneven_inputs": int(wrapped._paceline_steps.joining.was_used),
        "static_graph": int(wrapped.static_graph),
    }
    return {key: value for key, value in asked.items() if value}


def _name_in_cpp(dtype: torch.dtype) -> str:
    plain = str(dtype).removeprefix("torch.")
    return NAMES_IN_CPP.get(plain, plain)


def _environment(wrapped: Any) -> dict[str, Any]:
    of_backend = {"gloo": OF_GLOO, "nccl": OF_NCCL}.get(backend_of(wrapped.process_group), {})
    return {key: os.environ.get(variable, "N/A") for key, variable in (ENVIRONMENT | of_backend).items()}


def _runtime(wrapped: Any) -> dict[str, Any]:
    reducer: Reducer = wrapped.reducer
    buckets, parameters = reducer.buckets, reducer.managed.parameters
    rebuilt = reducer.cuts.has_followed
    data: dict[str, Any] = {
        "has_rebuilt_buckets": int(rebuilt),
        "prev_iteration_grad_ready_order_indices": _join(dict.fromkeys(reducer.tracker.order)),
        "num_buckets_reduced": len(buckets) if reducer.num_steps else 0,
        "unused_parameter_size": sum(
            parameters[index].numel() * parameters[index].element_size()
            for bucket in buckets
            for index in bucket.untouched_members()
            if not reducer.managed.sparse[index]
        ),
    }
    if rebuilt:
        data["rebuilt_bucket_sizes"] = _join(bucket.size_bytes for bucket in buckets)
        data["rebuilt_per_bucket_param_indices"] = _join(_words(bucket.members) for bucket in buckets)
    steps = reducer.timings.recent()
    if steps:
        last, times = _times(steps[-1]), [_times(step) for step in steps]
        data |= last | {f"avg_{key}": int(mean(step[key] for step in times)) for key in last}
        data |= _moments(steps[-1])
    return data


def _times(step: StepTiming) -> dict[str, int]:
    """Durations as torch defines them: communication from the first launch on, overlap until backward has computed."""
    moments = _moments(step)
    started, ended = moments["backward_comm_time_start"], moments["backward_comm_time_end"]
    return {
        "forward_compute_time": _ns(step.last_forward_s),
        "backward_compute_time": _ns(step.backward_s),
        "backward_comm_time": ended - started,
        "backward_compute_comm_overlap_time": max(
            0, min(ended, moments["backward_compute_time_end"]) - started
        ),
    }


def _moments(step: StepTiming) -> dict[str, int]:
    started = step.started_s
    moments = {
        "forward_compute_time_start": started - step.last_forward_s,
        "backward_compute_time_start": started,
        "backward_compute_time_end": started + step.backward_s,
        "backward_comm_time_start": step.buckets[0].launched_s,
        "backward_comm_time_end": max(bucket.done_s for bucket in step.buckets),
    }
    return {key: EPOCH_NS + _ns(moment_s) for key, moment_s in moments.items()}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _join(values: Any, separator: str = ", ") -> str:
    return separator.join(str(value) for value in values)


def _words(values: Any) -> str:
    return _join(values, " ")
