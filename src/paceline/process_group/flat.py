"""A tensor of any layout, on any device, as the flat host memory that a collective works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor


@contextmanager
def flat_view(tensor: Tensor, is_output: bool) -> Iterator[Tensor]:
    """Yield the values as a contiguous 1-D CPU tensor; afterwards they are in `tensor`, if it is an output.

    It is the tensor's own memory where that is contiguous and on the host; else a copy, pinned for a GPU.
    """
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield tensor.detach().view(-1)
        return
    flat = _to_host(tensor).view(-1)
    yield flat
    if is_output:
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.shape), non_blocking=tensor.is_cuda)


@contextmanager
def flat_views(tensors: Sequence[Tensor], are_outputs: bool) -> Iterator[list[Tensor]]:
    """As `flat_view`, of several."""
    with ExitStack() as stack:
        yield [stack.enter_context(flat_view(tensor, are_outputs)) for tensor in tensors]


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.detach().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    host.copy_(tensor.detach())  # waits for the current stream
    return host
