"""Shrinking: samples that can no longer be in a violating pair take no part, until their gradients are reconstructed.

Rules
1. A sample that was ever in a working set is a chosen one: every rank has its row and its coefficient. No other sample
   has a coefficient, so gradients depend on chosen samples only; support vectors are among them.
2. A shrunk sample returns to its owner, the rank that passed it, with the g of the moment it was shrunk.
3. Samples that were shrunk together form a group with one reference: the coefficients of that moment. When unshrunk,
   a group's g grows by the kernel values times the change of the coefficients since then. So groups from different
   moments have different references.

Heuristics say when samples are tested. Their names are those of the paper. Single or multi says whether shrinking goes
on after the first unshrinking. A threshold in pair updates is a number, or per cent of the samples. With adaptive the
next test comes after min(threshold, active samples) updates, so it comes earlier the more samples are shrunk; it is
multi otherwise. The default, auto, is no rule of the paper: it tests only if kernel rows are computed again.

Source:
    Narasimhan, Vishnu et al. 2014 (arXiv 1406.5161). Theirs reconstructs gradients from zero; here only the change
    since shrinking is added. Theirs tests each sample while its gradient is updated; here all are tested between two
    working sets, so a threshold below a working set's updates means "every time".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigurationError
from paceline_svm.communicator import Communicator
from paceline_svm.kernels import expand
from paceline_svm.problem import Active, Problem
from paceline_svm.sample_forms import DenseSamples, Samples, gather_samples

_IMBALANCE, _IMBALANCE_SAMPLES = 1.25, 64  # most active samples of a rank over the mean; least excess


class ChosenSamples:
    """Rows and coefficients of the samples that were ever chosen, the same on every rank; alone, of all samples.

    Args:
        problem: This rank's part.
        communicator: The ranks.
        rows: This rank's samples in the precision of the kernel rows.

    Attributes:
        weights: Coefficients summed over a sample's variables, in the order in which the samples were fetched.
    """

    def __init__(self, problem: Problem, communicator: Communicator, rows: Samples) -> None:
        self._problem, self._communicator, self._rows = problem, communicator, rows
        self._own_position = np.full(problem.num_samples, -1, np.int64)
        self._own_position[problem.samples.ids] = np.arange(len(problem.samples))
        self._is_alone = communicator.num_ranks == 1
        self._at = self._own_position if self._is_alone else np.full(problem.num_samples, -1, np.int64)
        self._samples: Samples = problem.samples if self._is_alone else problem.samples.take(slice(0, 0))
        self._room: DenseSamples | None = None
        self.weights = np.zeros(len(self._samples))

    def use(self, rows: Samples) -> None:
        """Kernel rows have another precision from now on."""
        self._rows = rows

    def fetch_all(self) -> None:
        """Let every rank have all samples, where that is little: no iteration exchanges rows then. Collective."""
        if not self._is_alone:
            self.fetch(np.arange(self._problem.num_samples))

    def fetch(self, ids: NDArray[np.int64]) -> None:
        """Make sure that every rank has these samples. Collective; every rank passes the same."""
        missing = ids[self._at[ids] < 0]
        if len(missing) == 0:
            return
        missing = np.unique(missing)
        own = self._own_position[missing]
        mine, doing = self._problem.samples.take(own[own >= 0]), "exchanging rows"
        if isinstance(mine, DenseSamples):
            # One owner each, so the sum is exact.
            rows = np.zeros((len(missing), mine.rows.shape[1]), mine.dtype)
            rows[own >= 0] = mine.rows
            self._append(DenseSamples.of(self._communicator.total(rows, doing), missing))
        else:
            is_all = len(missing) == self._problem.num_samples
            most_numbers = self._problem.extent.most_numbers if is_all else None
            self._append(gather_samples(self._communicator, mine, doing, most_numbers))

    def _append(self, new: Samples) -> None:
        first = len(self._samples)
        last = first + len(new)
        self._at[new.ids] = np.arange(first, last)
        self.weights = np.concatenate([self.weights, np.zeros(len(new))])
        if first == 0 or not isinstance(new, DenseSamples):
            self._samples = self._samples.joined(new) if first else new
            return
        if self._room is None or len(self._room) < last:
            more = max(last, 1024)  # twice as much room, so a row is moved once or twice
            rows = np.zeros((more, new.rows.shape[1]), new.dtype)
            room = self._samples.joined(DenseSamples(np.zeros(more, np.int64), rows, np.zeros(more)))
            assert isinstance(room, DenseSamples)
            self._room = room
        at = slice(first, last)
        self._room.ids[at] = new.ids
        self._room.rows[at] = new.rows
        self._room.squares[at] = new.squares
        self._samples = self._room.take(slice(0, last))

    def add(self, ids: NDArray[np.int64], change: NDArray[np.float64]) -> None:
        """Add to the coefficients of samples that were fetched."""
        self.weights[self._at[ids]] += change

    def panel(self, ids: NDArray[np.int64]) -> Samples:
        """Return the fetched samples, in the precision of the kernel rows."""
        if self._is_alone:
            return self._rows.take(self._at[ids])
        return self._samples.take(self._at[ids]).astype(self._rows.dtype)

    def at(self, positions: NDArray[np.int64]) -> Samples:
        """Return samples by their place in `weights`, in the precision in which they were passed."""
        return self._samples.take(positions)

    def own_position_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return positions among this rank's own samples, or -1."""
        return self._own_position[ids]


@dataclass(frozen=True)
class ShrunkGroup:
    """Samples that were shrunk together.

    Attributes:
        positions: Among the rank's own.
        reference: `ChosenSamples.weights` at that moment.
    """

    positions: NDArray[np.int64]
    reference: NDArray[np.float64]


class ShrunkSamples:
    """A rank's own samples, while some of them are shrunk or worked on by other ranks.

    Args:
        problem: This rank's part.
        communicator: The ranks.
        chosen: All coefficients that may not be zero, and the samples they belong to.

    Attributes:
        has_moved: Whether active samples may be with ranks that do not own them.
        num_kernel_values: Kernel values that unshrinking has computed so far.
    """

    def __init__(self, problem: Problem, communicator: Communicator, chosen: ChosenSamples) -> None:
        self._problem, self._communicator, self._chosen = problem, communicator, chosen
        self._g = np.zeros(len(problem.samples))
        self._beta = np.zeros((len(problem.linear), len(problem.samples)))
        self._groups: list[ShrunkGroup] = []
        self.has_moved = False
        self.num_kernel_values = 0

    def add(self, going: Active) -> None:
        """Shrink these samples. Collective if samples have moved."""
        positions = self._return_to_owners(going, "sending shrunk samples home")
        if len(positions):
            self._groups.append(ShrunkGroup(positions, self._chosen.weights.copy()))

    def unshrink(self, active: Active, rows: Samples) -> Active:
        """Return all of this rank's own samples, with correct gradients. Collective if samples moved between ranks.

        Args:
            active: Those that are not shrunk.
            rows: All of this rank's own, in the precision of the kernel rows.
        """
        self._return_to_owners(active, "sending active samples home")
        for group in self._groups:
            change = self._chosen.weights.copy()
            change[: len(group.reference)] -= group.reference
            self._g[group.positions] += self._sums(change, rows, group.positions)
        self._groups, self.has_moved = [], False
        everyone = Active.of(self._problem, rows)
        everyone.g, everyone.beta = self._g.copy(), self._beta.copy()
        return everyone

    def _sums(
        self, weights: NDArray[np.float64], rows: Samples, positions: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Kernel values of chosen samples by their weights, summed for the own samples at some positions."""
        support = np.flatnonzero(weights)
        self.num_kernel_values += len(support) * len(positions)
        behind = self._chosen.at(support).astype(rows.dtype)
        sums = expand(self._problem.kernel, behind, weights[None, support], rows.take(positions))
        return np.asarray(sums[0])

    def _return_to_owners(self, active: Active, doing: str) -> NDArray[np.int64]:
        """Keep g and beta of own samples, and send those of others to their owners; returns own positions."""
        ids, values = active.samples.ids, np.column_stack([active.g, active.beta.T])
        if self.has_moved:
            is_own = self._chosen.own_position_of(ids) >= 0
            width = values.shape[1]
            sent_ids = np.concatenate(self._communicator.gather_uneven(ids[~is_own], doing))
            numbers = np.concatenate(self._communicator.gather_uneven(values[~is_own].ravel(), doing))
            sent = numbers.reshape(-1, width)
            is_mine = self._chosen.own_position_of(sent_ids) >= 0
            ids = np.concatenate([ids[is_own], sent_ids[is_mine]])
            values = np.concatenate([values[is_own], sent[is_mine]])
        positions = self._chosen.own_position_of(ids)
        self._g[positions] = values[:, 0]
        self._beta[:, positions] = values[:, 1:].T
        return positions


def may_violate(active: Active, least: float, most: float) -> NDArray[np.bool_]:
    """Return the active samples that have a variable that is in a violating pair, or may yet be, shape (N,).

    Args:
        active: N samples.
        least: Smallest gradient of all variables that may grow, over all ranks.
        most: Largest gradient of all that may shrink.
    """
    f = active.g + active.linear
    useful = (active.beta < active.upper) & (f <= most)
    useful |= (active.beta > active.lower) & (f >= least)
    return np.asarray(useful.any(axis=0), np.bool_)


def is_out_of_balance(counts: NDArray[np.int64], num_samples: int) -> bool:
    """Return whether shrinking has left some rank with many more active samples than others.

    Args:
        counts: Active samples of every rank.
        num_samples: Of the whole problem.
    """
    excess = counts.max() - counts.mean()
    was_shrunk = counts.sum() < num_samples
    return bool(was_shrunk and excess > max((_IMBALANCE - 1) * counts.mean(), _IMBALANCE_SAMPLES))


def balanced(communicator: Communicator, active: Active, counts: NDArray[np.int64]) -> Active:
    """Active samples spread evenly: ranks with too many hand over their last ones. Collective.

    Args:
        communicator: The ranks.
        active: This rank's.
        counts: How many every rank has.
    """
    doing = "balancing the active samples"
    quotas = np.full(len(counts), counts.sum() // len(counts))
    quotas[: counts.sum() % len(counts)] += 1
    gives, takes = np.maximum(counts - quotas, 0), np.maximum(quotas - counts, 0)
    stay = len(active) - int(gives[communicator.rank])
    moving = active.take(np.arange(stay, len(active)))
    samples = gather_samples(communicator, moving.samples, doing)
    width = moving.columns().shape[1]
    columns = np.concatenate(communicator.gather_uneven(moving.columns().ravel(), doing)).reshape(-1, width)
    first = int(takes[: communicator.rank].sum())
    mine = slice(first, first + int(takes[communicator.rank]))
    return active.take(np.arange(stay)).joined(samples.take(mine), columns[mine])


_NAME = re.compile(r"(single|multi|adaptive)-(\d+)(%?)")
_USUAL_RATIO = 0.05  # the published code's threshold
_LEAST_GAIN_RATIO = 0.1


@dataclass(frozen=True)
class Heuristic:
    """A heuristic.

    Attributes:
        every: Pair updates between two tests, or the fraction of the samples if `is_ratio`; None: never.
        is_ratio: What `every` counts.
        again: Whether to go on shrinking after the first unshrinking.
        at_most_active: Whether the active samples are the threshold once they are fewer.
        only_short_of_memory: Whether to test only when kernel rows are computed again for want of memory.
        least_gain_ratio: Shrink only if it drops at least this fraction of a rank's active samples.
    """

    every: float | None = None
    is_ratio: bool = False
    again: bool = True
    at_most_active: bool = False
    only_short_of_memory: bool = False
    least_gain_ratio: float = 0.0

    @classmethod
    def named(cls, name: str) -> Heuristic:
        """Return the heuristic of that name.

        Args:
            name: `auto`, `none`, `adaptive`, which is `adaptive-5%`, or such as `multi-5%`, `multi-500`, `single-50%`.

        Raises:
            ConfigurationError: There is none of that name.
        """
        if name == "none":
            return cls()
        if name == "auto":
            return cls(_USUAL_RATIO, True, only_short_of_memory=True, least_gain_ratio=_LEAST_GAIN_RATIO)
        match = _NAME.fullmatch(f"adaptive-{_USUAL_RATIO:.0%}" if name == "adaptive" else name)
        if match is None or int(match[2]) == 0:
            raise ConfigurationError(
                f"there is no shrinking heuristic {name!r}. Pass 'auto', 'none', 'adaptive', or single, multi or "
                "adaptive with a threshold in pair updates or per cent of the samples: 'multi-5%', 'single-500'."
            )
        every = float(match[2])
        return cls(
            every / 100 if match[3] else every, bool(match[3]), match[1] != "single", match[1] == "adaptive"
        )

    def is_due(
        self, steps_since: int, num_samples: int, num_active: int, num_unshrinks: int, short_of_memory: bool
    ) -> bool:
        """Return whether to test the samples now.

        Args:
            steps_since: Pair updates since the last test.
            num_samples: Of the whole problem.
            num_active: Those that are not shrunk, of all ranks.
            num_unshrinks: So far.
            short_of_memory: Whether that is so, on any rank.
        """
        if self.every is None or (num_unshrinks and not self.again):
            return False
        if self.only_short_of_memory and not short_of_memory:
            return False
        threshold = self.every * num_samples if self.is_ratio else self.every
        return steps_since >= (min(threshold, num_active) if self.at_most_active else threshold)
