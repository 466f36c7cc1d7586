"""The dual quadratic programme that all support vector machines share: a rank's part of it, settings and result.

With one signed coefficient b_v a variable, and K the kernel values of the variables' samples:

    minimise  1/2 b'Kb + p'b   subject to   lower <= b <= upper,  sum(b) as at the start.

Classification has one variable a sample (b = y * alpha, p = -y), regression has two, novelty detection one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigurationError
from paceline_svm.kernels import Kernel
from paceline_svm.sample_forms import Samples


class Extent(NamedTuple):
    """The sizes of the samples of a problem, over all ranks.

    Attributes:
        num_numbers: What all samples are made of.
        most_numbers: What those of a rank are made of, their ids included, at most.
        largest_square: Squared length.
    """

    num_numbers: float
    most_numbers: int
    largest_square: float


@dataclass(frozen=True)
class Problem:
    """A programme, and this rank's samples of it.

    Attributes:
        kernel: Between samples.
        samples: This rank's N samples; their ids number the samples of all ranks from 0 without gaps.
        extent: Of all ranks' samples.
        linear: p of all ranks' M samples, in the order of their ids, shape (S, M): S variables a sample, 1 or 2.
        lower: Shape (S, M).
        upper: Shape (S, M).
        start: A feasible b, shape (S, M).
    """

    kernel: Kernel
    samples: Samples
    extent: Extent
    linear: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    start: NDArray[np.float64]

    def __post_init__(self) -> None:
        shape = self.linear.shape
        for name in ("lower", "upper", "start"):
            if getattr(self, name).shape != shape:
                raise ConfigurationError(f"{name} has shape {getattr(self, name).shape} instead of {shape}")

    @property
    def num_samples(self) -> int:
        """Over all ranks."""
        return int(self.linear.shape[1])


@dataclass
class Active:
    """N samples with S variables each, in one order.

    Attributes:
        samples: In the precision of the kernel rows.
        g: sum_j beta_j K_ij of each sample over all samples of the problem, shape (N,); f = g + linear is the gradient.
        beta: Coefficients, shape (S, N); so are the following.
        linear: p of `problem.py`.
        lower: Least coefficients.
        upper: Largest coefficients.
        position_of: Position of every sample of the problem, or -1, shape (num_samples,).
    """

    samples: Samples
    g: NDArray[np.float64]
    beta: NDArray[np.float64]
    linear: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    position_of: NDArray[np.int64]

    @classmethod
    def of(cls, problem: Problem, rows: Samples) -> Active:
        """Return all of a rank's own samples, at the start of its problem. `rows` has them in the precision to use."""
        position_of = np.full(problem.num_samples, -1, np.int64)
        position_of[rows.ids] = np.arange(len(rows))
        beta, linear, lower, upper = (
            np.take(table, rows.ids, axis=1)
            for table in (problem.start, problem.linear, problem.lower, problem.upper)
        )
        return cls(rows, np.zeros(len(rows)), beta, linear, lower, upper, position_of)

    def __len__(self) -> int:
        return len(self.g)

    def take(self, positions: NDArray[np.int64]) -> Active:
        """Some of the samples, in that order."""
        return self._with(self.samples.take(positions), self.columns()[positions])

    def joined(self, samples: Samples, columns: NDArray[np.float64]) -> Active:
        """Return these samples and then others, whose `columns` those are."""
        return self._with(self.samples.joined(samples), np.concatenate([self.columns(), columns]))

    def columns(self) -> NDArray[np.float64]:
        """Return all but the samples as a table, shape (N, 1 + 4 S). A row has g, beta, linear, lower and upper."""
        return np.column_stack([self.g, self.beta.T, self.linear.T, self.lower.T, self.upper.T])

    def _with(self, samples: Samples, columns: NDArray[np.float64]) -> Active:
        S = len(self.beta)
        parts = [np.ascontiguousarray(columns[:, 1 + k * S : 1 + (k + 1) * S].T) for k in range(4)]
        position_of = np.full(len(self.position_of), -1, np.int64)
        position_of[samples.ids] = np.arange(len(samples))
        return Active(samples, columns[:, 0].copy(), parts[0], parts[1], parts[2], parts[3], position_of)


@dataclass(frozen=True)
class Progress:
    """The progress of a solver.

    Attributes:
        num_exchanges: Working sets so far.
        num_steps: Pair updates so far.
        gap: Largest violation among the active samples.
        num_active: Samples not shrunk, over all ranks.
        num_support: Samples with a coefficient that is not zero, over all ranks.
        elapsed_s: Since the solver began.
    """

    num_exchanges: int
    num_steps: int
    gap: float
    num_active: int
    num_support: int
    elapsed_s: float


@dataclass(frozen=True)
class SolverSettings:
    """The settings of a solver.

    Attributes:
        tol: Stop when the largest violation over all samples is at most this.
        max_steps: Stop after as many pair updates; -1 for no limit.
        cache_bytes: For kernel rows, on each rank.
        most_cache_bytes: Up to how much the cache of a large problem may grow, if that is more.
        shrinking: When samples are dropped from work: a name that `Heuristic` knows.
        working_set: Variables that are optimised together; None chooses by the size of the problem.
        report: Told the progress after every working set, on rank 0.
    """

    tol: float = 1e-3
    max_steps: int = -1
    cache_bytes: float = 500e6
    most_cache_bytes: float = 0.0
    shrinking: str = "auto"
    working_set: int | None = None
    report: Callable[[Progress], None] | None = None

    def step_limit(self, num_variables: int) -> int:
        """Return the number of pair updates after which to stop even if `max_steps` says never: LIBSVM's limit.

        Every update strictly decreases the objective, so it ends. But a badly scaled problem may take very long.
        """
        return self.max_steps if self.max_steps >= 0 else max(10_000_000, 100 * num_variables)


class Counters(NamedTuple):
    """The cost of a solution; the same on any machine.

    Attributes:
        num_exchanges: Working sets.
        num_steps: Pair updates.
        num_kernel_values: Kernel values that this rank computed.
        num_unshrinks: How often shrunk samples were brought back.
        least_active: Smallest number of active samples, over all ranks.
        num_evictions: Kernel rows that gave way to others on this rank.
        num_collectives: Collectives of the process group.
        num_bytes: Bytes that this rank handed to them.
    """

    num_exchanges: int
    num_steps: int
    num_kernel_values: int
    num_unshrinks: int
    least_active: int
    num_evictions: int
    num_collectives: int
    num_bytes: int


class Solution(NamedTuple):
    """The point where a solver ended.

    Attributes:
        beta: Coefficients of this rank's samples, summed over a sample's variables, shape (N,).
        offset: The decision function is sum_j beta_j K(x_j, x) - offset.
        objective: 1/2 b'Kb + p'b, over all ranks, as the gradients have it.
        gap: Largest violation over all samples, in double precision; the optimum is reached if it is at most `tol`.
        converged: Whether it is.
        counters: What it took.
        linear_part: p'b, if some gradients are of single precision, so that b'Kb is not exact; else None.
    """

    beta: NDArray[np.float64]
    offset: float
    objective: float
    gap: float
    converged: bool
    counters: Counters
    linear_part: float | None = None


def feasible(
    last: NDArray[np.float64], lower: NDArray[np.float64], upper: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return coefficients within the bounds and of sum zero, near `last`: clipped, then the heavier sign scaled down.

    Args:
        last: Coefficients of an earlier fit, of all ranks' variables.
        lower: At most 0.
        upper: At least 0.
    """
    beta = np.clip(last, lower, upper)
    up, down = beta[beta > 0].sum(), -beta[beta < 0].sum()
    least = min(up, down)
    return np.asarray(
        np.where(beta > 0, beta * (least / max(up, 1e-300)), beta * (least / max(down, 1e-300)))
    )


def filled(last: NDArray[np.float64], upper: NDArray[np.float64], total: float) -> NDArray[np.float64]:
    """Return coefficients between 0 and `upper` whose sum is `total`, near `last`: scaled down, or filled up evenly.

    Args:
        last: Coefficients of an earlier fit, of all ranks' variables.
        upper: At least 0, with a sum of at least `total`.
        total: Of the coefficients.
    """
    beta = np.clip(last, 0.0, upper)
    excess = beta.sum() - total
    if excess > 0:
        return np.asarray(beta * (total / beta.sum()))
    room = upper - beta
    return np.asarray(np.minimum(upper, beta - excess * room / max(room.sum(), 1e-300)))
