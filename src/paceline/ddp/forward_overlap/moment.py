"""Torch's settings of the moment of a call that is put off: whoever completes it may be in any other context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

DEVICE = "cpu"  # where all parameters are


@dataclass(frozen=True)
class Moment:
    """Which of torch's modes were on.

    Attributes:
        has_inference_mode: `torch.inference_mode()`.
        has_grad: Whether autograd recorded.
        has_autocast: `torch.autocast`, to this:
        autocast_dtype: Of its operations.
    """

    has_inference_mode: bool
    has_grad: bool
    has_autocast: bool
    autocast_dtype: torch.dtype

    @classmethod
    def now(cls) -> Moment:
        """This thread's settings."""
        return cls(
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(DEVICE),
            torch.get_autocast_dtype(DEVICE),
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run what is within on this thread as at that moment."""
        with (
            torch.inference_mode(self.has_inference_mode),
            torch.set_grad_enabled(self.has_grad),
            torch.autocast(DEVICE, self.autocast_dtype, enabled=self.has_autocast),
        ):
            yield


PLAIN = Moment(
    has_inference_mode=False,
    has_grad=False,
    has_autocast=False,
    autocast_dtype=torch.get_autocast_dtype(DEVICE),
)
"""As in a backward that attaches gradients."""


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
