"""How a gradient lies in a flat buffer: as which numbers, in which strides, and which gradients are large."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.reductions.reduction import real_numel

LARGE_GRADIENT_BYTES = 32 * 1024


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's strides where they leave no gaps (channels_last is kept), else similar ones that leave none."""
    return torch.empty_like(parameter, device="meta").stride()


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a buffer for gradients of this dtype is made of."""
    return dtype.to_real() if dtype.is_complex else dtype


def is_large(parameter: Tensor) -> bool:
    """Whether the gradient is worth a copy of its own; small ones are handled together."""
    return parameter.numel() * parameter.element_size() > LARGE_GRADIENT_BYTES


def gradient_views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Alias consecutive pieces of `flat`, one a parameter, with its shape, dtype and dense strides.

    Args:
        flat: Real, contiguous, at least as long as all parameters together.
        parameters: Of one dtype, in the order in which their gradients lie in `flat`.

    Returns:
        The views; those of small gradients share one version counter.
    """
    storage, offset = flat.untyped_storage(), flat.storage_offset()
    views: list[Tensor] = []
    counter = flat.new_empty(0, dtype=parameters[0].dtype) if parameters else flat
    for parameter in parameters:
        place = offset // 2 if parameter.is_complex() else offset
        alias = torch.empty_like(counter) if is_large(parameter) else counter.detach()
        views.append(alias.set_(storage, place, parameter.shape, dense_strides(parameter)))
        offset += real_numel(parameter)
    return views
