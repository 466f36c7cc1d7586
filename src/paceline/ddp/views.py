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

    `flat` is real, contiguous and long enough; all parameters have one dtype. Each view has a version counter of its
    own, so one may be part of a graph while another one is changed.
    """
    storage, offset = flat.untyped_storage(), flat.storage_offset()
    views: list[Tensor] = []
    for parameter in parameters:
        place = offset // 2 if parameter.is_complex() else offset
        alias = torch.empty(0, dtype=parameter.dtype, device=flat.device)
        views.append(alias.set_(storage, place, parameter.shape, dense_strides(parameter)))
        offset += real_numel(parameter)
    return views
