"""Working set selection: each rank nominates its worst KKT violators, and all choose the same set from all nominations.

A variable below its upper bound may grow (the literature's set I_up), one above its lower bound may shrink (I_low). A
pair violates the KKT conditions if the gradient of one in I_low exceeds that of one in I_up. The gap is the largest
excess of any pair.

Rules
1. Every rank nominates its own; all ranks see all nominations (one all-gather) and choose alike.
2. Ties are broken by the variable's scrambled number, so the choice does not depend on the number of ranks. In the
   first working set all are tied. It is a sample of the whole set even if the rows are sorted.
3. The newer half of the last working set stays, or variables would come and go in pairs of sets.

A chosen working set is a sub-problem: its variables are optimised by SMO, all others stay where they are. Pair updates
touch a part of it only. Where rows are short, the kernel values among its samples are computed row by row when first
needed. Where they are long or not dense, they are computed all at once, by a matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from paceline_svm.compiled import FAR, LANES, compiled
from paceline_svm.kernel_rows import row_store, source_of
from paceline_svm.kernels import Kernel
from paceline_svm.problem import Active
from paceline_svm.sample_forms import DenseSamples, Samples
from paceline_svm.smo import Variables, lane_memory, lanes_of, solve

FIELDS = 5  # of a nomination: gradient, variable, coefficient, its least and its largest value
_LARGE_PROBLEM = 24_000  # variables
_ONE_SET = 2_048  # variables up to which a problem is one working set


class WorkingSet:
    """Chooses working sets, one after another; alike on every rank.

    Args:
        num_variables: Of the problem.
        size: Of every working set; None chooses by the problem.

    Attributes:
        size: Of the next working set, at most.
        kept: Variables of the last one that stay, shape (M, FIELDS).
        num_new: How many of the current one are new; they are its last ones.
    """

    def __init__(self, num_variables: int, size: int | None) -> None:
        self._num_variables, self._fixed = num_variables, size
        self.size = size or working_set_size(num_variables)
        self.num_new = 0
        self.kept: NDArray[np.float64] = np.zeros((0, FIELDS))

    @property
    def room(self) -> int:
        """Return the number of variables that may be new next time."""
        return self.size - len(self.kept)

    def choose(self, nominations: Nominations) -> NDArray[np.float64]:
        """Return the next working set, in rows (gradient, variable, coefficient, least, largest), the newest last."""
        new = choose(nominations, self.room)
        kept = self.kept.copy()
        kept[:, 0] = nominations.kept
        self.num_new = len(new)
        if self._fixed is None:
            self.size = working_set_size(self._num_variables, nominations.num_free)
        self.kept = new[: self.size // 2]
        return np.concatenate([kept, new])

    def change(self, beta: NDArray[np.float64]) -> None:
        """Note the coefficients of the current working set after it was optimised."""
        self.kept[:, 2] = beta[len(beta) - self.num_new :][: len(self.kept)]

    def clear(self) -> None:
        """Let none of its variables stay."""
        self.kept = np.zeros((0, FIELDS))


def working_set_size(num_variables: int, num_free: int = 0) -> int:
    """Return the number of variables that are optimised together, which is even. Small problems are one working set.

    Few working sets are needed where one holds all variables between their bounds; a larger one costs kernel values
    and pair updates for nothing.

    Args:
        num_variables: Of the problem.
        num_free: Those between their bounds, as known so far.
    """
    if num_variables <= _ONE_SET:
        return max(2, num_variables + num_variables % 2)
    least = min(max(num_variables // 12, 512), 1_024 if num_variables < _LARGE_PROBLEM else _ONE_SET)
    return min(max(least, 3 * num_free // 2), _ONE_SET, num_variables // 4) // 2 * 2


def choose(nominations: Nominations, num: int) -> NDArray[np.float64]:
    """`num` nominated variables, in turn from both lists, worst violators first, each once; shape (<= num, FIELDS)."""
    orders = []
    for table, sign in ((nominations.up, 1.0), (nominations.low, -1.0)):
        rows = np.flatnonzero(~np.isnan(table[:, 0]))
        tie = scrambled(table[rows, 1].astype(np.int64))
        orders.append(rows[np.lexsort((tie, sign * table[rows, 0]))])
    length = max(map(len, orders))
    table = np.full((length, 2, FIELDS), np.nan)  # both lists in turn
    table[: len(orders[0]), 0], table[: len(orders[1]), 1] = (
        nominations.up[orders[0]],
        nominations.low[orders[1]],
    )
    in_turn = table.reshape(-1, FIELDS)
    in_turn = in_turn[~np.isnan(in_turn[:, 0])]
    is_first = np.zeros(len(in_turn), np.bool_)
    is_first[np.unique(in_turn[:, 1], return_index=True)[1]] = True
    return in_turn[is_first][:num]


@dataclass(frozen=True)
class Nominations:
    """The message of a rank before a working set is chosen, or of all ranks, combined.

    Attributes:
        least: Smallest gradient in I_up.
        most: Largest gradient in I_low.
        num_active: Active samples.
        num_support: Samples with a coefficient.
        num_free: Variables between their bounds.
        is_short: Whether kernel rows find too little room in the cache, on any rank.
        counts: Active samples of every rank.
        up: Worst violators in I_up, in no order, shape (<= k, FIELDS); NaN where there is none.
        low: Worst violators in I_low, likewise.
        kept: Gradients of the variables that stay, -inf where the rank does not have them.
    """

    least: float
    most: float
    num_active: int
    num_support: int
    num_free: int
    is_short: bool
    up: NDArray[np.float64]
    low: NDArray[np.float64]
    kept: NDArray[np.float64]
    counts: NDArray[np.int64]

    def pack(self, num: int) -> NDArray[np.float64]:
        """Pack the nominations into an array, whose shape depends only on `num` per kind and the kept variables."""
        out = np.full((2 + 2 * num, FIELDS), np.nan)
        out[0] = self.least, self.most, self.num_active, self.num_support, self.is_short
        out[1, 0] = self.num_free
        out[2 : 2 + len(self.up)] = self.up
        out[2 + num : 2 + num + len(self.low)] = self.low
        return np.concatenate([out.ravel(), self.kept])

    @classmethod
    def unpack(cls, packed: NDArray[np.float64], num: int) -> Nominations:
        """Every rank's nominations as one, from the packed ones, shape (ranks, packed size)."""
        table = packed[:, : (2 + 2 * num) * FIELDS].reshape(len(packed), -1, FIELDS)
        heads = table[:, 0]
        return cls(
            least=float(heads[:, 0].min()),
            most=float(heads[:, 1].max()),
            num_active=int(heads[:, 2].sum()),
            num_support=int(heads[:, 3].max()),
            num_free=int(table[:, 1, 0].sum()),
            is_short=bool(heads[:, 4].max()),
            up=table[:, 2 : 2 + num].reshape(-1, FIELDS),
            low=table[:, 2 + num :].reshape(-1, FIELDS),
            kept=packed[:, (2 + 2 * num) * FIELDS :].max(axis=0),
            counts=heads[:, 2].astype(np.int64),
        )

    @property
    def gap(self) -> float:
        """Return the largest violation."""
        return self.most - self.least


def nominate(
    active: Active, kept: NDArray[np.float64], num: int, num_support: int, is_short: bool
) -> Nominations:
    """Return this rank's nominations.

    Args:
        active: Its active samples.
        kept: Variables that stay in the working set, shape (M, FIELDS); they are not nominated.
        num: Candidates of each kind.
        num_support: Samples with a coefficient, of all ranks.
        is_short: As in `Nominations`.
    """
    S, num_samples = len(active.beta), len(active.position_of)
    side, sample = np.divmod(kept[:, 1].astype(np.int64), num_samples)
    position = active.position_of[sample]
    mine = position >= 0
    at = side[mine], position[mine]
    left_out = np.zeros(active.beta.shape, np.bool_)
    left_out[at] = True
    up_table, low_table = np.empty(active.beta.shape), np.empty(active.beta.shape)
    least, most, num_free = violations(
        active.g, active.linear, active.beta, active.lower, active.upper, left_out, up_table, low_table
    )
    kept_f = np.full(len(kept), -np.inf)
    kept_f[mine] = active.g[at[1]] + active.linear[at]
    numbers = active.samples.ids
    if S > 1:
        numbers = np.concatenate([numbers, numbers + num_samples])

    def candidates(values: NDArray[np.float64]) -> NDArray[np.float64]:
        chosen = best(values.ravel(), numbers, num)
        at = np.divmod(chosen, len(active))  # side and sample
        f, bounds = active.g[at[1]] + active.linear[at], (active.lower[at], active.upper[at])
        return np.stack([f, numbers[chosen], active.beta[at], *bounds], axis=1)

    return Nominations(
        least=least,
        most=most,
        num_active=len(active),
        num_support=num_support,
        num_free=num_free,
        is_short=is_short,
        up=candidates(up_table),
        low=candidates(low_table),
        kept=kept_f,
        counts=np.array([len(active)]),
    )


def scrambled(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Distinct pseudo-random numbers for distinct numbers below 2^32 (multiplicative hashing)."""
    return np.asarray((numbers * 2_654_435_761) & 0xFFFFFFFF)


def best(values: NDArray[np.float64], numbers: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    """Return positions of the `num` smallest values below `FAR`, or fewer if there are fewer, in no order.

    Args:
        values: Shape (N,).
        numbers: Of the variables, shape (N,); they decide if all values are the same, as they are at the start.
        num: How many.
    """
    if len(values) > num:
        chosen = np.argpartition(values, num - 1)[:num]
        least, largest = values[chosen].min(), values[chosen].max()
        if least < FAR and least == largest:
            tied = np.flatnonzero(values == least)
            if len(tied) > num:
                chosen = tied[np.argpartition(scrambled(numbers[tied]), num - 1)[:num]]
        return np.asarray(chosen[values[chosen] < FAR])
    return np.flatnonzero(values < FAR)


@compiled
def violations(
    g: NDArray[np.float64],
    linear: NDArray[np.float64],
    beta: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    left_out: NDArray[np.bool_],
    up_table: NDArray[np.float64],
    low_table: NDArray[np.float64],
) -> tuple[float, float, int]:
    """Return gradients of the variables in I_up and in I_low, and their extremes, in one pass.

    Args:
        g: Of N samples.
        linear: Of S variables a sample, shape (S, N); so are `beta`, `lower`, `upper`.
        beta: Coefficients.
        lower: Least coefficients.
        upper: Largest coefficients.
        left_out: Variables that count for the extremes only, shape (S, N).
        up_table: Gradients of those that may grow, `FAR` for others; shape (S, N), written.
        low_table: Minus the gradients of those that may shrink, `FAR` for others; written.

    Returns:
        The least gradient of those that may grow, the largest of those that may shrink, and how many may do both.
    """
    S, N = linear.shape
    least, most, num_free = np.inf, -np.inf, 0
    for s in range(S):
        for i in range(N):
            f = g[i] + linear[s, i]
            up, down = FAR, FAR
            if beta[s, i] < upper[s, i]:
                if f < least:
                    least = f
                up = f
            if beta[s, i] > lower[s, i]:
                if f > most:
                    most = f
                down = -f
            num_free += up < FAR and down < FAR
            up_table[s, i] = FAR if left_out[s, i] else up
            low_table[s, i] = FAR if left_out[s, i] else down
    return least, most, num_free


_NARROW = 48  # features from which a matrix product pays, though half of its values are never used


class SubProblem:
    """Solves working sets, one after another, in memory that is used again.

    Args:
        kernel: Between samples.

    Attributes:
        num_kernel_values: Kernel values computed so far.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._block = WorkingBlock(kernel)
        self._room: NDArray[Any] = np.empty(0)
        self._num_values = 0

    @property
    def num_kernel_values(self) -> int:
        return self._num_values + self._block.num_kernel_values

    def forget(self) -> None:
        """Know nothing of the last working set; the precision may change."""
        self._block.forget()

    def solve(
        self, panel: Samples, num_known: int, table: NDArray[np.float64], target: float, most_steps: int
    ) -> tuple[NDArray[np.float64], int, float]:
        """Optimise.

        Args:
            panel: M samples, each once.
            num_known: The first of them, which were among the newest of the last set, in the same order.
            table: Gradients, coefficients, least and largest coefficients, shape (4, S, M).
            target: Stop when the largest violation is below it.
            most_steps: Stop after as many pair updates.

        Returns:
            The coefficients, shape (S, M), the number of pair updates, and by how much they lowered the objective.
        """
        num = len(panel)
        width = -(-num // LANES) * LANES
        padded = np.zeros((4, table.shape[1], width))
        padded[:, :, :num] = table
        diagonal = np.ones(width)
        if isinstance(panel, DenseSamples) and panel.rows.shape[1] < _NARROW:
            source = source_of(self._kernel, panel, panel.dtype)
            diagonal[:num] = self._kernel.diagonal(panel)
            store = row_store(source, num, self._rows(num, width, panel.dtype))
        else:
            source = source_of(self._kernel, None, panel.dtype)
            K: NDArray[Any] = self._block.among(panel, num_known)
            diagonal[:num] = K.diagonal()
            store = row_store(source, num, K)
            store.slot_of[:] = np.arange(num)
        rounded = padded[0].ravel().astype(store.rows.dtype), diagonal.astype(store.rows.dtype)
        variables = Variables(rounded[0], padded[1].ravel(), padded[2].ravel(), padded[3].ravel(), rounded[1])
        memory = lane_memory(len(variables.F), variables.F.dtype)
        lanes = cast("Any", lanes_of).py_func(store, variables, memory)
        steps, decrease, num_values = solve(source, store, variables, lanes, memory, target, most_steps)
        self._num_values += num_values
        return variables.beta.reshape(-1, width)[:, :num], steps, decrease

    def _rows(self, num: int, width: int, dtype: Any) -> NDArray[Any]:
        """Room for all rows; pages that are never written to cost nothing."""
        if len(self._room) < num * width or self._room.dtype != dtype:
            self._room = np.empty(2 * num * width, dtype)
        return self._room[: num * width].reshape(num, width)


class WorkingBlock:
    """The block, in one of two buffers that are used in turn.

    Args:
        kernel: Between samples.

    Attributes:
        num_kernel_values: Kernel values computed so far.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._memory: list[NDArray[Any]] = [np.empty(0), np.empty(0)]
        self.num_kernel_values = 0
        self.forget()

    def forget(self) -> None:
        """Know nothing of the last working set; the precision may change."""
        self._last: NDArray[Any] = np.zeros((0, 0))  # among the newest of the last set

    def among(self, panel: Samples, num_known: int) -> NDArray[Any]:
        """Compute the values among the working set's samples.

        Args:
            panel: They, each once.
            num_known: Samples that were among the newest of the last set, and are the first, in the same order.

        Returns:
            Shape (samples, samples padded to LANES), zero in the padding; valid until the call after the next.
        """
        size = len(panel)
        width = (size + LANES - 1) // LANES * LANES
        memory, self._memory = self._memory[0], self._memory[::-1]
        if len(memory) < size * width or memory.dtype != panel.dtype:
            memory = self._memory[1] = np.empty(size * width, panel.dtype)
        out = memory[: size * width].reshape(size, width)
        known = min(num_known, len(self._last))
        out[:known, :known] = self._last[:known, :known]
        out[:, size:] = 0
        new = panel.take(slice(known, None))
        self._kernel.write_rows(new, panel, out, np.arange(known, size))
        self.num_kernel_values += len(new) * size
        _mirror(out, known, size)
        self._last = out[num_known:, num_known:]
        return out


@compiled
def _mirror(block: NDArray[Any], known: int, size: int) -> None:
    """Write the first `known` columns of the rows from `known` on to the columns from there on."""
    width = 32  # tiles: a column at a time would miss the cache at every step
    for i0 in range(known, size, width):
        for j0 in range(0, known, width):
            for j in range(j0, min(j0 + width, known)):
                for i in range(i0, min(i0 + width, size)):
                    block[j, i] = block[i, j]
