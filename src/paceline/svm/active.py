"""The samples that a rank works on, and all that changes with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.svm.problem import Problem
from paceline.svm.samples import Samples


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
        """All of a rank's own samples, at the start of its problem; `rows` are they in the precision to use."""
        position_of = np.full(problem.num_samples, -1, np.int64)
        position_of[rows.ids] = np.arange(len(rows))
        return cls(
            rows,
            np.zeros(len(rows)),
            problem.start.copy(),
            problem.linear,
            problem.lower,
            problem.upper,
            position_of,
        )

    def __len__(self) -> int:
        return len(self.g)

    def take(self, positions: NDArray[np.int64]) -> Active:
        """Some of the samples, in that order."""
        return self._with(self.samples.take(positions), self.columns()[positions])

    def joined(self, samples: Samples, columns: NDArray[np.float64]) -> Active:
        """These samples and then others, whose `columns` those are."""
        return self._with(self.samples.joined(samples), np.concatenate([self.columns(), columns]))

    def columns(self) -> NDArray[np.float64]:
        """All but the samples as one table with a row a sample: g, beta, linear, lower, upper; shape (N, 1 + 4 S)."""
        return np.column_stack([self.g, self.beta.T, self.linear.T, self.lower.T, self.upper.T])

    def _with(self, samples: Samples, columns: NDArray[np.float64]) -> Active:
        S = len(self.beta)
        parts = [np.ascontiguousarray(columns[:, 1 + k * S : 1 + (k + 1) * S].T) for k in range(4)]
        position_of = np.full(len(self.position_of), -1, np.int64)
        position_of[samples.ids] = np.arange(len(samples))
        return Active(samples, columns[:, 0].copy(), parts[0], parts[1], parts[2], parts[3], position_of)
