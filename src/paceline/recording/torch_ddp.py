"""Records steps of torch's own DDP in an unchanged script: by hooks on its parameters, never by a communication hook.

A hook on a parameter notes when autograd has finished its gradient, which is before torch's reducer sees it. The end of
the step is when `torch.autograd.backward` returns. A communication hook in Python would also say when each bucket was
launched, at 5 % of a step (docs/notebook/doctor.md).

Whether gradients are finite is not looked at: a backward's loss on the CPU is, in 1 us. Only after a loss that is not
does it look for the parameter.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.observe import spans
from paceline.observe.run_records import Labels
from paceline.recording.model_facts import BatchCounts, is_finite, layer_of_each
from paceline.recording.recorder import (
    Recorder,
    Work,
    folder_of_this_rank,
    header_of_rank,
    timed,
    watch_phases,
)

_recorded: RecordedTorchDDP | None = None
"""Of this process: whose steps are recorded."""
_undo: list[Callable[[], None]] = []
"""Takes the patches back."""


def record_torch_ddp() -> None:
    """Record the training of the first torch `DistributedDataParallel` that this process makes from now on."""
    made: Any = TorchDDP.__init__

    @functools.wraps(made)
    def init(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        folder = folder_of_this_rank()
        if folder is not None:
            device = next((p.device.type for p in self.parameters()), "cpu")
            header = header_of_rank(folder, "torch", device, dist.get_rank(), dist.get_world_size())
            RecordedTorchDDP(self, Recorder(header, folder))

    TorchDDP.__init__ = init  # type: ignore[method-assign]


class RecordedTorchDDP:
    """The hooks on one wrapped model, and its step under way. A process records one model: the latest."""

    def __init__(self, wrapper: TorchDDP, recorder: Recorder) -> None:
        global _recorded  # noqa: PLW0603  one a process
        self.wrapper, self._recorder = wrapper, recorder
        self._batch = BatchCounts()  # of the step under way
        self.synchronizes = False  # whether the backward of the last forward does
        labels, self._layer_of = layer_of_each(wrapper.module)
        self._suspect: Parameter | None = None  # had a gradient that was not finite, of a loss that was not
        self._has_blamed = False  # said so
        sizes = [0] * len(labels)
        for parameter, layer in self._layer_of:
            sizes[layer] += parameter.nbytes
        recorder.name(Labels(tuple(labels), tuple(sizes), getattr(wrapper, "bucket_bytes_cap", 0)))
        self._ready_s = [0.0] * len(labels)
        self.last_s = 0.0  # when a gradient was ready last; 0 before the first one of a backward
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(layer))
            for parameter, layer in self._layer_of
        ]
        if _recorded is not None:
            _recorded.detach()
        _recorded = self
        _patch()

    def detach(self) -> None:
        """End the recording. May be called twice."""
        global _recorded  # noqa: PLW0603  one a process
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if _recorded is self:
            _recorded = None
            while _undo:
                _undo.pop()()

    def _gradient_hook(self, layer: int) -> Callable[[Tensor], None]:
        ready_s, clock = self._ready_s, time.perf_counter

        def hook(_: Tensor) -> None:
            ready_s[layer] = self.last_s = clock()

        return hook

    def begin_forward(self, args: Any, kwargs: Any) -> None:
        """Note the begin of a forward that may be differentiated."""
        begins_step = not self._batch.has_begun
        self._batch.add(args, kwargs)
        if begins_step:
            self._look_at_health()

    def end_backward(self, began_s: float, ended_s: float, loss: object) -> None:
        """Record a backward that has returned; this model took part if it got a gradient."""
        if not self.last_s:
            return
        if self._suspect is None and _is_not_finite(loss):
            self._suspect = self._first_not_finite()
        spans.note("backward", began_s, ended_s)
        if not self.synchronizes:
            return
        batch, self._batch = self._batch, BatchCounts()
        marks = [(layer, at_s) for layer, at_s in enumerate(self._ready_s) if at_s > began_s]
        marks.sort(key=lambda mark: mark[1])
        self._recorder.end_step(Work(self.last_s, ended_s, (), tuple(marks), batch.samples, batch.tokens))

    def _first_not_finite(self) -> Parameter | None:
        """Return the parameter whose gradient was the first that is not finite: by its layer, of a layer the last."""
        bad = [
            (self._ready_s[layer], -i)
            for i, (parameter, layer) in enumerate(self._layer_of)
            if parameter.grad is not None and not is_finite(parameter.grad)
        ]
        return self._layer_of[-min(bad)[1]][0] if bad else None

    def _look_at_health(self) -> None:
        suspect, self._suspect = self._suspect, None
        # If the parameter is finite, the step was skipped.
        if suspect is not None and not self._has_blamed and not is_finite(suspect):
            self._has_blamed = True
            names = [name for name, x in self.wrapper.module.named_parameters() if x is suspect]
            self._recorder.note_health(not_finite=names[0] if names else "a parameter")
        self._recorder.look_at(self.wrapper.module)


def _is_not_finite(loss: object) -> bool:
    """Return whether a CPU loss is not finite. On an accelerator this would wait for the device."""
    return type(loss) is Tensor and loss.is_cpu and loss.numel() == 1 and not math.isfinite(loss.item())


def _patch() -> None:
    """Patch classes and functions, not the wrapper, so that its copies and pickles contain nothing of Paceline's."""
    if not _undo:
        watch_phases()
        _replace(TorchDDP, "forward", _around_forward)
        _replace(TorchDDP, "_sync_buffers", functools.partial(timed, "waiting"))  # for rank 0's buffers
        _replace(torch.autograd, "backward", _around_backward)  # Tensor.backward looks it up there


def _replace(home: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    before = getattr(home, name)
    ours = around(before)
    setattr(home, name, ours)

    def undo() -> None:
        if getattr(home, name) is ours:  # otherwise other code has wrapped it since
            setattr(home, name, before)

    _undo.append(undo)


def _around_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def noting(wrapper: TorchDDP, *args: Any, **kwargs: Any) -> Any:
        recorded = _recorded
        if recorded is None or wrapper is not recorded.wrapper or not torch.is_grad_enabled():
            return forward(wrapper, *args, **kwargs)
        recorded.begin_forward(args, kwargs)
        began_s = time.perf_counter()
        try:
            return forward(wrapper, *args, **kwargs)
        finally:
            spans.note("forward", began_s, time.perf_counter())
            recorded.synchronizes = wrapper.require_backward_grad_sync

    return noting


def _around_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def noting(*args: Any, **kwargs: Any) -> Any:
        recorded = _recorded
        if recorded is None:
            return backward(*args, **kwargs)
        began_s = time.perf_counter()
        recorded.last_s = 0.0
        result = backward(*args, **kwargs)
        recorded.end_backward(began_s, time.perf_counter(), args[0] if args else None)
        return result

    return noting
