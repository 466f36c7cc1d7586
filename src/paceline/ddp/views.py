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

    `flat` is real, contiguous and long enough; all parameters have one dtype. Views of small gradients share one
    version counter.
    """
    storage, offset = flat.untyped_storage(), flat.storage_offset()
    views: list[Tensor] = []
    small: Tensor | None = None
    for parameter in parameters:
        place = offset // 2 if parameter.is_complex() else offset
        shape, strides = parameter.shape, dense_strides(parameter)
        alias = torch.empty(0, dtype=parameter.dtype, device=flat.device)
        if is_large(parameter):
            views.append(alias.set_(storage, place, shape, strides))
        else:
            small = alias.set_(storage, place, (0,), (1,)) if small is None else small
            views.append(small.as_strided(shape, strides, place).detach())  # shares the counter, is no view
        offset += real_numel(parameter)
    return views
