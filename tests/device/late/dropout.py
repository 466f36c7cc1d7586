"""Dropout as the CPU does it. Torch has a fused operator for foreign devices, which draws from no generator."""

from __future__ import annotations

import torch
from torch import Tensor


def register(library: torch.library.Library) -> None:
    """Give the device's autograd `dropout`."""
    library.impl("dropout", _dropout, "AutogradPrivateUse1")


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), device=x.device, dtype=x.dtype)
    noise = torch.empty_like(x, requires_grad=False).bernoulli_(1 - p).div_(1 - p)
    return x * noise
