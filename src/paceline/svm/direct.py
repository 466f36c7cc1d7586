"""Small problems over the same samples, each solved as a whole by one thread; what they share is computed once.

A problem is small if its gradient stays in the processor's cache: then pair updates are so cheap that neither working
sets nor other ranks pay. Many small problems (pairs of classes) are dealt out over the ranks.

Rules
1. Everything is in double precision, so what is found is exact; the gradient is nevertheless summed anew at the end.
2. The samples are sorted by class: a pair of classes is two ranges, and the part of a kernel row that belongs to the
   sample's own class is computed once for all pairs.
3. Where several problems share few samples, all kernel values come first, by one matrix product.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import LANES
from paceline.svm.kernel_row import diagonal_of, source_of
from paceline.svm.kernels import Kernel
from paceline.svm.problem import Progress, SolverSettings
from paceline.svm.samples import DenseSamples, GramSamples, Samples
from paceline.svm.small_problems import (
    LEAST,
    MOST,
    STEPS,
    TURNS,
    Limits,
    Shared,
    SmallProblems,
    num_rows,
    solve_some,
)

LARGEST = 3_000  # variables
_FEW = 2_000  # samples, all of whose kernel values are computed at once if there are several problems
_SHARED_RATIO = 0.5  # of the cache, if there is something to share


def with_all_values(kernel: Kernel, samples: Samples, problems: SmallProblems, cache_bytes: float) -> Samples:
    """The samples as their Gram matrix, if that is less work than kernel rows by the piece; else as they are."""
    num = len(samples)
    if not isinstance(samples, DenseSamples) or len(problems.bounds) == 1:
        return samples
    if num > _FEW or 8 * num**2 > _SHARED_RATIO * cache_bytes:
        return samples
    rows = samples.astype(np.float64)
    return GramSamples(samples.ids, kernel.values(rows, rows))


class DirectSolver:
    """Solves small problems, one after another.

    Args:
        kernel: Between samples.
        samples: Of all problems, on this rank.
        problems: Their coefficients are changed.
        settings: `cache_bytes` bounds the kernel rows.
        outcomes: Of the problems, shape (M, FIELDS); changed.
    """

    def __init__(
        self,
        kernel: Kernel,
        samples: Samples,
        problems: SmallProblems,
        settings: SolverSettings,
        outcomes: NDArray[np.float64],
    ) -> None:
        self._problems, self._settings, self._outcomes = problems, settings, outcomes
        self._source = source_of(kernel, samples)
        num, cache_bytes = len(samples), settings.cache_bytes
        self._diagonal = np.empty(num)
        diagonal_of(self._source, self._diagonal)
        sizes = np.unique(problems.sizes)
        rooms = [num_rows(int(size), cache_bytes) * (-(-int(size) // LANES) * LANES) for size in sizes]
        self._memory = np.empty(max(rooms))
        ranges = problems.bounds[:, 1::2] - problems.bounds[:, ::2]
        width = int(ranges.max()) if len(ranges) > 1 and not isinstance(samples, GramSamples) else 0
        num_shared = min(num, int(cache_bytes * _SHARED_RATIO / (8 * width))) if width else 0
        unknown = np.full(num, -1, np.int64)
        self._shared = Shared(np.empty((num_shared, width)), unknown, np.zeros(1, np.int64))

    def solve(self, which: NDArray[np.int64]) -> None:
        """Solve some; reports progress after every 200,000 pair updates, and at the end of each problem."""
        started_s = time.monotonic()
        settings, size = self._settings, 1 if self._settings.report else len(which)
        limits = Limits(settings.tol, settings.step_limit(self._problems.linear.size), settings.cache_bytes)
        while len(which):
            done = solve_some(
                self._source,
                self._diagonal,
                self._problems,
                which[:size],
                limits,
                self._memory,
                self._shared,
                self._outcomes,
            )
            self._report(int(which[0]), time.monotonic() - started_s)
            which = which[done:]

    def _report(self, number: int, elapsed_s: float) -> None:
        if self._settings.report is not None:
            first, last = self._problems.first[number : number + 2]
            num_support = int(np.count_nonzero(self._problems.beta[:, first:last].any(axis=0)))
            out = self._outcomes[number]
            gap = max(float(out[MOST] - out[LEAST]), 0.0)
            self._settings.report(
                Progress(int(out[TURNS]), int(out[STEPS]), gap, int(last - first), num_support, elapsed_s)
            )
