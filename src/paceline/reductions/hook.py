"""Runs a torch communication hook, `hook(state, bucket) -> Future[Tensor]`, as a reduction.

The hooks at the end replace torch's quantization hooks, which expect NCCL's nesting of a gathered result. They have the
same signature and results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Work, all_gather
from paceline.errors import HookError
from paceline.reductions.reduction import Message, Reduction

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


class GradBucket:
    """The bucket that a hook gets: the methods of `torch.distributed.GradBucket`, which Python cannot create."""

    def __init__(self, message: Message) -> None:
        self._message = message
        self._buffer = message.body

    def index(self) -> int:
        return self._message.index

    def buffer(self) -> Tensor:
        """Return this rank's gradients, shape (N,), not yet divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer that was set last, one for each parameter."""
        ours, flat = self._message.gradients, self._message.flat
        if self._buffer.dtype == flat.dtype and self._buffer.data_ptr() == flat.data_ptr():
            return list(ours)
        pieces = self._buffer.split([gradient.numel() for gradient in ours])
        return [piece.view(gradient.shape) for piece, gradient in zip(pieces, ours, strict=True)]

    def parameters(self) -> Sequence[Parameter]:
        return list(self._message.parameters)

    def is_last(self) -> bool:
        return self._message.is_last


class HookReduction(Reduction):
    """Calls a user's hook on each bucket.

    Args:
        state: Passed to the hook as its first argument.
        hook: Returns a future whose value has the shape of `bucket.buffer()`. It divides by the number of ranks itself.
        overlaps: Whether the hook may be called while the future of the previous bucket is not done. False for hooks
            that launch further collectives in callbacks: on Gloo callbacks run on the backend's threads, so ranks
            would launch their collectives in different orders.
    """

    def __init__(self, state: Any, hook: Hook, overlaps: bool) -> None:
        self.state = state
        self.hook = hook
        self._overlaps = overlaps
        self._previous: torch.futures.Future[Tensor] | None = None

    def why_not_over(self, process_group: ProcessGroup | None) -> str:
        if process_group is None:
            return (
                "HookReduction runs a function of the script, which may keep ranks or gradients of its own. Leave out "
                "the hook."
            )
        held = getattr(self.state, "process_group", None)
        if isinstance(held, ProcessGroup) and held is not process_group:
            return (
                f"the state of the communication hook {self.name} has a process_group, over which the hook would go on "
                "to communicate with the ranks of before. Set it to the new group first: state.process_group = group."
            )
        return ""

    def follow(
        self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup, are_alike: bool
    ) -> None:
        """Replace a state that is itself a process group by the new group."""
        self._previous = None
        if isinstance(self.state, ProcessGroup):
            self.state = process_group

    def begin_step(self, num_ranks: int, active_ratio: float = 1.0, share: float | None = None) -> float:
        return 1.0  # the hook divides

    def launch(self, message: Message) -> Work:
        if self._previous is not None and not self._overlaps and message.index > 0:
            self._previous.wait()
        future = self.hook(self.state, GradBucket(message))
        if not isinstance(future, torch._C.Future):  # the base of every future of torch's
            raise HookError(
                f"callback must return a torch.futures.Future object, but got {type(future)}. "
                f"The communication hook {self.name} was called on bucket {message.index}; "
                "wrap a value that is already there with Future.set_result."
            )
        self._previous = future
        return _HookWork(future, message.body, self.name)

    @property
    def name(self) -> str:
        return getattr(self.hook, "__qualname__", type(self.hook).__name__)


class _HookWork(Work):
    """The handle of a hook's future, whose value replaces the bucket's gradients."""

    def __init__(self, future: torch.futures.Future[Any], body: Tensor, hook: str) -> None:
        self._future, self._body, self._hook = future, body, hook

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait as `Work.wait`. A future cannot be waited for in slices, so the time limit is the process group's.

        Raises HookError if the hook's future has failed: a peer may be lost, or the hook's callback has raised.
        """
        try:
            result = self._future.wait()
        except RuntimeError as error:
            raise HookError(
                f"the future of the communication hook {self._hook} has failed: {error}"
            ) from error
        if isinstance(result, (list, tuple)):
            result = result[0]
        if result.data_ptr() != self._body.data_ptr() or result.dtype != self._body.dtype:
            self._body.copy_(result.view(-1))
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: callback())


def is_users_hook(reduction: Reduction) -> bool:
    """Return whether a reduction, or the one that it measures, calls a function of the user's."""
    return isinstance(getattr(reduction, "inner", reduction), HookReduction)


def quantize_per_tensor(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Return the mean of all ranks' gradients, quantized to 8 bits with one scale and zero point for each bucket."""
    return _gather_quantized(process_group, bucket.buffer(), bucket.buffer().view(1, -1))


def quantize_per_channel(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Return the mean as `quantize_per_tensor` does, with a scale and zero point for every `bucket_size` elements."""
    flat = bucket.buffer()
    padding = bucket_size - flat.numel() % bucket_size
    channels = torch.nn.functional.pad(flat, (0, padding)).view(-1, bucket_size)
    return _gather_quantized(process_group, flat, channels)


def _gather_quantized(
    process_group: dist.ProcessGroup | None, flat: Tensor, channels: Tensor
) -> torch.futures.Future[torch.Tensor]:
    """All-gather scales, zero points and integers of `channels` (padded rows); dequantize and average."""
    group = process_group if process_group is not None else dist.distributed_c10d._get_default_group()
    scales, zero_points = _affine_8bit(channels)
    levels = (torch.round(channels / scales[:, None]) + zero_points[:, None]).clamp_(0, 255).to(torch.uint8)
    header = torch.cat([scales, zero_points]).float().view(torch.uint8)
    payload = torch.cat([header, levels.view(-1)])
    payloads = [torch.empty_like(payload) for _ in range(group.size())]
    gathering = all_gather(payloads, payload, group)

    def decode(_: Any) -> Tensor:
        total = torch.zeros_like(channels, dtype=torch.float32)
        for received in payloads:
            scale, zero_point = received[: header.numel()].clone().view(torch.float32).view(2, -1, 1)
            total += scale * (received[header.numel() :].view(channels.shape).float() - zero_point)
        return (total.view(-1)[: flat.numel()] / group.size()).to(flat.dtype)

    return cast("torch.futures.Future[Tensor]", gathering.future().then(decode))


def _affine_8bit(channels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point that map each channel's range, widened to contain 0, onto 0..255."""
    low = channels.amin(dim=1).clamp(max=0.0)
    high = channels.amax(dim=1).clamp(min=0.0)
    scales = ((high - low) / 255.0).clamp(min=torch.finfo(torch.float32).eps)
    zero_points = (-torch.round(low / scales)).clamp(0, 255)
    return scales, zero_points
