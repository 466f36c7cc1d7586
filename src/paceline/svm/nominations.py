"""What every rank says before a working set is chosen: how far it is from the optimum, and its worst violators.

Rule: ties are broken by the variable's scrambled number: the choice does not depend on the number of ranks, and the
first working set, when all are tied, is a sample of the whole set even if the rows are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.svm.active import Active
from paceline.svm.compiled import FAR, compiled

FIELDS = 5  # of a nomination: gradient, variable, coefficient, its least and its largest value


@dataclass(frozen=True)
class Nominations:
    """What a rank says before a working set is chosen, or what all said.

    Attributes:
        least: Smallest gradient among variables that may grow.
        most: Largest gradient among variables that may shrink.
        num_active: Active samples.
        num_support: Samples with a coefficient.
        num_free: Variables between their bounds.
        is_short: Whether kernel rows find too little room, on any rank.
        counts: Active samples of every rank.
        growing: Best candidates to grow, in no order, shape (<= k, 5); NaN where there is none.
        shrinking: Best candidates to shrink, likewise.
        kept: Gradients of the variables that stay, -inf where the rank does not have them.
    """

    least: float
    most: float
    num_active: int
    num_support: int
    num_free: int
    is_short: bool
    growing: NDArray[np.float64]
    shrinking: NDArray[np.float64]
    kept: NDArray[np.float64]
    counts: NDArray[np.int64]

    def pack(self, num: int) -> NDArray[np.float64]:
        """One array whose shape depends on `num` candidates of a kind and the variables that stay only."""
        out = np.full((2 + 2 * num, FIELDS), np.nan)
        out[0] = self.least, self.most, self.num_active, self.num_support, self.is_short
        out[1, 0] = self.num_free
        out[2 : 2 + len(self.growing)] = self.growing
        out[2 + num : 2 + num + len(self.shrinking)] = self.shrinking
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
            growing=table[:, 2 : 2 + num].reshape(-1, FIELDS),
            shrinking=table[:, 2 + num :].reshape(-1, FIELDS),
            kept=packed[:, (2 + 2 * num) * FIELDS :].max(axis=0),
            counts=heads[:, 2].astype(np.int64),
        )

    @property
    def gap(self) -> float:
        """The largest violation."""
        return self.most - self.least


def nominate(
    active: Active, kept: NDArray[np.float64], num: int, num_support: int, is_short: bool
) -> Nominations:
    """This rank's nominations.

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
    growing, shrinking = np.empty(active.beta.shape), np.empty(active.beta.shape)
    least, most, num_free = _violations(
        active.g, active.linear, active.beta, active.lower, active.upper, left_out, growing, shrinking
    )
    kept_f = np.full(len(kept), -np.inf)
    kept_f[mine] = active.g[at[1]] + active.linear[at]
    numbers = active.samples.ids
    if S > 1:
        numbers = np.concatenate([numbers, numbers + num_samples])

    def candidates(values: NDArray[np.float64]) -> NDArray[np.float64]:
        chosen = best(values.ravel(), numbers, num)
        out = np.empty((len(chosen), FIELDS))
        _describe(chosen, numbers, active.g, active.linear, active.beta, active.lower, active.upper, out)
        return out

    return Nominations(
        least=least,
        most=most,
        num_active=len(active),
        num_support=num_support,
        num_free=num_free,
        is_short=is_short,
        growing=candidates(growing),
        shrinking=candidates(shrinking),
        kept=kept_f,
        counts=np.array([len(active)]),
    )


def scrambled(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Different numbers for different ones below 2^32, in no apparent order."""
    return np.asarray((numbers * 2_654_435_761) & 0xFFFFFFFF)


def best(values: NDArray[np.float64], numbers: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    """Positions of the `num` smallest values below `FAR`, or fewer if there are fewer, in no order.

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
def _describe(
    chosen: NDArray[np.int64],
    numbers: NDArray[np.int64],
    g: NDArray[np.float64],
    linear: NDArray[np.float64],
    beta: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    out: NDArray[np.float64],
) -> None:
    """Write the nominations of variables, given by their flat positions in `beta`, to `out`, shape (M, FIELDS)."""
    for k in range(len(chosen)):
        s, i = divmod(chosen[k], len(g))
        out[k, 0] = g[i] + linear[s, i]
        out[k, 1] = numbers[chosen[k]]
        out[k, 2], out[k, 3], out[k, 4] = beta[s, i], lower[s, i], upper[s, i]


@compiled
def _violations(
    g: NDArray[np.float64],
    linear: NDArray[np.float64],
    beta: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    left_out: NDArray[np.bool_],
    growing: NDArray[np.float64],
    shrinking: NDArray[np.float64],
) -> tuple[float, float, int]:
    """How badly each variable violates optimality, in one pass.

    Args:
        g: Of N samples.
        linear: Of S variables a sample, shape (S, N); so are `beta`, `lower`, `upper`.
        beta: Coefficients.
        lower: Least coefficients.
        upper: Largest coefficients.
        left_out: Variables that count for the extremes only, shape (S, N).
        growing: Gradients of those that may grow, `FAR` for others; shape (S, N), written.
        shrinking: Minus the gradients of those that may shrink, `FAR` for others; written.

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
                least = min(least, f)
                up = f
            if beta[s, i] > lower[s, i]:
                most = max(most, f)
                down = -f
            num_free += up < FAR and down < FAR
            growing[s, i] = FAR if left_out[s, i] else up
            shrinking[s, i] = FAR if left_out[s, i] else down
    return least, most, num_free
