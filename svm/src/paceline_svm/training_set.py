"""The training set of all ranks, of which each rank holds its part: numbering, and checks that fail on all ranks.

Rules
1. Samples are numbered over all ranks: as in the array that every rank passed (`rows="all"`), or rank after rank.
2. What is wrong with one rank's arguments is an error on every rank: no rank waits for one that has raised.
3. A sample whose weight is not positive takes no part.
"""

from __future__ import annotations

import base64
import dataclasses
import numbers
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy.sparse as sp
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.errors import ConfigurationError
from paceline_svm.communicator import Alone, Communicator, GroupCommunicator
from paceline_svm.problem import Extent
from paceline_svm.sample_forms import (
    DenseSamples,
    GramSamples,
    Samples,
    SparseSamples,
    gather_samples,
    renumbered,
)

_T = TypeVar("_T")
ROWS = ("own", "all", "alone")
_MOST_SHOWN = 3  # differences of a rank


def communicator_for(rows: str) -> Communicator:
    """Return the default process group's ranks, or this process alone if there is no group or `rows` says so."""
    return GroupCommunicator() if rows != "alone" and has_peers() else Alone()


def has_peers() -> bool:
    """Return whether the default process group has other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agreed(
    gather: Callable[[Any, str], list[Any]], check: Callable[[], tuple[_T, Any]]
) -> tuple[_T, list[Any]]:
    """Return what `check` returns and what all ranks tell, once it has succeeded on every rank.

    Args:
        gather: Of the communicator.
        check: Returns what this rank has found, and what it tells the others: what JSON can hold.

    Raises:
        ConfigurationError: It raised on another rank. Where it raised here, that exception.
    """
    doing = "checking the arguments"
    try:
        found, mine = check()
    except (ValueError, TypeError) as error:
        gather([str(error), None], doing)
        raise
    told = gather([None, mine], doing)
    wrong = {rank: words for rank, (words, _) in enumerate(told) if words is not None}
    if wrong:
        rank, words = min(wrong.items())
        raise ConfigurationError(f"rank {rank} cannot fit, so none can: {words}")
    return found, [facts for _, facts in told]


def check_alike(of_ranks: list[dict[str, str]]) -> None:
    """Refuse to fit where a rank has something else than rank 0, alike on every rank.

    Args:
        of_ranks: What each rank has, in words, by what it is.
    """
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        different = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if different:
            words = "; ".join(
                f"{name}: {first.get(name, 'none')} on rank 0, {other.get(name, 'none')} on rank {rank}"
                for name in different[:_MOST_SHOWN]
            )
            raise ConfigurationError(
                f"ranks 0 and {rank} cannot fit one model: {words}. Pass the same settings, and data of one kind, on "
                "every rank. Nothing was fitted."
            )


def in_words(value: Any) -> str:
    """Return a parameter as text that is the same on every rank if it is the same parameter."""
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, numbers.Real):  # 1 or numpy's 1.0
        return repr(float(value)).removesuffix(".0")
    if isinstance(value, dict):
        pairs = sorted(f"{in_words(key)}: {in_words(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    return str(value)


def checksum(*given: Any) -> str:
    """Return a checksum of arrays, dense or CSR; None counts as an empty one."""
    found = 0
    for one in given:
        for array in (one.data, one.indices, one.indptr) if sp.issparse(one) else (one,):
            numbers_of = np.asarray([] if array is None else array)
            if numbers_of.dtype.kind == "O":  # text, as `check_classification_targets` has seen
                numbers_of = numbers_of.astype("U")
            found = zlib.crc32(np.ascontiguousarray(numbers_of).ravel().view(np.uint8).data, found)
    return f"checksum {found:08x}"


@dataclass(frozen=True)
class Part:
    """The part of one rank in a training set, before the rank knows of the others.

    Attributes:
        X: All rows that were passed, checked: dense or CSR, or rows of a Gram matrix.
        passed_y: Targets of all these rows.
        samples: Those that take part; their ids are positions in `X`.
        y: Targets of these, shape (N,).
        weights: Likewise.
    """

    X: Any
    passed_y: NDArray[Any]
    samples: Samples
    y: NDArray[Any]
    weights: NDArray[np.float64]

    @classmethod
    def of(cls, X: Any, y: NDArray[Any], weights: Any, dealt: slice) -> Part:
        """Checked rows without those of no weight.

        Args:
            X: See above.
            y: Of all rows.
            weights: Of all rows, or None for ones.
            dealt: Which rows are this rank's.
        """
        weights = np.ones(len(y)) if weights is None else np.asarray(weights, np.float64)
        at = np.arange(len(y))[dealt]
        at = at[weights[at] > 0].astype(np.int64)
        rows = X if len(at) == len(y) else X[at]
        samples = SparseSamples.of(rows, at) if sp.issparse(X) else DenseSamples.of(rows, at)
        return cls(X, y, samples, y[at], weights[at])


class Facts(NamedTuple):
    """The facts that every rank tells of its part, before anything else.

    Attributes:
        num_rows: That were passed to it.
        num_samples: That take part.
        squares: Sum of their squared lengths.
        largest_square: Of these.
        alike: What has to be the same on every rank, in words, by what it is.
        labels: Of all rows and how often each occurs, where ranks pass rows of their own to a classifier.
        moments: Number and sum of all features of all rows, and the sum of their squared distances from their mean,
            or of sparse ones from zero. None where nothing needs their variance.
        sums: Of each feature over its samples, as `packed_numbers`; empty where nothing needs them.
    """

    num_rows: int
    num_samples: int
    squares: float
    largest_square: float
    alike: dict[str, str]
    labels: Any
    moments: Any
    sums: str

    @classmethod
    def of(
        cls, part: Part, alike: dict[str, str], labels: Any, *, with_moments: bool, with_sums: bool
    ) -> Facts:
        samples = part.samples
        squares = samples.squares
        # What overflows is refused once all ranks know of it.
        with np.errstate(over="ignore", invalid="ignore"):
            sums = samples.rows.sum(axis=0, dtype=np.float64) if with_sums else np.zeros(0)  # type: ignore[attr-defined]
            return cls(
                part.X.shape[0],
                len(samples),
                float(squares.sum()),
                float(squares.max(initial=0.0)),
                alike,
                labels,
                moments(part.X) if with_moments else None,
                base64.b64encode(sums.tobytes()).decode(),
            )


def moments(X: Any) -> tuple[int, float, float]:
    """Return the moments of `Facts`, of one rank's rows."""
    count, total = X.shape[0] * X.shape[1], float(X.sum(dtype=np.float64))
    if sp.issparse(X):
        return count, total, float(X.multiply(X).sum(dtype=np.float64))
    centred = np.asarray(X, np.float64) - total / count
    return count, total, float(np.einsum("ij,ij->", centred, centred))


def variance(of_ranks: list[tuple[int, float, float]], is_sparse: bool) -> float:
    """Return the variance of the features of all ranks' rows, from each rank's moments (Chan, Golub & LeVeque 1979)."""
    counts, sums, squares = (np.array(column, np.float64) for column in zip(*of_ranks, strict=True))
    count = counts.sum()
    mean = sums.sum() / count
    if is_sparse:
        return float(squares.sum() / count - mean**2)
    return float((squares.sum() + (counts * (sums / counts - mean) ** 2).sum()) / count)


def mean_of_features(facts: list[Facts]) -> NDArray[np.float64]:
    """Over all ranks' samples."""
    sums = sum(np.frombuffer(base64.b64decode(one.sums), np.float64) for one in facts)
    return np.asarray(sums / sum(one.num_samples for one in facts))


@dataclass(frozen=True)
class TrainingSet:
    """This rank's part, and what everyone knows.

    Attributes:
        communicator: The ranks.
        samples: This rank's samples, numbered over all ranks.
        targets: Of this rank's samples, shape (N,), float64.
        weights: Of this rank's samples, shape (N,), float64.
        num_rows: Rows that were passed over all ranks, those without weight included.
        all_ids: Numbers of all ranks' samples, ascending.
        all_targets: In the order of `all_ids`, as the following.
        all_weights: Of the samples.
        all_squares: Squared lengths of what the kernel sees.
        all_sizes: Of how many numbers that is made.
        all_ranks: Which rank has each.
    """

    communicator: Communicator
    samples: Samples
    targets: NDArray[np.float64]
    weights: NDArray[np.float64]
    num_rows: int
    all_ids: NDArray[np.int64]
    all_targets: NDArray[np.float64]
    all_weights: NDArray[np.float64]
    all_squares: NDArray[np.float64]
    all_sizes: NDArray[np.int64]
    all_ranks: NDArray[np.int64]

    @classmethod
    def gathered(
        cls,
        communicator: Communicator,
        part: Part,
        matrix: Samples,
        targets: NDArray[np.float64],
        num_rows: int,
        most_samples: int,
    ) -> TrainingSet:
        """Let every rank know what each sample is, but for its features. Collective: one all-gather.

        Args:
            communicator: The ranks.
            part: This rank's; its samples numbered over all ranks.
            matrix: What the kernel sees of its samples.
            targets: Of its samples.
            num_rows: Over all ranks.
            most_samples: Of a rank.
        """
        samples, weights = part.samples, part.weights
        columns = np.column_stack([samples.ids, targets, weights, matrix.squares, matrix.sizes])
        width = columns.shape[1]
        found = communicator.gather_uneven(columns.ravel(), "numbering the samples", width * most_samples)
        table = np.concatenate(found).reshape(-1, width)
        ranks = np.repeat(np.arange(len(found)), [len(one) // width for one in found])
        order = np.argsort(table[:, 0])
        ids, all_targets, all_weights, squares, sizes = np.ascontiguousarray(table[order].T)
        return cls(
            communicator,
            samples,
            targets,
            weights,
            num_rows,
            ids.astype(np.int64),
            all_targets,
            all_weights,
            squares,
            sizes.astype(np.int64),
            ranks[order],
        )

    def extent(self, of_all: NDArray[np.bool_], width: int | None = None) -> Extent:
        """Return the sizes of some samples, as the kernel sees them.

        Args:
            of_all: Which of `all_ids`.
            width: Numbers of each, if it is not as in `all_sizes`.
        """
        sizes = self.all_sizes[of_all] if width is None else np.full(int(of_all.sum()), width)
        of_ranks = np.bincount(self.all_ranks[of_all], 1 + sizes, minlength=1)
        return Extent(
            float(sizes.sum()), int(of_ranks.max()), float(self.all_squares[of_all].max(initial=0.0))
        )

    def part(self, of_all: NDArray[np.bool_], matrix: Samples) -> tuple[NDArray[np.int64], Samples, Extent]:
        """Some samples as a problem of their own.

        Args:
            of_all: Which of `all_ids`.
            matrix: What the kernel sees of this rank's samples; `samples`, or a form of them.

        Returns:
            Local positions of those that this rank has, those samples numbered from 0 over all ranks, and how large
            they are over all ranks.
        """
        numbers = np.cumsum(of_all) - 1
        place = np.searchsorted(self.all_ids, self.samples.ids)
        mine = np.flatnonzero(of_all[place])
        ids = numbers[place[mine]]
        chosen = matrix.take(mine)
        if isinstance(chosen, GramSamples):
            columns = self.all_ids[of_all]
            rows = np.ascontiguousarray(chosen.rows[:, columns])
            return mine, GramSamples(ids, rows), self.extent(of_all, len(columns))
        return mine, renumbered(chosen, ids), self.extent(of_all)

    def whole(self, matrix: Samples) -> tuple[NDArray[np.int64], Samples, Extent]:
        """Return as `part` does, of all samples."""
        return self.part(np.ones(len(self.all_ids), np.bool_), matrix)

    def subset(self, of_all: NDArray[np.bool_], matrix: Samples) -> tuple[TrainingSet, Samples]:
        """Return some samples as a training set, and what the kernel sees of them; they keep their numbers."""
        if of_all.all():
            return self, matrix
        mine = np.flatnonzero(of_all[np.searchsorted(self.all_ids, self.samples.ids)])
        part = dataclasses.replace(
            self,
            samples=self.samples.take(mine),
            targets=self.targets[mine],
            weights=self.weights[mine],
            all_ids=self.all_ids[of_all],
            all_targets=self.all_targets[of_all],
            all_weights=self.all_weights[of_all],
            all_squares=self.all_squares[of_all],
            all_sizes=self.all_sizes[of_all],
            all_ranks=self.all_ranks[of_all],
        )
        return part, matrix.take(mine)

    def everywhere(self, samples: Samples, positions: NDArray[np.int64]) -> Samples:
        """Gather those of all ranks' samples on every rank, by ascending number.

        Args:
            samples: This rank's.
            positions: Which of them.
        """
        everyone = gather_samples(self.communicator, samples.take(positions), "exchanging support vectors")
        return everyone.take(np.argsort(everyone.ids))
