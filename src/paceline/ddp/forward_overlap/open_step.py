"""A step whose gradients are under way: what is done with each bucket that has arrived, and in which of torch's modes.

Calls are completed with torch's settings of the moment when they were made. The thread that completes one may be in
others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.device import accelerator_type
from paceline.ddp.bucket import Bucket
from paceline.ddp.forward_overlap.piece_sync import PieceSync
from paceline.ddp.step import BackwardPass
from paceline.errors import ProtocolError


@dataclass(frozen=True)
class Moment:
    """The modes of torch that were on at one moment."""

    has_inference_mode: bool  # `torch.inference_mode()`
    has_grad: bool  # whether autograd recorded
    # `torch.autocast`, by type of device: whether it was on, and to which dtype
    autocasts: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Moment:
        """Return this thread's settings."""
        autocasts = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds()
        )
        return cls(torch.is_inference_mode_enabled(), torch.is_grad_enabled(), autocasts)

    @classmethod
    def plain(cls) -> Moment:
        """Return the settings of a backward that attaches gradients."""
        autocasts = tuple((kind, False, torch.get_autocast_dtype(kind)) for kind in _kinds())
        return cls(has_inference_mode=False, has_grad=False, autocasts=autocasts)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run what is within on this thread as at that moment."""
        with (
            torch.inference_mode(self.has_inference_mode),
            torch.set_grad_enabled(self.has_grad),
            ExitStack() as stack,
        ):
            for kind, is_on, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype, enabled=is_on))
            yield


@functools.cache
def _kinds() -> tuple[str, ...]:
    """Return the types of devices on which operations may be cast."""
    return tuple(kind for kind in ("cpu", accelerator_type()) if kind is not None)


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Run what is within as if this thread were in no transform of `torch.func`, in no trace, and counted nothing.

    A reader may be. And no argument is looked at by `__torch_function__`, that of outstanding parameters included.
    """
    with ExitStack() as stack:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # noqa: PLC0415 (rare)

            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._len_torch_dispatch_stack():
            from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415 (rare)

            stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        yield


Action = Callable[[Sequence[Parameter]], None]
"""Something to be done with the parameters of a bucket that has arrived."""


@dataclass
class DeferredStep:
    """The deferred step of one module, on one rank."""

    sync: PieceSync  # its gradients
    backward: BackwardPass  # its own; the next step's may be under way
    left: set[int]  # indices of buckets that have not been completed
    # what to do with each, in this order, and when that was called
    actions: list[tuple[Moment, Action]] = field(default_factory=list)
    # ids of parameters whose gradients are dropped on arrival, after the actions
    dropped: set[int] = field(default_factory=set)
    # by parameters' ids, while others stand in for them: their versions, and their memory
    hidden: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    waited_s: float = 0.0  # so far

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self.sync.buckets

    def apply(self, bucket: Bucket) -> None:
        """Give a bucket that has arrived its gradients, and step it; once: after an error they are undefined. Local."""
        with outside_transforms():
            with Moment.plain().again():
                self._restore(bucket)
                self.backward.set_gradients(bucket)
            for moment, action in self.actions:
                with moment.again():
                    action(bucket.parameters)

    def drop(self, ids: set[int]) -> None:
        """Drop these parameters' gradients on arrival, after what was called before. Local."""
        self.dropped |= ids

    def note_wait(self, seconds: float) -> None:
        """Add the seconds that a thread has waited for a bucket."""
        self.waited_s += seconds

    def hide(self, cover: NaNMask) -> None:
        """Let reads that torch's Python functions do not see find NaN, not the old step."""
        with torch.no_grad(), torch.inference_mode(mode=False), torch._C.DisableTorchFunction():
            for index in self.left:
                for parameter in self.buckets[index].parameters:
                    self.hidden[id(parameter)] = parameter._version, parameter.data
                    parameter.data = cover.of(parameter)

    def _restore(self, bucket: Bucket) -> None:
        written = False
        for parameter in bucket.parameters:
            if (hidden := self.hidden.pop(id(parameter), None)) is not None:
                version, parameter.data = hidden
                written = written or version != parameter._version
        if written:
            raise ProtocolError(
                "overlap_forward: a parameter was written while its step was outstanding, by code that bypasses "
                "torch's Python functions. The written values are lost. Call model.flush() before such code."
            )


class NaNMask:
    """Tensors of NaN in the shapes of parameters, over one memory: that of the largest."""

    def __init__(self) -> None:
        self._nans: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def of(self, parameter: Tensor) -> Tensor:
        """Return the NaNs that replace a parameter while its step is outstanding. Local."""
        steps = zip(parameter.shape, parameter.stride(), strict=True)
        extent = max(0, sum((size - 1) * stride for size, stride in steps)) + 1
        kind = parameter.dtype, parameter.device
        nans = self._nans.get(kind)
        if nans is None or nans.numel() < extent:
            nan = complex(math.nan, math.nan) if parameter.is_complex() else math.nan
            nans = self._nans[kind] = torch.full((extent,), nan, dtype=kind[0], device=kind[1])
        return nans.as_strided(parameter.shape, parameter.stride())


def zero_gradients(parameters: Iterable[Tensor], set_to_none: bool) -> None:
    """Drop or zero these gradients, as `Optimizer.zero_grad` does."""
    for parameter in parameters:
        if set_to_none or parameter.grad is None:
            parameter.grad = None
        else:
            parameter.grad = parameter.grad.detach_()
            parameter.grad.zero_()
