"""The solver: large working sets over ranks, samples eliminated on the way, and nothing reported that was not checked.

Each turn
    1 nominate   every rank names its worst violators                      one all-gather
    2 choose     all ranks choose the same working set
    3 fetch      rows of samples that were never chosen before             exchanged, then kept by every rank
    4 solve      rank 0 optimises the working set                          one broadcast
    5 apply      kernel rows of the working set times the changes, added to the gradients of the active samples

Rules
1. f_v = g_i + p_v is the gradient of variable v of sample i, g_i = sum_j beta_j K_ij. g is kept per sample, in double
   precision; kernel rows are in single precision where `_rows_dtype` says so.
2. g of an eliminated sample is out of date until `_settle` computes it anew from all coefficients.
3. Optimal when max f over b > lower, less min f over b < upper, is at most tol. Only `_settle` may find that: on all
   samples, in double precision. What it finds wrong is corrected and the turns go on.
4. `_seen` holds every sample with a coefficient, on every rank in the same order, `_weights` their coefficients.

Source:
    Narasimhan, Vishnu et al. 2014 for elimination and reconstruction; Fan, Chen & Lin 2005 for the working set's
    solver; the large working set as in ThunderSVM (Wen et al. 2018).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import add_rows, solve_block
from paceline.svm.expansion import expand
from paceline.svm.problem import Counters, Problem, Progress, Solution, SolverSettings
from paceline.svm.row_cache import RowCache
from paceline.svm.samples import Samples
from paceline.svm.selection import Nominations, best, choose, working_set_size
from paceline.svm.working_block import WorkingBlock
from paceline.svm.world import World

_RELATIVE = 0.1
_SINGLE_TOL = 1e-4
_SINGLE_EXPONENT = 1e4
_SINGLE_SETTLES = 4
_SPOT_CHECKS = 64
_SAFETY = 8.0


class Solver:
    """Solves one problem; every rank makes one and calls `solve` once.

    Args:
        problem: This rank's part.
        settings: The same on every rank.
        world: The ranks.
    """

    def __init__(self, problem: Problem, settings: SolverSettings, world: World) -> None:
        self._problem, self._settings, self._world = problem, settings, world
        self._num_sides, self._num_local = problem.linear.shape
        self._beta = problem.start.copy()
        self._g = np.zeros(self._num_local)
        self._position_of = np.full(problem.num_samples, -1, np.int64)
        self._position_of[problem.samples.ids] = np.arange(self._num_local)
        self._active = np.arange(self._num_local)
        self._active_position = np.arange(self._num_local)
        self._dtype: Any = self._rows_dtype()
        self._active_samples: Samples = problem.samples.astype(self._dtype)
        self._seen: Samples = problem.samples.take(slice(0, 0))
        self._seen_at = np.full(problem.num_samples, -1, np.int64)
        self._weights = np.zeros(0)
        num_variables = problem.num_samples * self._num_sides
        self._size = settings.working_set or working_set_size(num_variables, problem.num_samples)
        self._rows = self._new_cache()
        self._block = WorkingBlock(problem.kernel, self._size)
        self._kept = np.zeros((0, 5))
        self._num_new_now = 0
        self._steps = self._steps_at_test = self._exchanges = 0
        self._kernel_values = self._reconstructions = self._settles = 0
        self._least_active = problem.num_samples

    def solve(self) -> Solution:
        """Run to the optimum, or to the limit of pair updates.

        Contract:
            Collective: every rank, with the same settings.  Blocks: yes.
            Afterwards: the same model on every rank, each with its own part of `beta`.

        Raises:
            PeerLostError: A rank died, hung or cannot be reached.
        """
        started_s = time.monotonic()
        self._start()
        gap = np.inf
        stuck = False
        while True:
            nominations = self._nominate()
            self._report(nominations, started_s)
            limit = self._settings.max_steps
            exhausted = 0 <= limit <= self._steps
            if nominations.gap <= self._settings.tol or exhausted or stuck:
                gap = self._settle(nominations)
                if gap <= self._settings.tol or exhausted:
                    break
                if stuck and self._dtype == np.float64:
                    break
                if stuck or self._settles >= _SINGLE_SETTLES:
                    self._use_double()
                stuck = False
                continue
            chosen = self._choose(nominations)
            if self._elimination_is_due(nominations):
                self._eliminate(nominations, chosen)
            self._fetch(_samples_of(chosen, self._problem.num_samples))
            num_kept = len(chosen) - self._num_new_now
            if self._improve(chosen, nominations) == 0:
                # What stayed may leave no room for a violating pair; without it there is one, unless rounding hides it.
                stuck = num_kept == 0
                self._kept = np.zeros((0, 5))
        self._rows.release()
        return self._solution(gap)

    # -- 1, 2: who is worst

    def _gradients(self) -> NDArray[np.float64]:
        """Gradients of the active variables, shape (S, active)."""
        return self._g[self._active] + self._problem.linear[:, self._active]

    def _nominate(self) -> Nominations:
        active, problem = self._active, self._problem
        f, beta = self._gradients(), self._beta[:, active]
        may_grow, may_shrink = beta < problem.upper[:, active], beta > problem.lower[:, active]
        least = float(f[may_grow].min(initial=np.inf))
        most = float(f[may_shrink].max(initial=-np.inf))
        kept = np.full(len(self._kept), -np.inf)
        side, position = self._local(self._kept)
        mine = position >= 0
        at = side[mine], self._active_position[position[mine]]
        kept[mine] = f[at]
        may_grow[at] = may_shrink[at] = False
        num = self._num_new()
        mine_now = Nominations(
            least=least,
            most=most,
            num_active=len(active),
            num_support=int(np.count_nonzero(self._beta.any(axis=0))),
            num_repeats=self._rows.num_repeats,
            growing=self._candidates(f, best(f.ravel(), may_grow.ravel(), num)),
            shrinking=self._candidates(f, best(-f.ravel(), may_shrink.ravel(), num)),
            kept=kept,
        )
        packed = self._world.gather(mine_now.pack(num), "exchanging candidates")
        return Nominations.unpack(packed, num)

    def _candidates(self, f: NDArray[np.float64], flat: NDArray[np.int64]) -> NDArray[np.float64]:
        """Nominations of some active variables, given by their flat positions in `f`."""
        problem = self._problem
        side, at = np.divmod(flat, f.shape[1])
        position = self._active[at]
        variable = (problem.samples.ids[position] + problem.num_samples * side).astype(np.float64)
        where = side, position
        columns = (f[side, at], variable, self._beta[where], problem.lower[where], problem.upper[where])
        return np.stack(columns, axis=-1)

    def _num_new(self) -> int:
        return self._size - len(self._kept)

    def _choose(self, nominations: Nominations) -> NDArray[np.float64]:
        """The working set: (gradient, variable, coefficient, least, largest) a row, the newest last."""
        new = choose(nominations, self._num_new())
        kept = self._kept.copy()
        kept[:, 0] = nominations.kept
        self._num_new_now = len(new)
        self._kept = new[: self._size // 2]
        return np.concatenate([kept, new])

    def _local(self, chosen: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sides and local positions of variables; position -1 where another rank has the sample."""
        side, sample = np.divmod(chosen[:, 1].astype(np.int64), self._problem.num_samples)
        return side, self._position_of[sample]

    # -- elimination

    def _elimination_is_due(self, nominations: Nominations) -> bool:
        return self._settings.elimination.is_due(
            self._steps - self._steps_at_test,
            self._problem.num_samples,
            self._reconstructions,
            # As with renting or buying skis: reconstruction will cost about a kernel row for each support vector, so
            # elimination begins when as many rows have been computed in vain; at worst that is twice the best choice.
            short_of_memory=nominations.num_repeats > nominations.num_support,
        )

    def _eliminate(self, nominations: Nominations, chosen: NDArray[np.float64]) -> None:
        """Drop the samples none of whose variables can violate with any other; the working set stays.

        Each rank decides about its own: nobody else needs to know.
        """
        self._steps_at_test = self._steps
        active, problem = self._active, self._problem
        f, beta = self._gradients(), self._beta[:, active]
        useful = (beta < problem.upper[:, active]) & (f <= nominations.most)
        useful |= (beta > problem.lower[:, active]) & (f >= nominations.least)
        keep = useful.any(axis=0)
        _, position = self._local(chosen)
        keep[self._active_position[position[position >= 0]]] = True
        if keep.sum() > (1 - self._settings.elimination.least_gain_ratio) * len(keep) or keep.all():
            return
        kept = np.flatnonzero(keep)
        self._rows.compact(kept)
        self._active_samples = self._active_samples.take(kept)
        self._set_active(active[kept])

    def _set_active(self, positions: NDArray[np.int64]) -> None:
        self._active = positions
        self._active_position = np.full(self._num_local, -1, np.int64)
        self._active_position[positions] = np.arange(len(positions))

    # -- 3: rows of other ranks

    def _start(self) -> None:
        """Fetch the samples that start with a coefficient, and compute the gradients that follow from them."""
        mine = np.flatnonzero(self._beta.any(axis=0))
        ids = self._world.gather_uneven(self._problem.samples.ids[mine], "exchanging the start")
        weights = self._world.gather_uneven(self._beta.sum(axis=0)[mine], "exchanging the start")
        everyone = np.concatenate(ids)
        if len(everyone):
            self._fetch(everyone)
            self._weights[self._seen_at[everyone]] = np.concatenate(weights)
            self._g = self._expanded(np.arange(self._num_local), np.dtype(np.float64))

    def _fetch(self, ids: NDArray[np.int64]) -> None:
        """Make sure that every rank has the rows of these samples."""
        ids = np.unique(ids)
        missing = ids[self._seen_at[ids] < 0]
        if len(missing) == 0:
            return
        position = self._position_of[missing]
        mine = self._problem.samples.take(position[position >= 0])
        doing = "exchanging rows"
        if self._world.num_ranks > 1:
            owned = np.concatenate(self._world.gather_uneven(mine.ids, doing))
            arrays = [
                np.concatenate(self._world.gather_uneven(array.ravel(), doing)) for array in mine.to_arrays()
            ]
            mine = mine.from_arrays(owned, arrays)
        self._seen_at[mine.ids] = np.arange(len(self._seen), len(self._seen) + len(mine))
        self._seen = self._seen.joined(mine)
        self._weights = np.concatenate([self._weights, np.zeros(len(mine))])

    # -- 4, 5: solve and apply

    def _improve(self, chosen: NDArray[np.float64], nominations: Nominations) -> int:
        """Optimise the working set and apply what changed; returns the number of pair updates."""
        samples = _samples_of(chosen, self._problem.num_samples)
        ids, which = samples, np.arange(len(samples))
        if self._num_sides > 1:  # both variables of a sample may be here
            ids, which = np.unique(samples, return_inverse=True)
        panel = self._seen.take(self._seen_at[ids]).astype(self._dtype)
        # Rank 0 tells its answer before it computes its kernel rows, the others compute theirs before they listen.
        doing = "exchanging coefficients"
        if self._world.rank == 0:
            answer = self._world.broadcast(self._solve_working_set(chosen, nominations, panel, which), doing)
        slots = self._fill_rows(ids, panel)
        if self._world.rank != 0:
            answer = self._world.broadcast(np.zeros(len(chosen) + 1), doing)
        beta, steps = answer[:-1], int(answer[-1])
        change: NDArray[np.float64] = np.zeros(len(ids))
        np.add.at(change, which, beta - chosen[:, 2])
        changed = np.flatnonzero(change)
        total = np.zeros(len(self._active))
        add_rows(self._rows.rows, slots[changed], change[changed], total)
        self._g[self._active] += total
        self._weights[self._seen_at[ids]] += change
        side, position = self._local(chosen)
        mine = position >= 0
        self._beta[side[mine], position[mine]] = beta[mine]
        now = dict(zip(chosen[:, 1], beta, strict=True))
        self._kept[:, 2] = [now[variable] for variable in self._kept[:, 1]]
        self._steps += steps
        self._exchanges += 1
        return steps

    def _fill_rows(self, ids: NDArray[np.int64], panel: Samples) -> NDArray[np.int64]:
        """Slots of the kernel rows of these samples; those that are not in the cache are computed."""
        slots, missing = self._rows.slots_for(ids)
        if missing.any():
            new = panel.take(np.flatnonzero(missing))
            self._problem.kernel.write_rows(new, self._active_samples, self._rows.rows, slots[missing])
            self._kernel_values += len(new) * len(self._active)
        return slots

    def _solve_working_set(
        self,
        chosen: NDArray[np.float64],
        nominations: Nominations,
        panel: Samples,
        which: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Coefficients of the working set, and after them the number of pair updates."""
        size = len(chosen)
        K = self._block.among(panel, which, num_known=size - self._num_new_now)
        tol, limit = self._settings.tol, self._settings.max_steps
        is_all = size >= nominations.num_active * self._num_sides
        target = 0.9 * tol if is_all else max(tol / 2, _RELATIVE * nominations.gap)
        beta = chosen[:, 2].copy()
        most_steps = 100 * size if not is_all else np.iinfo(np.int64).max
        if limit >= 0:
            most_steps = min(most_steps, limit - self._steps)
        steps = solve_block(K, chosen[:, 0].copy(), beta, chosen[:, 3], chosen[:, 4], target, most_steps)
        return np.append(beta, float(steps))

    # -- is it the optimum?

    def _settle(self, nominations: Nominations) -> float:
        """Bring back what was eliminated, check all samples in double precision; the true gap.

        Checked are all samples so near to a violation that single precision could hide one: nearer than `_SAFETY`
        times the largest deviation seen. Deviations are seen on those near samples and, against surprises, on samples
        spread over the rest.
        """
        self._settles += 1
        if nominations.num_active < self._problem.num_samples:
            self._reconstruct()
        checked = np.zeros(self._num_local, np.bool_)
        checked[:: max(1, self._num_local // _SPOT_CHECKS)] = True
        deviation = self._correct(np.flatnonzero(checked))
        while True:
            least, most, deviation = self._extremes(deviation)
            margin = self._settings.tol + _SAFETY * deviation
            f = self._g + self._problem.linear
            near = ((self._beta < self._problem.upper) & (f <= least + margin)).any(axis=0)
            near |= ((self._beta > self._problem.lower) & (f >= most - margin)).any(axis=0)
            near &= ~checked
            num_near = int(self._world.total(np.array([near.sum()]), "checking all samples")[0])
            if num_near == 0:
                return most - least
            deviation = max(deviation, self._correct(np.flatnonzero(near)))
            checked |= near

    def _extremes(self, deviation: float) -> tuple[float, float, float]:
        """Of the gradients of all samples of all ranks, and of the deviations."""
        f = self._g + self._problem.linear
        least = f[self._beta < self._problem.upper].min(initial=np.inf)
        most = f[self._beta > self._problem.lower].max(initial=-np.inf)
        mine = np.array([least, -most, -deviation])
        least, most, deviation = self._world.gather(mine, "checking all samples").min(axis=0) * [1, -1, -1]
        return float(least), float(most), float(deviation)

    def _correct(self, positions: NDArray[np.int64]) -> float:
        """Compute gradients anew in double precision; returns how far the largest was off."""
        exact = self._expanded(positions, np.dtype(np.float64))
        deviation = float(np.abs(exact - self._g[positions]).max(initial=0.0))
        self._g[positions] = exact
        return deviation

    def _reconstruct(self) -> None:
        """Compute the gradients of the eliminated samples from all coefficients, and make all samples active."""
        self._reconstructions += 1
        everyone = np.arange(self._num_local)
        gone = everyone[self._active_position < 0]
        self._g[gone] = self._expanded(gone, self._dtype)
        self._set_active(everyone)
        self._active_samples = self._problem.samples.astype(self._dtype)
        self._rows.clear(self._num_local)
        self._kept = np.zeros((0, 5))

    def _expanded(self, positions: NDArray[np.int64], dtype: Any) -> NDArray[np.float64]:
        """The g of some of this rank's samples, from all coefficients."""
        support = np.flatnonzero(self._weights)
        self._kernel_values += len(support) * len(positions)
        sums = expand(
            self._problem.kernel,
            self._seen.take(support).astype(dtype),
            self._weights[None, support],
            self._problem.samples.take(positions).astype(dtype),
        )
        return np.asarray(sums[0])

    # -- precision, report, result

    def _rows_dtype(self) -> Any:
        """Single precision where a Gaussian kernel is well scaled; the check in double precision decides."""
        kernel = self._problem.kernel
        squares = self._problem.samples.squares
        exponent = kernel.gamma * float(squares.max(initial=0.0))
        wants = kernel.name != "rbf" or self._settings.tol < _SINGLE_TOL or exponent > _SINGLE_EXPONENT
        wanted = self._world.total(np.array([int(wants)]), "agreeing on the precision")[0]
        return np.dtype(np.float64 if wanted else np.float32)

    def _use_double(self) -> None:
        if self._dtype != np.float64:
            self._dtype = np.dtype(np.float64)
            self._active_samples = self._problem.samples.astype(self._dtype).take(self._active)
            self._rows.release()
            self._rows = self._new_cache()
            self._block.forget()

    def _new_cache(self) -> RowCache:
        problem = self._problem
        at_least = min(problem.num_samples, self._size)
        return RowCache(
            problem.num_samples, len(self._active), self._settings.cache_bytes, at_least, self._dtype
        )

    def _report(self, nominations: Nominations, started_s: float) -> None:
        self._least_active = min(self._least_active, nominations.num_active)
        if self._settings.report is not None and self._world.rank == 0:
            self._settings.report(
                Progress(
                    self._exchanges,
                    self._steps,
                    nominations.gap,
                    nominations.num_active,
                    nominations.num_support,
                    time.monotonic() - started_s,
                )
            )

    def _solution(self, gap: float) -> Solution:
        beta, f = self._beta, self._g + self._problem.linear
        free = (beta > self._problem.lower) & (beta < self._problem.upper)
        objective = 0.5 * float((beta * (f + self._problem.linear)).sum())
        sums = self._world.total(np.array([f[free].sum(), free.sum(), objective]), "summing up")
        least, most, _ = self._extremes(0.0)
        offset = sums[0] / sums[1] if sums[1] else (least + most) / 2
        converged = gap <= self._settings.tol
        counters = Counters(
            self._exchanges,
            self._steps,
            self._kernel_values + self._block.num_kernel_values,
            self._reconstructions,
            self._least_active,
            self._rows.num_evictions,
            self._world.num_collectives,
            self._world.num_bytes,
        )
        return Solution(beta.sum(axis=0), float(offset), float(sums[2]), gap, converged, counters)


def _samples_of(chosen: NDArray[np.float64], num_samples: int) -> NDArray[np.int64]:
    return np.asarray(chosen[:, 1].astype(np.int64) % num_samples)
