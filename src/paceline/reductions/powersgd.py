"""PowerSGD: gradients as matrices, of which the ranks average two thin factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.device import keep_for_current_streams
from paceline.compression import Layout, accumulation_dtype
from paceline.errors import ConfigurationError
from paceline.given import number
from paceline.reductions.kept_state import RESIDUAL, Memories, Memory
from paceline.reductions.lossy import Finish, Lossy, seed_of
from paceline.reductions.ordered_mean import launch_mean
from paceline.reductions.reduction import Message, all_reduced


@dataclass(frozen=True)
class _Matrix:
    """A gradient as a matrix in the bucket: `num_rows` rows of `num_columns`, approximated with rank `rank`."""

    name: str
    start: int
    num_rows: int
    num_columns: int
    rank: int

    def of(self, flat: Tensor) -> Tensor:
        """Return the matrix in a flat bucket: a view, shape (num_rows, num_columns)."""
        stop = self.start + self.num_rows * self.num_columns
        return flat[self.start : stop].view(self.num_rows, self.num_columns)


class PowerSGD(Lossy):
    """The mean over ranks of a low-rank approximation, with error feedback.

    A gradient is seen as a matrix M. The ranks average P = MQ, make its columns orthonormal, and average Q = M'P. The
    result is PQ'. Two all-reduces for each bucket: all P and the uncompressed gradients, then all Q.

    Limits first: ranks need processors of one kind and equal numbers of threads to stay bitwise equal. Otherwise QR
    factorisations and matrix products may differ in their last bits.

    Args:
        rank: Columns of P and Q; 1 to 4 are usual.
        min_compression_rate: Gradients that would not become smaller by more than this factor are sent uncompressed; so
            are vectors.
        start_step: The number of first steps that take the plain mean.
        warm_start: Begin with the last step's Q, so that successive steps are a power iteration; otherwise with random
            numbers.
        error_feedback: Add the residual, which is the gradient minus its approximation, to the next step's gradient.
        seed: Random seed of the first Q; the same on every rank.

    Cost:
        2 (P-1)/P x 4 rank (rows + columns) bytes for each matrix, on P ranks; three products and a QR factorisation
        of the thin factor. Error feedback keeps two numbers per element.

    Source:
        Vogels et al., "PowerSGD", NeurIPS 2019, Algorithms 1 and 2. As there, and unlike in torch's hook, the
        residual of a rank is its gradient minus the approximation of that gradient, not minus the mean.
    """

    def __init__(
        self,
        rank: int = 4,
        *,
        min_compression_rate: float = 2.0,
        start_step: int = 0,
        warm_start: bool = True,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not (number(rank) >= 1 and number(rank) % 1 == 0):
            raise ConfigurationError(
                f"PowerSGD: rank={rank!r} must be a whole number of at least 1. Most use up to 4."
            )
        if not number(min_compression_rate) > 0:
            raise ConfigurationError(
                f"PowerSGD: min_compression_rate={min_compression_rate!r} must be more than 0."
            )
        if not number(start_step) >= 0:
            raise ConfigurationError(f"PowerSGD: start_step={start_step!r} must be at least 0.")
        self.rank = int(rank)
        self.min_compression_rate = min_compression_rate
        self.start_step = start_step
        self.warm_start = warm_start
        self.error_feedback = error_feedback
        self.seed = seed
        self._shapes: dict[str, tuple[int, int]] = {}
        # Q of the last step, shape (num_columns, rank), by parameter; the same on all ranks.
        self._factors: dict[str, Tensor] = {}
        self._next_factors: dict[str, Tensor] = {}
        if error_feedback:
            self._memories[RESIDUAL] = Memory()

    def __repr__(self) -> str:
        return (
            f"PowerSGD(rank={self.rank}, min_compression_rate={self.min_compression_rate}, "
            f"start_step={self.start_step}, warm_start={self.warm_start}, error_feedback={self.error_feedback}, "
            f"seed={self.seed})"
        )

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        super().prepare(named_parameters, process_group)
        self._shapes = {name: _matrix_shape(parameter) for name, parameter in named_parameters.items()}

    def _check_dtype(self, name: str, dtype: torch.dtype) -> None:
        if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ConfigurationError(
                f"PowerSGD cannot compress the gradient of {name!r}, which is {dtype}: it knows float16, bfloat16, "
                "float32 and float64. Cast the parameter."
            )

    def _begin(self, loss_scale: float) -> None:
        super()._begin(loss_scale)
        self._next_factors = {}

    def _start(self, message: Message, names: tuple[str, ...], layout: Layout, memories: Memories) -> Finish:
        matrices = self._matrices(names, layout)
        if not matrices:
            return self._start_mean(message)
        group, wide = message.process_group, accumulation_dtype(layout.dtype)
        body = message.body
        pending = self._pending(body, names, layout, memories)
        others = _gaps(matrices, pending.numel())
        first = torch.cat(
            [(m.of(pending) @ self._factor(m, wide, body.device)).view(-1) for m in matrices]
            + [body[start:stop].to(wide) for start, stop in others]
        )
        first = launch_mean(first, group)()
        ps, means = _cut(first, matrices, others)
        bases = [torch.linalg.qr(p).Q for p in ps]
        local = [m.of(pending).t() @ basis for m, basis in zip(matrices, bases, strict=True)]
        finish = launch_mean(torch.cat([q.reshape(-1) for q in local]), group)
        self._keep_residual(pending, matrices, bases, local)

        def write() -> None:
            proposed = self._next_factors  # read first: `follow` replaces the memories, and then these
            if memories is not self._memories:
                proposed = {}
            self._write(body, matrices, bases, finish(), list(zip(others, means, strict=True)), proposed)

        return write

    def _start_mean(self, message: Message) -> Finish:
        body, group = message.body, message.process_group
        mean = launch_mean(body, group)

        def finish() -> None:
            result = mean()
            if result.data_ptr() != body.data_ptr():
                body.copy_(result)
            if self._num_averaged != group.size():
                body.mul_(group.size() / self._num_averaged)

        return finish

    def _sent_bytes(self, names: tuple[str, ...], layout: Layout) -> int:
        matrices = self._matrices(names, layout)
        if not matrices:
            return all_reduced(layout.num_bytes, self._place[1])
        factors = sum((m.num_rows + m.num_columns) * m.rank for m in matrices)
        others = layout.num_elements - sum(m.num_rows * m.num_columns for m in matrices)
        return all_reduced((factors + others) * accumulation_dtype(layout.dtype).itemsize, self._place[1])

    def _matrices(self, names: tuple[str, ...], layout: Layout) -> list[_Matrix]:
        """Return the gradients of a bucket that this step compresses."""
        if self._num_steps < self.start_step:
            return []
        matrices, start = [], 0
        for name, size in zip(names, layout.sizes, strict=True):
            num_rows, num_columns = self._shapes[name]
            rank = min(self.rank, num_rows, num_columns)
            if (num_rows + num_columns) * rank * self.min_compression_rate < size:
                matrices.append(_Matrix(name, start, num_rows, num_columns, rank))
            start += size
        return matrices

    def _pending(self, body: Tensor, names: tuple[str, ...], layout: Layout, memories: Memories) -> Tensor:
        """Return what is compressed, in a wide dtype: the gradients plus the residuals of earlier steps."""
        if not self.error_feedback:
            return body.to(accumulation_dtype(layout.dtype))
        slot = memories[RESIDUAL].slot(names, layout)
        return slot.proposed.copy_(body).add_(slot.kept)

    def _factor(self, matrix: _Matrix, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the first Q, shape (num_columns, rank): the last step's, or random numbers, the same on all ranks."""
        known = self._factors.get(matrix.name)
        if known is not None and self.warm_start:
            return known.to(device=device, dtype=dtype)
        seed = seed_of(self.seed, matrix.name, 0 if self.warm_start else self._num_steps)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(matrix.num_columns, matrix.rank, generator=generator, dtype=dtype).to(device)

    def _keep_residual(
        self, pending: Tensor, matrices: list[_Matrix], bases: list[Tensor], local: list[Tensor]
    ) -> None:
        """Subtract the approximation of this rank's own gradients, which leaves the residual; zero the others."""
        if not self.error_feedback:
            return
        for matrix, basis, q in zip(matrices, bases, local, strict=True):
            matrix.of(pending).sub_(basis @ q.t())
        for start, stop in _gaps(matrices, pending.numel()):
            pending[start:stop] = 0.0

    def _write(
        self,
        body: Tensor,
        matrices: list[_Matrix],
        bases: list[Tensor],
        mean_qs: Tensor,
        others: list[tuple[tuple[int, int], Tensor]],
        next_factors: dict[str, Tensor],
    ) -> None:
        """Replace `body` by the mean of the approximations, and of what was sent uncompressed."""
        if not body.is_cpu:  # another stream has made them
            keep_for_current_streams([*bases, *(mean for _, mean in others)])
        factor = self._place[1] / self._num_averaged
        sizes = [matrix.num_columns * matrix.rank for matrix in matrices]
        for matrix, basis, flat in zip(matrices, bases, mean_qs.split(sizes), strict=True):
            q = flat.view(matrix.num_columns, matrix.rank)
            matrix.of(body).copy_(basis @ (q * factor).t())
            next_factors[matrix.name] = q.clone()
        for (start, stop), mean in others:
            body[start:stop].copy_(mean * factor)

    def _withdraw(self, names: Sequence[str]) -> None:
        super()._withdraw(names)
        for name in names:
            self._next_factors.pop(name, None)

    @property
    def keeps_state(self) -> bool:
        return True

    def _commit(self) -> None:
        super()._commit()
        self._factors.update(self._next_factors)

    def reset(self) -> None:
        super().reset()
        self._factors = {}

    def _begin_shared_anew(self) -> None:
        super()._begin_shared_anew()
        self._factors = {}

    def state_dict(self) -> dict[str, Any]:
        own = super().state_dict()  # which settles
        return {**own, "factors": {name: q.clone() for name, q in self._factors.items()}}

    def _load_shared(self, state: Mapping[str, Any]) -> None:
        self._factors = {name: q.clone() for name, q in state["factors"].items()}


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Return the rows and columns of a gradient in memory order: its outermost dimension, and all others.

    A vector is one row; so is a complex gradient, whose real and imaginary parts alternate.
    """
    if parameter.dim() < 2 or parameter.is_complex() or not parameter.numel():
        return 1, parameter.numel()
    strides = torch.empty_like(parameter, device="meta").stride()
    outermost = max(range(parameter.dim()), key=lambda dim: (strides[dim], parameter.shape[dim]))
    num_rows = parameter.shape[outermost]
    return num_rows, parameter.numel() // num_rows


def _gaps(matrices: list[_Matrix], num_elements: int) -> list[tuple[int, int]]:
    """Return the elements that belong to no matrix, as [first, last) of each gap."""
    gaps, start = [], 0
    for matrix in matrices:
        gaps.append((start, matrix.start))
        start = matrix.start + matrix.num_rows * matrix.num_columns
    gaps.append((start, num_elements))
    return [(first, last) for first, last in gaps if last > first]


def _cut(
    message: Tensor, matrices: list[_Matrix], others: list[tuple[int, int]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts of the first all-reduce: all P, shape (num_rows, rank), and uncompressed gradients."""
    sizes = [matrix.num_rows * matrix.rank for matrix in matrices]
    parts = message.split(sizes + [stop - start for start, stop in others])
    ps = [part.view(m.num_rows, m.rank) for part, m in zip(parts, matrices, strict=False)]
    return ps, list(parts[len(matrices) :])
