"""Batch normalisation over the global minibatch, on any device with any process group.

Torch's `SyncBatchNorm` refuses CPU tensors. This one is a subclass, so whatever looks for torch's finds it; on an
accelerator it is torch's. `DistributedDataParallel` turns torch's layers on the CPU into these when it wraps a module.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import Module, functional

from paceline.comm.collectives import all_reduce, sum_in_place
from paceline.comm.opened_groups import close, group_like
from paceline.comm.peers import Peers


class _NormalizeOverRanks(torch.autograd.Function):
    """y = w (x - m) / sqrt(v + eps) + b, with m and v over the batches of all ranks.

    x is (n, C, ...), M the number of values a channel has on all ranks, x̂ the normalised x. Sums run over all of them:
    dx = w / sqrt(v + eps) * (dy - (sum dy + x̂ sum(dy x̂)) / M). The sums are the only thing that ranks exchange.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: ProcessGroup,
        peers: Peers | None,  # who wait for each other; None: dynamo compiles this, or the group is not ours
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = _wide(x)
        dims = [0, *range(2, x.dim())]
        num_local = x.numel() // x.size(1)
        sums = torch.cat([wide.sum(dims), wide.new_tensor([num_local])])
        _sum(sums, group, peers)
        count = sums[-1]
        mean = sums[:-1] / count
        centred = wide - _over_channels(mean, x)
        squares = (centred * centred).sum(dims)
        _sum(squares, group, peers)
        variance = squares / count
        invstd = torch.rsqrt(variance + eps)
        normalized = centred * _over_channels(invstd, x)
        ctx.save_for_backward(normalized, weight, invstd, count)
        ctx.group, ctx.peers, ctx.has_bias, ctx.dtype = group, peers, bias is not None, x.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        y = normalized if weight is None else normalized * _over_channels(weight, x)
        y = y if bias is None else y + _over_channels(bias, x)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        normalized, weight, invstd, count = ctx.saved_tensors
        wide = _wide(dy)
        dims = [0, *range(2, dy.dim())]
        sum_dy, sum_dy_x = wide.sum(dims), (wide * normalized).sum(dims)
        both = torch.cat([sum_dy, sum_dy_x]) / count
        _sum(both, ctx.group, ctx.peers)
        mean_dy, mean_dy_x = both.chunk(2)
        scale = invstd if weight is None else invstd * weight
        dx = wide - _over_channels(mean_dy, dy) - normalized * _over_channels(mean_dy_x, dy)
        dx = (dx * _over_channels(scale, dy)).to(ctx.dtype)
        d_weight = None if weight is None else sum_dy_x.to(weight.dtype)
        d_bias = sum_dy.to(invstd.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return dx, d_weight, d_bias, None, None, None


def _sum(tensor: Tensor, group: ProcessGroup, peers: Peers | None) -> None:
    """Replace `tensor` by the sum of all ranks' tensors. Collective; blocks. `peers` name a rank that is lost."""
    if peers is None:
        sum_in_place(tensor, group)
        return
    doing = "summing statistics of synchronized batch normalisation"
    try:
        pending = all_reduce(tensor, group)
    except RuntimeError as error:
        peers.fail(error, doing)
    peers.wait(pending, doing, on_host=True)


def _wide(x: Tensor) -> Tensor:
    """Return float32 for half precision, in which statistics would be too coarse, and other dtypes as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _over_channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` that also works on the CPU.

    Contract:
        Collective in training: every rank calls forward, and backward, equally often; batch sizes may differ, also 0.

    Cost:
        Three all-reduces a step, of one or two words a channel.
    """

    _opened: _Opened | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        synchronizes = self.training and dist.is_available() and dist.is_initialized()
        if input.device.type != "cpu" or not synchronizes:
            return super().forward(input)
        group = self.process_group or dist.distributed_c10d._get_default_group()
        if group.size() == 1:
            return super().forward(input) if not self.training else self._forward_alone(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        normalize = _NormalizeOverRanks.apply
        opened = None if torch.compiler.is_compiling() else self._opened
        peers = None if opened is None else opened.peers
        y, mean, variance, count = normalize(input, self.weight, self.bias, self.eps, group, peers)  # type: ignore[no-untyped-call]
        self._track(mean, variance, count)
        return cast("Tensor", y)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the process group. A copy communicates over the default group until it is wrapped."""
        return {**self.__dict__, "process_group": None, "_opened": None}

    def _forward_alone(self, input: Tensor) -> Tensor:  # noqa: A002
        factor = self._count_batch()
        return functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, True, factor, self.eps
        )

    def _count_batch(self) -> float:
        """Count this batch. Return its weight in the running statistics."""
        if not self.track_running_stats or self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        factor = self._count_batch()
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: Module, process_group: ProcessGroup | None = None) -> Module:
        """Replace every batch-norm layer of `module`, which is changed, by a synchronized one; returns the result."""
        return adopt(torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group))


def convert_sync_batchnorm(module: Module, process_group: ProcessGroup | None = None) -> Module:
    """Convert batch normalisation, as torch's method of this name does, for modules on any device."""
    return SyncBatchNorm.convert_sync_batchnorm(module, process_group)


def adopt(module: Module) -> Module:
    """Make torch's SyncBatchNorm layers in `module` work on the CPU, in place."""
    for layer in module.modules():
        if type(layer) is torch.nn.SyncBatchNorm:
            layer.__class__ = SyncBatchNorm
    return module


def layers_over(module: Module, *groups: ProcessGroup | None) -> list[SyncBatchNorm]:
    """Return the layers that communicate over one of these groups, or that were given no group."""
    layers = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
    return [it for it in layers if any(it.process_group is group for group in (None, *groups))]


class _Opened:
    """Held by the layers that talk over a group of their own, which is closed once none of them is left."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers


def move(
    module: Module, before: Sequence[ProcessGroup | None], group: ProcessGroup, peers: Peers | None
) -> None:
    """Let the layers that talk over one of the groups `before`, or none, talk over `group`. Local.

    `peers` are who wait for each other, if the group is the layers' own.
    """
    opened = None if peers is None else _Opened(peers)
    if opened is not None:
        weakref.finalize(opened, close, group).atexit = False
    for layer in layers_over(module, *before):
        layer.process_group, layer._opened = group, opened


def are_in_use(module: Module) -> bool:
    """Return whether a forward of the module waits for all ranks in a layer. Local."""
    return any(layer.training for layer in module.modules() if isinstance(layer, torch.nn.SyncBatchNorm))


def separate_group(module: Module, process_group: ProcessGroup, peers: Peers) -> ProcessGroup | None:
    """Let the layers that use `process_group` or none talk over a group of their own; returns it, if there are any.

    Their collectives happen within backward; on the gradients' own group they would have to come between the same
    buckets on every rank. Collective, if the module has such a layer.
    """
    if layers_over(module, process_group) and process_group.size() > 1:
        own = group_like(process_group, device=next(module.parameters()).device, peers=peers)
        move(module, [process_group], own, peers)
        return own
    return None
