"""The solver: large working sets over ranks, samples eliminated on the way, and nothing reported that was not checked.

Each turn
    1 nominate   every rank names its worst violators                      one all-gather
    2 choose     all ranks choose the same working set
    3 fetch      rows of samples that were never chosen before             one exchange (none if all came at first)
    4 solve      every rank optimises the working set for itself           none (where ranks may round differently,
                                                                           rank 0 does: one broadcast)
    5 apply      kernel rows of what changed, times the changes, are added to the gradients of the active samples

Rules
1. The gradient of variable v of sample i is f_v = g_i + p_v, g_i = sum_j beta_j K_ij. g is kept per sample, in double
   precision; kernel rows are in single precision where `rows_dtype` says so.
2. Only rows of coefficients that changed are computed: a chosen variable that stays where it was costs nothing.
3. Optimal when max f over b > lower, less min f over b < upper, is at most tol. Only `Settlement` may find that: on all
   samples, in double precision. What it finds wrong is corrected and the turns go on.
4. It ends. Every turn but the first after one without a pair update lowers the objective; when 50 in a row lower it
   by less than rounding, the rows become double, and when they are double already, that is the end. So are the limits
   of `Tally`: finite, whatever the problem. The result says how far it is from the optimum.

Source:
    Narasimhan, Vishnu et al. 2014 for elimination and reconstruction; Fan, Chen & Lin 2005 for the working set's
    solver; the large working set as in ThunderSVM (Wen et al. 2018).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.svm.active import Active
from paceline.svm.away import Away, is_out_of_balance, may_violate
from paceline.svm.exchange import balanced, fits
from paceline.svm.gradients import Gradients
from paceline.svm.nominations import Nominations, nominate
from paceline.svm.precision import rows_dtype
from paceline.svm.problem import Counters, Problem, Solution, SolverSettings
from paceline.svm.samples import Samples
from paceline.svm.seen import Seen
from paceline.svm.settlement import Settlement
from paceline.svm.sub_problem import SubProblem
from paceline.svm.tally import Tally
from paceline.svm.working_set import WorkingSet
from paceline.svm.world import World

_RELATIVE = 0.1
_SINGLE_SETTLES = 4
_ROWS_RATIO = 0.25  # of the cache, for the rows of other ranks


class Solver:
    """Solves one problem; every rank makes one and calls `solve` once.

    Args:
        problem: This rank's part.
        settings: The same on every rank.
        world: The ranks.
    """

    def __init__(self, problem: Problem, settings: SolverSettings, world: World) -> None:
        self._problem, self._settings, self._world = problem, settings, world
        self._num_sides = len(problem.linear)
        num_variables = problem.num_samples * self._num_sides
        self._dtype: Any = rows_dtype(problem, settings.tol, world)
        self._own: Samples = problem.samples.astype(self._dtype)
        self._active = Active.of(problem, self._own)
        self._seen = Seen(problem, world, self._own)
        self._away = Away(problem, world, self._seen)
        self._settlement = Settlement(problem, world, self._seen, settings.tol)
        self._working_set = WorkingSet(num_variables, settings.working_set)
        self._tally = Tally(settings, problem.num_samples, num_variables, self._working_set.size)
        self._gradients = Gradients(problem, settings.cache_bytes, self._dtype)
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
            self._tally.report(nominations, self._world.rank == 0)
            exhausted = self._tally.is_exhausted
            if nominations.gap <= self._settings.tol or exhausted or stuck:
                gap = self._settle(nominations)
                if gap <= self._settings.tol or exhausted or (stuck and self._dtype == np.float64):
                    break
                if stuck or self._tally.num_settles >= _SINGLE_SETTLES:
                    self._use_double()
                stuck = False
                continue
            if is_out_of_balance(nominations, self._problem.num_samples):
                self._balance(nominations)
                continue
            chosen = self._working_set.choose(nominations)
            if self._elimination_is_due(nominations):
                self._eliminate(nominations, chosen)
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
        active, doing = self._active, "exchanging the start"
        if fits(self._world, self._problem.samples, _ROWS_RATIO * self._settings.cache_bytes):
            self._seen.fetch_all()
        mine = np.flatnonzero(active.beta.any(axis=0))
        ids = np.concatenate(self._world.gather_uneven(active.samples.ids[mine], doing))
        weights = np.concatenate(self._world.gather_uneven(active.beta.sum(axis=0)[mine], doing))
        if len(ids):
            self._seen.fetch(ids)
            self._seen.add(ids, weights)
            active.g[:] = self._settlement.exact(np.arange(len(active)))

    # -- 1, 2: who is worst

    def _nominate(self) -> Nominations:
        num, kept = self._working_set.room, self._working_set.kept
        num_support = int(np.count_nonzero(self._seen.weights))
        is_short = self._gradients.is_short_of_memory(num_support)
        mine = nominate(self._active, kept, num, num_support, is_short)
        return Nominations.unpack(self._world.gather(mine.pack(num), "exchanging candidates"), num)

    def _local(self, chosen: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sides and active positions of variables; position -1 where another rank has the sample."""
        side, sample = np.divmod(chosen[:, 1].astype(np.int64), self._problem.num_samples)
        return side, self._active.position_of[sample]

    # -- elimination

    def _elimination_is_due(self, nominations: Nominations) -> bool:
        return self._settings.elimination.is_due(
            self._tally.num_steps - self._steps_at_test,
            self._problem.num_samples,
            self._tally.num_reconstructions,
            short_of_memory=nominations.is_short,
        )

    def _eliminate(self, nominations: Nominations, chosen: NDArray[np.float64]) -> None:
        """Drop the samples none of whose variables can violate with any other; the working set stays.

        Collective only where samples have moved: otherwise each rank decides about its own, and nobody needs to know.
        """
        self._steps_at_test = self._tally.num_steps
        active = self._active
        _, position = self._local(chosen)
        keep = may_violate(active, nominations)
        keep[position[position >= 0]] = True
        if keep.sum() > (1 - self._settings.elimination.least_gain_ratio) * len(keep):
            keep[:] = True
        self._away.leave(active.take(np.flatnonzero(~keep)))
        if not keep.all():
            kept = np.flatnonzero(keep)
            self._gradients.compact(kept)
            self._active = active.take(kept)

    def _balance(self, nominations: Nominations) -> None:
        """Deal the active samples out evenly; what a rank gets, it keeps until they come back. Collective."""
        self._active = balanced(self._world, self._active, nominations.counts)
        self._away.has_moved = True
        self._gradients.clear(len(self._active))

    # -- 4, 5: solve and apply

    def _improve(self, chosen: NDArray[np.float64], nominations: Nominations) -> int:
        """Optimise the working set and apply what changed; returns the number of pair updates."""
        samples = chosen[:, 1].astype(np.int64) % self._problem.num_samples
        sides = chosen[:, 1].astype(np.int64) // self._problem.num_samples
        ids, which, num_known = samples, np.arange(len(samples)), len(chosen) - self._working_set.num_new
        if self._num_sides > 1:  # both variables of a sample may be here
            ids, which = np.unique(samples, return_inverse=True)
            num_known = 0
        self._seen.fetch(ids)
        panel = self._seen.panel(ids)
        table = np.zeros((4, self._num_sides, len(ids)))
        table[:, sides, which] = chosen[:, [0, 2, 3, 4]].T
        answer, is_alike = np.zeros(len(chosen) + 2), self._world.rounds_alike
        if is_alike or self._world.rank == 0:
            found, steps, decrease = self._sub_problem.solve(
                panel, num_known, table, *self._targets(len(chosen), nominations)
            )
            answer = np.append(found[sides, which], [float(steps), decrease])
        if not is_alike:
            answer = self._world.broadcast(answer, "exchanging coefficients")
        beta, steps, decrease = answer[:-2], int(answer[-2]), float(answer[-1])
        change: NDArray[np.float64] = np.bincount(which, beta - chosen[:, 2], len(ids)).astype(np.float64)
        changed = np.flatnonzero(change)
        self._gradients.add(self._active, panel.take(changed), change[changed])
        self._seen.add(ids, change)
        _, position = self._local(chosen)
        mine = position >= 0
        self._active.beta[sides[mine], position[mine]] = beta[mine]
        self._working_set.change(beta)
        self._tally.turn(steps, decrease)
        return steps

    def _targets(self, size: int, nominations: Nominations) -> tuple[float, int]:
        """At which violation, and after how many pair updates, a working set is left."""
        tol = self._settings.tol
        is_all = size >= nominations.num_active * self._num_sides
        target = 0.9 * tol if is_all else max(tol / 2, _RELATIVE * nominations.gap)
        return target, min(self._tally.steps_left, np.iinfo(np.int64).max if is_all else 100 * size)

    # -- is it the optimum?

    def _settle(self, nominations: Nominations) -> float:
        """Bring back what was eliminated, check all samples in double precision; the true gap."""
        self._tally.settle()
        if nominations.num_active < self._problem.num_samples:
            self._tally.num_reconstructions += 1
            self._active = self._away.come_back(self._active, self._own)
            self._gradients.clear(len(self._active))
            self._working_set.clear()
        return self._settlement.check(self._active)

    # -- precision, report, result

    def _use_double(self) -> None:
        if self._dtype != np.float64:
            self._dtype = np.dtype(np.float64)
            self._own = self._problem.samples.astype(self._dtype)
            self._active.samples = self._own  # nothing is eliminated now
            self._seen.use(self._own)
            self._gradients.use(self._dtype)
            self._sub_problem.forget()

    def _solution(self, gap: float) -> Solution:
        offset, objective = self._settlement.conclusion(self._active)
        counters = Counters(
            self._tally.num_turns,
            self._tally.num_steps,
            self._gradients.num_kernel_values
            + self._sub_problem.num_kernel_values
            + self._away.num_kernel_values
            + self._settlement.num_kernel_values,
            self._tally.num_reconstructions,
            self._tally.least_active,
            self._gradients.num_evictions,
            self._world.num_collectives,
            self._world.num_bytes,
        )
        converged = gap <= self._settings.tol
        return Solution(self._active.beta.sum(axis=0), offset, objective, gap, converged, counters)
