"""Registering torch's communication hooks: the checks, and stand-ins where torch's own hook needs NCCL."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

from paceline.reductions import HookReduction
from paceline.reductions.hook import Hook, quantize_per_channel, quantize_per_tensor

# Torch's hooks that misread Gloo's futures. Each has a stand-in that computes the same.
STAND_INS: dict[Callable[..., Any], Callable[..., Any]] = {
    quantization_hooks.quantization_pertensor_hook: quantize_per_tensor,
    quantization_hooks.quantization_perchannel_hook: quantize_per_channel,
}

# Hooks whose collectives are all started by the call itself, so that several buckets may be under way. A hook of one's
# own says so by an attribute `starts_all_at_once = True`.
STARTS_ALL_AT_ONCE = {
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
    quantize_per_tensor,
    quantize_per_channel,
}


def make_reduction(state: Any, hook: Any, backend: str) -> HookReduction:
    """Check a hook as torch does, and make a reduction of it. Raises TypeError and ValueError in torch's words."""
    check_hook(hook)
    portable = _portable(hook)
    innermost = portable.func if isinstance(portable, functools.partial) else portable
    is_known = any(innermost is known for known in STARTS_ALL_AT_ONCE)
    overlaps = backend == "nccl" or is_known or getattr(innermost, "starts_all_at_once", False)
    return HookReduction(state, portable, overlaps)


def check_hook(hook: Any) -> None:
    """Refuse what cannot be a communication hook."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    positional = list(signature.parameters.values())
    bucket = signature.parameters.get("bucket") or (positional[1] if len(positional) > 1 else None)
    if bucket is None:
        raise ValueError(
            f"Communication hook: expected hook(state, bucket), got {getattr(hook, '__qualname__', hook)}{signature}."
        )
    known = (inspect.Parameter.empty, dist.GradBucket, Any, "dist.GradBucket", "GradBucket")
    if bucket.annotation not in known:
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned, future = signature.return_annotation, torch.futures.Future[torch.Tensor]
    if returned not in (inspect.Parameter.empty, future, Any) and not isinstance(returned, str):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )


def name_of(hook: Any) -> str:
    """Return a hook's name in torch's logging data: the qualified name of the function, or of its class."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _portable(hook: Any) -> Hook:
    if isinstance(hook, functools.partial) and hook.func in STAND_INS:
        return functools.partial(STAND_INS[hook.func], *hook.args, **hook.keywords)
    try:
        stand_in = STAND_INS.get(hook)
    except TypeError:  # an unhashable callable object
        stand_in = None
    return stand_in or hook


def forget_buckets(state: Any) -> None:
    """Let torch's PowerSGD begin again: a copied model cuts its buckets in another order until its first step ends."""
    if isinstance(state, powerSGD_hook.PowerSGDState):
        state.iter = 0
        for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            memory.clear()


def builtin_hook(kind: dist.BuiltinCommHookType) -> Hook:
    """Return the hook that torch has in C++ under this name."""
    if kind == dist.BuiltinCommHookType.FP16_COMPRESS:
        return default_hooks.fp16_compress_hook
    return default_hooks.allreduce_hook
