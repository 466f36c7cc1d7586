"""What torch's SyncBatchNorm asks of a device, and no CPU has: statistics of a part of a batch, and gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def register(library: torch.library.Library) -> None:
    """Give the device these operators."""
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")


def _over_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _but_channels(tensor: Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean = x.mean(_but_channels(x))
    variance = (x - _over_channels(mean, x)).square().mean(_but_channels(x))
    return mean, torch.rsqrt(variance + eps)


def _gather_stats(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    weights = counts.view(-1, 1)
    count = weights.sum()
    mean = (means * weights).sum(0) / count
    variances = invstds.square().reciprocal() - eps + (means - mean).square()
    variance = (variances * weights).sum(0) / count
    if running_mean is not None and running_variance is not None:
        running_mean.mul_(1 - momentum).add_(mean * momentum)
        running_variance.mul_(1 - momentum).add_(variance * (count / (count - 1)) * momentum)
    return mean, torch.rsqrt(variance + eps)


def _elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    y = (x - _over_channels(mean, x)) * _over_channels(invstd, x)
    y = y if weight is None else y * _over_channels(weight, x)
    return y if bias is None else y + _over_channels(bias, x)


def _backward_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    sum_dy = dy.sum(_but_channels(dy))
    sum_dy_xmu = (dy * (x - _over_channels(mean, x))).sum(_but_channels(dy))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd if weight_g else None, sum_dy.clone() if bias_g else None


def _backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    count = counts.sum()
    normalized = (x - _over_channels(mean, x)) * _over_channels(invstd.square() * (sum_dy_xmu / count), x)
    scale = invstd if weight is None else invstd * weight
    return (dy - _over_channels(sum_dy / count, dy) - normalized) * _over_channels(scale, dy)


_KERNELS = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather_stats,
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _backward_reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}
