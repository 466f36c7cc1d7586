"""Fingerprints of a model's numbers: equal bits give equal ones, and ranks that trained alike have the same.

Of each tensor a part is taken, at most some thousand elements evenly spaced, so that a large model costs a millisecond.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Module

_MOST_BYTES = 4096  # of a tensor
_MOST_TENSORS = 256


def fingerprint(module: Module) -> tuple[str, str]:
    """Return those of the parameters and of the buffers. Local; waits for a device."""
    return _of(module.parameters()), _of(module.buffers())


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are. Waits for a device."""
    return bool((tensor._values() if tensor.is_sparse else tensor).isfinite().all())


def _of(tensors: Iterable[Tensor]) -> str:
    every = [x.detach() for x in tensors if x.numel() and x.layout is torch.strided and not x.is_complex()]
    every = every[:: max(1, -(-len(every) // _MOST_TENSORS))]
    digest = hashlib.blake2b(digest_size=8)
    for tensor in every:
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()
        stride = max(1, flat.numel() * flat.element_size() // _MOST_BYTES)
        digest.update(flat[::stride].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if every else ""
