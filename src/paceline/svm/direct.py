"""Small problems over the same samples, each solved as a whole by one rank; what they share is computed once.

A problem is small if its gradient stays in the processor's cache: then pair updates are so cheap that neither working
sets nor other ranks pay. Many small problems (pairs of classes) are dealt out over the ranks.

Rules
1. Everything is in double precision, so what is found is exact; the gradient is nevertheless summed anew at the end.
2. The samples are sorted by class: a pair of classes is two ranges, and the part of a kernel row that belongs to the
   sample's own class is computed once for all pairs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import LANES
from paceline.svm.kernel_row import diagonal_of, source_of
from paceline.svm.kernels import Kernel
from paceline.svm.problem import Counters, Progress, Solution, SolverSettings
from paceline.svm.row_store import RowStore, gradients_from_rows
from paceline.svm.samples import Samples
from paceline.svm.smo import Variables, solve

LARGEST = 3_000  # variables
_STEPS_A_TURN = 200_000
_SHARED_RATIO = 0.5  # of the cache, if there is something to share


@dataclass(frozen=True)
class Small:
    """A small problem.

    Attributes:
        bounds: (a, b, c, d): its samples are a to b and c to d (exclusive) of all; c = d if there is one range.
        linear: p of `problem.py`, shape (S, N).
        lower: Shape (S, N).
        upper: Shape (S, N).
        start: A feasible b, shape (S, N).
    """

    bounds: tuple[int, int, int, int]
    linear: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    start: NDArray[np.float64]


class DirectSolver:
    """Solves small problems, one after another.

    Args:
        kernel: Between samples.
        samples: Of all problems, on this rank.
        settings: `cache_bytes` bounds the kernel rows.
        width: Samples of the largest range that several problems have; 0 if none.
    """

    def __init__(self, kernel: Kernel, samples: Samples, settings: SolverSettings, width: int = 0) -> None:
        self._settings = settings
        self._source = source_of(kernel, samples)
        num = len(samples)
        self._diagonal = np.empty(num)
        diagonal_of(self._source, self._diagonal)
        num_shared = min(num, int(settings.cache_bytes * _SHARED_RATIO / (8 * width))) if width else 0
        self._shared = np.empty((num_shared, width))
        self._shared_slot = np.full(num, -1, np.int64)
        self._num_shared = np.zeros(1, np.int64)
        self._memory = np.empty(0)

    def solve(self, problem: Small) -> Solution:
        """Solve one; reports progress after every 200,000 pair updates."""
        started_s = time.monotonic()
        a, b, c, d = problem.bounds
        S, n = problem.linear.shape
        P = -(-n // LANES) * LANES
        store = self._store(problem.bounds, n, P)

        def padded(values: NDArray[np.float64]) -> NDArray[np.float64]:
            out = np.zeros((S, P))
            out[:, :n] = values
            return out

        linear, lower, upper = padded(problem.linear), padded(problem.lower), padded(problem.upper)
        beta, diagonal, g = padded(problem.start), np.zeros(P), np.zeros(P)
        diagonal[: b - a], diagonal[b - a : n] = self._diagonal[a:b], self._diagonal[c:d]
        tol, limit = self._settings.tol, self._settings.step_limit(S * n)
        steps = num_values = num_turns = 0
        while True:
            # From scratch: first for the start, then because rounding adds up over many updates.
            num_values += gradients_from_rows(self._source, store, beta.sum(axis=0), g)
            F = g + linear
            free_up, free_down = beta < upper, beta > lower
            least, most = F[free_up].min(initial=np.inf), F[free_down].max(initial=-np.inf)
            gap = float(most - least)
            self._report(num_turns, steps, gap, n, beta, started_s)
            if gap <= tol or steps >= limit:
                break
            variables = Variables(F.ravel(), beta.ravel(), lower.ravel(), upper.ravel(), diagonal)
            done, _, computed = solve(self._source, store, variables, tol, min(limit - steps, _STEPS_A_TURN))
            steps += done
            num_values += computed
            num_turns += 1
            if done == 0:  # no pair can be improved in double precision
                break
        free = free_up & free_down
        offset = float(F[free].mean()) if free.any() else float((least + most) / 2)
        objective = 0.5 * float((beta * (F + linear)).sum())
        counters = Counters(num_turns, steps, num_values, 0, n, 0, 0, 0)
        return Solution(beta[:, :n].sum(axis=0), offset, objective, max(gap, 0.0), gap <= tol, counters)

    def _store(self, bounds: tuple[int, int, int, int], num: int, width: int) -> RowStore:
        """Room for kernel rows; pages that were used before come first."""
        num_rows = max(3, min(num, int(self._settings.cache_bytes // (8 * width))))
        if len(self._memory) < num_rows * width:
            self._memory = np.empty(num_rows * width)
        rows = self._memory[: num_rows * width].reshape(num_rows, width)
        owner, slot_of = np.full(num_rows, -1), np.full(num, -1)
        shared = self._shared, self._shared_slot, self._num_shared
        return RowStore(bounds, rows, owner, slot_of, np.zeros(1, np.int64), *shared)

    def _report(
        self, turn: int, steps: int, gap: float, num: int, beta: NDArray[np.float64], started_s: float
    ) -> None:
        if self._settings.report is not None:
            elapsed_s = time.monotonic() - started_s
            num_support = int(np.count_nonzero(beta.any(axis=0)))
            self._settings.report(Progress(turn, steps, gap, num, num_support, elapsed_s))
