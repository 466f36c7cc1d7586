"""Samples as dense rows, CSR rows or rows of a Gram matrix, behind one interface; and gathering them from all ranks.

Whatever the form, a few can be taken, turned into arrays to send, and multiplied with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from paceline_svm.communicator import Communicator
from paceline_svm.compiled import LANES, compiled

if TYPE_CHECKING:
    from typing_extensions import Self

Array = NDArray[Any]


class Samples(Protocol):
    """Some samples.

    Attributes:
        ids: Global numbers of the samples, shape (N,), int64.
        squares: Squared lengths, shape (N,), float64.
    """

    @property
    def ids(self) -> NDArray[np.int64]: ...

    @property
    def squares(self) -> NDArray[np.float64]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Count the numbers that each sample is made of, shape (N,)."""

    def __len__(self) -> int: ...

    def take(self, positions: Array | slice) -> Self:
        """Return the samples at `positions`, in that order."""

    def astype(self, dtype: Any) -> Self:
        """Return the samples in another precision, or this object if it has that precision."""

    def dots(self, others: Any, out: Array) -> None:
        """Write the products of these samples with `others` to `out`, shape (len(self), len(others))."""

    def to_arrays(self) -> list[Array]:
        """Return what another rank needs to make the same samples, the ids aside."""

    def from_arrays(self, ids: NDArray[np.int64], arrays: Sequence[Array]) -> Self:
        """Make samples like these from what `to_arrays` returned on another rank."""

    def joined(self, others: Self) -> Self:
        """Return these samples and then `others`."""


@dataclass(frozen=True)
class DenseSamples:
    """Rows of numbers.

    Attributes:
        ids: Global numbers, shape (N,).
        rows: Features, shape (N, D), contiguous, float32 or float64.
        squares: Squared lengths in double precision, shape (N,).
    """

    ids: NDArray[np.int64]
    rows: Array
    squares: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Array, ids: NDArray[np.int64]) -> DenseSamples:
        """Make samples from their rows."""
        rows = np.ascontiguousarray(rows)
        return cls(ids, rows, np.einsum("ij,ij->i", rows, rows, dtype=np.float64))

    @property
    def dtype(self) -> np.dtype[Any]:
        found: np.dtype[Any] = self.rows.dtype
        return found

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.full(len(self.ids), self.rows.shape[1])

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, positions: Array | slice) -> DenseSamples:
        return DenseSamples(self.ids[positions], self.rows[positions], self.squares[positions])

    def astype(self, dtype: Any) -> DenseSamples:
        return DenseSamples(self.ids, self.rows.astype(dtype, copy=False), self.squares)

    def dots(self, others: DenseSamples, out: Array) -> None:
        np.dot(self.rows, others.rows.T, out=out)

    def to_arrays(self) -> list[Array]:
        return [self.rows]

    def from_arrays(self, ids: NDArray[np.int64], arrays: Sequence[Array]) -> DenseSamples:
        return DenseSamples.of(arrays[0].reshape(len(ids), self.rows.shape[1]), ids)

    def joined(self, others: DenseSamples) -> DenseSamples:
        return DenseSamples(
            np.concatenate([self.ids, others.ids]),
            np.concatenate([self.rows, others.rows]),
            np.concatenate([self.squares, others.squares]),
        )


@dataclass(frozen=True)
class SparseSamples:
    """Rows in CSR form.

    Attributes:
        ids: Global numbers, shape (N,).
        rows: Features, shape (N, D), float32 or float64.
        squares: Squared lengths in double precision, shape (N,).
    """

    ids: NDArray[np.int64]
    rows: Any
    squares: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Any, ids: NDArray[np.int64]) -> SparseSamples:
        """Make samples from their rows."""
        doubled = rows.astype(np.float64)
        return cls(ids, rows, np.asarray(doubled.multiply(doubled).sum(axis=1), np.float64).ravel())

    @property
    def dtype(self) -> np.dtype[Any]:
        found: np.dtype[Any] = self.rows.dtype
        return found

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.asarray(1 + 2 * np.diff(self.rows.indptr), np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, positions: Array | slice) -> SparseSamples:
        return SparseSamples(self.ids[positions], self.rows[positions], self.squares[positions])

    def astype(self, dtype: Any) -> SparseSamples:
        return SparseSamples(self.ids, self.rows.astype(dtype, copy=False), self.squares)

    def dots(self, others: SparseSamples, out: Array) -> None:
        right = others.rows
        products, acc = np.empty((LANES, len(others)), out.dtype), np.empty(LANES, out.dtype)
        for first in range(0, len(self), LANES):
            mine = self.rows[first : first + LANES]
            panel = np.zeros((mine.shape[1], LANES), out.dtype)
            panel[:, : mine.shape[0]] = mine.T.toarray()
            sparse_dots(right.indptr, right.indices, right.data, panel, acc, products)
            out[first : first + LANES] = products[: mine.shape[0]]

    def to_arrays(self) -> list[Array]:
        return [
            np.diff(self.rows.indptr).astype(np.int64),
            self.rows.indices.astype(np.int64),
            self.rows.data,
        ]

    def from_arrays(self, ids: NDArray[np.int64], arrays: Sequence[Array]) -> SparseSamples:
        lengths, indices, data = arrays
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        shape = (len(ids), self.rows.shape[1])
        return SparseSamples.of(sp.csr_matrix((data, indices, indptr), shape=shape), ids)

    def joined(self, others: SparseSamples) -> SparseSamples:
        return SparseSamples(
            np.concatenate([self.ids, others.ids]),
            sp.vstack([self.rows, others.rows], format="csr"),
            np.concatenate([self.squares, others.squares]),
        )


@compiled
def sparse_dots(
    indptr: NDArray[Any],
    indices: NDArray[Any],
    data: NDArray[Any],
    panel: NDArray[Any],
    acc: NDArray[Any],
    out: NDArray[Any],
) -> None:
    """Dot products of sparse rows with a dense panel.

    Args:
        indptr: Of N sparse rows in CSR form, shape (N + 1,).
        indices: Column indices.
        data: Values.
        panel: LANES other rows side by side, shape (features, LANES).
        acc: Scratch, shape (LANES,).
        out: The products, shape (LANES, N).
    """
    N = len(indptr) - 1
    for i in range(N):
        for k in range(LANES):
            acc[k] = 0
        for e in range(indptr[i], indptr[i + 1]):
            v = data[e]
            row = panel[indices[e]]
            for k in range(LANES):
                acc[k] += v * row[k]
        for k in range(LANES):
            out[k, i] = acc[k]


@dataclass(frozen=True)
class GramSamples:
    """Rows of a Gram matrix: kernel values of these samples with every sample of the problem.

    Attributes:
        ids: Global numbers, shape (N,): which columns these samples are.
        rows: Kernel values, shape (N, samples of the problem).
    """

    ids: NDArray[np.int64]
    rows: Array

    @property
    def squares(self) -> NDArray[np.float64]:
        return np.zeros(len(self.ids))

    @property
    def dtype(self) -> np.dtype[Any]:
        found: np.dtype[Any] = self.rows.dtype
        return found

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.full(len(self.ids), self.rows.shape[1])

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, positions: Array | slice) -> GramSamples:
        return GramSamples(self.ids[positions], self.rows[positions])

    def astype(self, dtype: Any) -> GramSamples:
        return GramSamples(self.ids, self.rows.astype(dtype, copy=False))

    def dots(self, others: GramSamples, out: Array) -> None:
        out[:] = self.rows[:, others.ids]

    def to_arrays(self) -> list[Array]:
        return [self.rows]

    def from_arrays(self, ids: NDArray[np.int64], arrays: Sequence[Array]) -> GramSamples:
        return GramSamples(ids, arrays[0].reshape(len(ids), self.rows.shape[1]))

    def joined(self, others: GramSamples) -> GramSamples:
        return GramSamples(np.concatenate([self.ids, others.ids]), np.concatenate([self.rows, others.rows]))


def renumbered(samples: Samples, ids: NDArray[np.int64]) -> Samples:
    """Return the same samples under other numbers."""
    if isinstance(samples, SparseSamples):
        return SparseSamples(ids, samples.rows, samples.squares)
    if isinstance(samples, GramSamples):  # its columns are numbers too
        return GramSamples(ids, samples.rows)
    assert isinstance(samples, DenseSamples)
    return DenseSamples(ids, samples.rows, samples.squares)


_S = TypeVar("_S", bound=Samples)
_COPIES = 3  # of the samples that a solver keeps, at most


def gather_samples(communicator: Communicator, mine: _S, doing: str, most_numbers: int | None = None) -> _S:
    """All-gather samples: every rank's on every rank, rank after rank. Collective.

    Args:
        communicator: The ranks.
        mine: This rank's.
        doing: For errors.
        most_numbers: As in `Extent`, if known: then it is one collective, else up to two.
    """
    if communicator.num_ranks == 1:
        return mine
    arrays = [mine.ids, *mine.to_arrays()]
    lengths = np.array([array.size for array in arrays])
    parts = [np.ascontiguousarray(array).view(np.uint8).ravel() for array in (lengths, *arrays)]
    room = None if most_numbers is None else lengths.nbytes + 8 * most_numbers
    messages = communicator.gather_uneven(np.concatenate(parts), doing, room)
    found = [_unpacked(message, arrays) for message in messages]
    ids, *rest = (np.concatenate(of_ranks) for of_ranks in zip(*found, strict=True))
    return mine.from_arrays(ids, rest)


def _unpacked(message: NDArray[np.uint8], like: Sequence[Array]) -> list[Array]:
    """Return the arrays that were packed after their lengths, with the types of these."""
    at = 8 * len(like)
    found = []
    for length, array in zip(message[:at].view(np.int64).tolist(), like, strict=True):
        end = at + length * array.itemsize
        found.append(message[at:end].view(array.dtype))
        at = end
    return found


def fits_on_every_rank(num_numbers: float, cache_bytes: float) -> bool:
    """Return whether every rank may hold samples of so many numbers as part of its cache."""
    return num_numbers * 8.0 * _COPIES <= cache_bytes
