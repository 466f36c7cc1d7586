"""Notes phases that belong to the process: loading, optimizers, checkpoints, garbage collection.

Torch's loader iterators and `torch.save` are patched. Optimizers are noted by the hooks that the timings have for all
of them, and Python's collector has a list of callbacks. It happens once per recorded process.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import dataloader

from paceline.observe import spans
from paceline.observe.timings import watch_optimizers

_LEAST_GARBAGE_S = 1e-4  # collections of the youngest objects are not worth a line

_is_watching = False


def watch_phases() -> None:
    """Note them from now on. May be called often."""
    global _is_watching  # noqa: PLW0603  once a process
    if _is_watching:
        return
    _is_watching = True
    loader: Any = dataloader._BaseDataLoaderIter
    loader.__next__ = _timed("loading", loader.__next__)
    torch.save = _timed("checkpoint", torch.save)
    gc.callbacks.append(_Garbage().on_collection)
    watch_optimizers()


def _timed(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spans.note(phase, began_s, time.perf_counter())

    return timed


class _Garbage:
    def __init__(self) -> None:
        self._began_s = 0.0

    def on_collection(self, stage: str, _: dict[str, int]) -> None:
        now_s = time.perf_counter()
        if stage == "start":
            self._began_s = now_s
        elif now_s - self._began_s > _LEAST_GARBAGE_S:
            spans.note("garbage", self._began_s, now_s)
