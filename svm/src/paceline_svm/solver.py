"""The distributed solver: SMO on large working sets, with shrinking (shrinking) and a check in double precision.

Each outer iteration optimises one working set:
    1 nominate   every rank names its worst KKT violators                  one all-gather
    2 choose     all ranks choose the same working set
    3 fetch      rows of samples that were never chosen before             one all-reduce (none if all came at first)
    4 solve      every rank optimises the working set for itself, by SMO   none (where ranks may round differently,
                                                                           rank 0 does: one broadcast)
    5 apply      kernel rows of what changed, times the changes, are added to the gradients of the active samples

Rules
1. The gradient of variable v of sample i is f_v = g_i + p_v, g_i = sum_j beta_j K_ij. Each sample's g is in double
   precision. Kernel rows are in single precision where `rows_dtype` says so.
2. Only rows of coefficients that changed are computed: a chosen variable that stays where it was costs nothing.
3. Optimal when max f over b > lower, less min f over b < upper, is at most tol (the KKT conditions as in Keerthi et
   al. 2001). Only `OptimalityCheck` may find that: on all samples, in double precision. What it finds wrong is
   corrected, and the iterations go on.
4. It ends. Every iteration but the first after one without a pair update lowers the objective. When 50 in a row lower
   it by less than rounding, the rows become double. When they are double already, that is the end. So are the limits of
   `Tally`: finite, whatever the problem. The result says how far it is from the optimum.

Source:
    Narasimhan, Vishnu et al. 2014 (arXiv 1406.5161) for shrinking; Fan, Chen & Lin 2005 for the
    working set's solver; the large working set as in ThunderSVM (Wen et al. 2018, section 3).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_svm.communicator import Communicator
from paceline_svm.gradients import Gradients, rows_dtype
from paceline_svm.problem import Active, Counters, Problem, Solution, SolverSettings
from paceline_svm.sample_forms import Samples, fits_on_every_rank
from paceline_svm.shrinking import (
    ChosenSamples,
    Heuristic,
    ShrunkSamples,
    balanced,
    is_out_of_balance,
    may_violate,
)
from paceline_svm.stopping import OptimalityCheck, Tally
from paceline_svm.working_set import Nominations, SubProblem, WorkingSet, nominate

_RELATIVE = 0.1  # of the largest violation, down to which a working set is optimised
_CHECKS_IN_SINGLE = 4  # checks that may fail before kernel rows become double
_ROWS_RATIO = 0.25  # of the cache, for the rows of other ranks


class Solver:
    """Solves one problem; every rank makes one and calls `solve` once.

    Args:
        problem: This rank's part.
        settings: The same on every rank.
        communicator: The ranks.
    """

    def __init__(self, problem: Problem, settings: SolverSettings, communicator: Communicator) -> None:
        self._problem, self._settings, self._communicator = problem, settings, communicator
        self._heuristic = Heuristic.named(settings.shrinking)
        self._num_sides = len(problem.linear)
        num_variables = problem.num_samples * self._num_sides
        self._dtype: Any = rows_dtype(problem, settings.tol)
        self._own: Samples = problem.samples.astype(self._dtype)
        self._active = Active.of(problem, self._own)
        self._chosen = ChosenSamples(problem, communicator, self._own)
        self._shrunk = ShrunkSamples(problem, communicator, self._chosen)
        self._optimality_check = OptimalityCheck(problem, communicator, self._chosen, settings.tol)
        self._working_set = WorkingSet(num_variables, settings.working_set)
        self._tally = Tally(settings, problem.num_samples, num_variables, self._working_set.size)
        cache_bytes = settings.cache_bytes, settings.most_cache_bytes / communicator.num_ranks
        self._gradients = Gradients(problem, cache_bytes, self._dtype)
        self._sub_problem = SubProblem(problem.kernel)
        self._steps_at_test = 0

    def solve(self) -> Solution:
        """Run to the optimum, or to the limit of pair updates.

        Contract:
            Collective: every rank, with the same settings.  Blocks: yes.
            Afterwards: the same model on every rank, each with its own part of `beta`.

        Raises:
            PeerLostError: A rank died, hung or cannot be reached.
        """
        self._start()
        stuck = False
        while True:
            nominations = self._nominate()
            self._tally.report(
                nominations.gap, nominations.num_active, nominations.num_support, self._communicator.rank == 0
            )
            exhausted = self._tally.is_exhausted
            if nominations.gap <= self._settings.tol or exhausted or stuck:
                gap = self._check(nominations)
                if gap <= self._settings.tol or exhausted or (stuck and self._dtype == np.float64):
                    break
                if stuck or self._tally.num_checks >= _CHECKS_IN_SINGLE:
                    self._use_double()
                stuck = False
                continue
            if is_out_of_balance(nominations.counts, self._problem.num_samples):
                self._balance(nominations)
                continue
            chosen = self._working_set.choose(nominations)
            if self._shrinking_is_due(nominations):
                self._shrink(nominations, chosen)
            num_kept = len(chosen) - self._working_set.num_new
            if self._improve(chosen, nominations) == 0:
                # What stayed may leave no room for a violating pair; without it there is one, unless rounding hides it.
                stuck = num_kept == 0
                self._working_set.clear()
            stuck |= self._tally.is_stalled
        self._gradients.release()
        return self._solution(gap)

    def _start(self) -> None:
        """Fetch the samples that start with a coefficient, and compute the gradients that follow from them."""
        problem, active = self._problem, self._active
        if fits_on_every_rank(problem.extent.num_numbers, _ROWS_RATIO * self._settings.cache_bytes):
            self._chosen.fetch_all()
        ids = np.flatnonzero(problem.start.any(axis=0))
        if len(ids):
            self._chosen.fetch(ids)
            self._chosen.add(ids, problem.start.sum(axis=0)[ids])
            active.g[:] = self._optimality_check.exact(np.arange(len(active)))

    # -- 1: who is worst

    def _nominate(self) -> Nominations:
        """Return all ranks' worst violators. Collective."""
        num, kept = self._working_set.room, self._working_set.kept
        num_support = int(np.count_nonzero(self._chosen.weights))
        is_short = self._gradients.is_short_of_memory(num_support)
        mine = nominate(self._active, kept, num, num_support, is_short)
        return Nominations.unpack(self._communicator.gather(mine.pack(num), "exchanging candidates"), num)

    def _local(self, chosen: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sides and active positions of variables; position -1 where another rank has the sample."""
        side, sample = np.divmod(chosen[:, 1].astype(np.int64), self._problem.num_samples)
        return side, self._active.position_of[sample]

    # -- shrinking

    def _shrinking_is_due(self, nominations: Nominations) -> bool:
        return self._heuristic.is_due(
            self._tally.num_steps - self._steps_at_test,
            self._problem.num_samples,
            nominations.num_active,
            self._tally.num_unshrinks,
            short_of_memory=nominations.is_short,
        )

    def _shrink(self, nominations: Nominations, chosen: NDArray[np.float64]) -> None:
        """Drop the samples none of whose variables can be in a violating pair; the working set stays.

        Collective only where samples have moved between ranks: otherwise each rank decides about its own.
        """
        self._steps_at_test = self._tally.num_steps
        active = self._active
        _, position = self._local(chosen)
        keep = may_violate(active, nominations.least, nominations.most)
        keep[position[position >= 0]] = True
        if keep.sum() > (1 - self._heuristic.least_gain_ratio) * len(keep):
            keep[:] = True
        self._shrunk.add(active.take(np.flatnonzero(~keep)))
        if not keep.all():
            kept = np.flatnonzero(keep)
            self._gradients.compact(kept)
            self._active = active.take(kept)

    def _balance(self, nominations: Nominations) -> None:
        """Spread the active samples evenly over the ranks, until they are all brought back. Collective."""
        self._active = balanced(self._communicator, self._active, nominations.counts)
        self._shrunk.has_moved = True
        self._gradients.clear(len(self._active))

    # -- 3, 4, 5: fetch, solve and apply

    def _improve(self, chosen: NDArray[np.float64], nominations: Nominations) -> int:
        """Optimise the working set and apply what changed; returns the number of pair updates."""
        samples = chosen[:, 1].astype(np.int64) % self._problem.num_samples
        sides = chosen[:, 1].astype(np.int64) // self._problem.num_samples
        ids, which, num_known = samples, np.arange(len(samples)), len(chosen) - self._working_set.num_new
        if self._num_sides > 1:  # both variables of a sample may be here
            ids, which = np.unique(samples, return_inverse=True)
            num_known = 0
        self._chosen.fetch(ids)
        panel = self._chosen.panel(ids)
        table = np.zeros((4, self._num_sides, len(ids)))
        table[:, sides, which] = chosen[:, [0, 2, 3, 4]].T
        answer, is_alike = np.zeros(len(chosen) + 2), self._communicator.rounds_alike
        if is_alike or self._communicator.rank == 0:
            found, steps, decrease = self._sub_problem.solve(
                panel, num_known, table, *self._targets(len(chosen), nominations)
            )
            answer = np.append(found[sides, which], [float(steps), decrease])
        if not is_alike:
            answer = self._communicator.broadcast(answer, "exchanging coefficients")
        beta, steps, decrease = answer[:-2], int(answer[-2]), float(answer[-1])
        change: NDArray[np.float64] = np.bincount(which, beta - chosen[:, 2], len(ids)).astype(np.float64)
        changed = np.flatnonzero(change)
        self._gradients.add(self._active, panel.take(changed), change[changed])
        self._chosen.add(ids, change)
        _, position = self._local(chosen)
        mine = position >= 0
        self._active.beta[sides[mine], position[mine]] = beta[mine]
        self._working_set.change(beta)
        self._tally.count_working_set(steps, decrease)
        return steps

    def _targets(self, size: int, nominations: Nominations) -> tuple[float, int]:
        """Return the violation, and the number of pair updates, at which SMO leaves a working set."""
        tol = self._settings.tol
        is_all = size >= nominations.num_active * self._num_sides
        target = 0.9 * tol if is_all else max(tol / 2, _RELATIVE * nominations.gap)
        return target, min(self._tally.steps_left, np.iinfo(np.int64).max if is_all else 100 * size)

    # -- is it the optimum?

    def _check(self, nominations: Nominations) -> float:
        """Bring shrunk samples back, check all samples in double precision; returns the true gap. Collective."""
        self._tally.count_check()
        if nominations.num_active < self._problem.num_samples:
            self._tally.num_unshrinks += 1
            self._active = self._shrunk.unshrink(self._active, self._own)
            self._gradients.clear(len(self._active))
            self._working_set.clear()
        return self._optimality_check.check(self._active)

    # -- precision, report, result

    def _use_double(self) -> None:
        if self._dtype != np.float64:
            self._dtype = np.dtype(np.float64)
            self._own = self._problem.samples.astype(self._dtype)
            self._active.samples = self._own  # nothing is shrunk now
            self._chosen.use(self._own)
            self._gradients.use(self._dtype)
            self._sub_problem.forget()

    def _solution(self, gap: float) -> Solution:
        offset, objective, linear_part = self._optimality_check.conclusion(self._active)
        counters = Counters(
            self._tally.num_working_sets,
            self._tally.num_steps,
            self._gradients.num_kernel_values
            + self._sub_problem.num_kernel_values
            + self._shrunk.num_kernel_values
            + self._optimality_check.num_kernel_values,
            self._tally.num_unshrinks,
            self._tally.least_active,
            self._gradients.num_evictions,
            self._communicator.num_collectives,
            self._communicator.num_bytes,
        )
        converged = gap <= self._settings.tol
        beta, is_exact = self._active.beta.sum(axis=0), self._dtype == np.float64
        return Solution(beta, offset, objective, gap, converged, counters, None if is_exact else linear_part)
