"""Single kernel rows from samples that are stored feature by feature, and the store that computes them when needed.

For problems so small that few of their kernel rows are ever needed. A row costs a pass over the features that the
sample has, and no matrix product has to be prepared. Functions with @inner are compiled for one form of samples and one
kernel at a time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from paceline_svm.compiled import inner
from paceline_svm.gaussian import add_scaled, scratch_for, values
from paceline_svm.kernels import Kernel
from paceline_svm.sample_forms import DenseSamples, GramSamples, Samples, SparseSamples


class Source(NamedTuple):
    """Samples and the kernel between them. What does not apply is None, and code for it is not compiled.

    Attributes:
        gram: A Gram matrix, shape (N, N).
        dense: Rows, shape (N, D), and features, shape (D, N).
        sparse: Rows in CSR form and features in CSC form, each as (indptr, indices ascending, data).
        squares: Squared lengths, shape (N,).
        gaussian: gamma.
        polynomial: gamma, coef0 and degree.
        tangent: gamma and coef0.
    """

    gram: Any
    dense: Any
    sparse: Any
    squares: NDArray[Any]
    gaussian: Any
    polynomial: Any
    tangent: Any


def source_of(kernel: Kernel, samples: Samples | None, dtype: Any = np.float64) -> Source:
    """Return the samples in the form that `kernel_row` reads. Gram samples must be numbered from 0 in order.

    Args:
        kernel: Between the samples.
        samples: All of a problem; None if all kernel values are known.
        dtype: Of dense rows, and so of their kernel values.
    """
    gram = dense = sparse = gaussian = polynomial = tangent = None
    if samples is None:
        return Source(None, None, None, np.zeros(0), None, None, None)
    if isinstance(samples, GramSamples):
        gram = np.ascontiguousarray(samples.rows, np.float64)
        return Source(gram, None, None, np.zeros(0), None, None, None)
    if isinstance(samples, SparseSamples):
        dtype = np.float64
        rows = samples.rows.astype(np.float64)
        columns = sp.csc_matrix(rows)
        columns.sort_indices()
        sparse = tuple(
            part
            for one in (rows, columns)
            for part in (one.indptr.astype(np.int64), one.indices.astype(np.int64), one.data)
        )
    else:
        assert isinstance(samples, DenseSamples)
        rows = np.ascontiguousarray(samples.rows, dtype)
        dense = rows, np.ascontiguousarray(rows.T)
    if kernel.name == "rbf":
        gaussian = float(kernel.gamma)
    elif kernel.name == "poly":
        polynomial = float(kernel.gamma), float(kernel.coef0), float(kernel.degree)
    elif kernel.name == "sigmoid":
        tangent = float(kernel.gamma), float(kernel.coef0)
    squares = np.ascontiguousarray(samples.squares, dtype)
    return Source(None, dense, sparse, squares, gaussian, polynomial, tangent)


class Room(NamedTuple):
    """Scratch for computing kernel rows.

    Attributes:
        which: Shape (D,), int64.
        single: As in `gaussian.Scratch`.
        double: Likewise.
    """

    which: NDArray[np.int64]
    single: Any
    double: Any


def room_for(source: Source, num: int, dtype: Any) -> Room:
    """Scratch for rows of up to `num` samples."""
    width = source.dense[0].shape[1] if source.dense is not None else 0
    return Room(np.empty(width, np.int64), *scratch_for(num, dtype))


@inner
def kernel_row(source: Source, i: int, first: int, last: int, room: Room, out: NDArray[Any]) -> None:
    """Write the kernel values of sample i with samples first to last (exclusive) to `out`, shape (last - first,)."""
    _products(source.gram, source.dense, source.sparse, i, first, last, room.which, out)
    _apply(source.gaussian, source.polynomial, source.tangent, source.squares, i, first, room, out)


@inner
def _products(
    gram: Any, dense: Any, sparse: Any, i: int, first: int, last: int, which: NDArray[np.int64], out: Any
) -> None:
    if gram is not None:
        for t in range(last - first):
            out[t] = gram[i, first + t]
    if dense is not None:
        _dense_products(dense[0][i], dense[1], first, last, which, out)
    if sparse is not None:
        _sparse_products(sparse, i, first, last, out)


@inner
def _dense_products(
    x: NDArray[Any], columns: NDArray[Any], first: int, last: int, which: NDArray[np.int64], out: NDArray[Any]
) -> None:
    n = last - first
    num = 0
    for f in range(len(x)):  # what is zero costs nothing
        if x[f] != 0.0:
            which[num] = f
            num += 1
    for t0 in range(0, n, 1024):
        L = 1024 if n - t0 > 1024 else n - t0
        at = first + t0
        o = out[t0 : t0 + L]
        for t in range(L):
            o[t] = 0.0
        e = 0
        while e + 4 <= num:
            a, b = columns[which[e], at : at + L], columns[which[e + 1], at : at + L]
            c, d = columns[which[e + 2], at : at + L], columns[which[e + 3], at : at + L]
            u, v, w, z = x[which[e]], x[which[e + 1]], x[which[e + 2]], x[which[e + 3]]
            for t in range(L):
                o[t] += u * a[t] + v * b[t] + w * c[t] + z * d[t]
            e += 4
        while e < num:
            a, u = columns[which[e], at : at + L], x[which[e]]
            for t in range(L):
                o[t] += u * a[t]
            e += 1


@inner
def _sparse_products(sparse: Any, i: int, first: int, last: int, out: NDArray[Any]) -> None:
    indptr, indices, data, column_indptr, column_indices, column_data = sparse
    for t in range(last - first):
        out[t] = 0.0
    for e in range(indptr[i], indptr[i + 1]):
        v = data[e]
        at, end = column_indptr[indices[e]], column_indptr[indices[e] + 1]
        stop = end
        while at < stop:  # bisect: the first that is not before `first`
            middle = (at + stop) // 2
            if column_indices[middle] < first:
                at = middle + 1
            else:
                stop = middle
        while at < end and column_indices[at] < last:
            out[column_indices[at] - first] += v * column_data[at]
            at += 1


@inner
def _apply(
    gaussian: Any,
    polynomial: Any,
    tangent: Any,
    squares: NDArray[Any],
    i: int,
    first: int,
    room: Room,
    out: NDArray[Any],
) -> None:
    """Turn products into kernel values, in place."""
    n = len(out)
    if gaussian is not None:
        values(out, squares[i], squares[first : first + n], gaussian, room.single, room.double, out)
    if polynomial is not None:
        gamma, coef0, degree = polynomial
        if 1 <= degree <= 8 and degree == np.floor(degree):
            for t in range(n):
                base = gamma * out[t] + coef0
                value = base
                for _ in range(int(degree) - 1):
                    value *= base
                out[t] = value
        else:
            for t in range(n):
                out[t] = (gamma * out[t] + coef0) ** degree
    if tangent is not None:
        for t in range(n):
            out[t] = math.tanh(tangent[0] * out[t] + tangent[1])


class Shared(NamedTuple):
    """Kernel rows of samples with their own of two ranges, kept for other problems.

    Attributes:
        rows: Shape (M, width).
        slot: By sample of the source, row of `rows` or -1.
        num: How many rows are used, shape (1,).
    """

    rows: NDArray[np.float64]
    slot: NDArray[np.int64]
    num: NDArray[np.int64]


class RowStore(NamedTuple):
    """Kernel rows of a problem whose samples are one or two ranges of a source.

    Attributes:
        bounds: (a, b, c, d): the samples are a to b and c to d (exclusive) of the source; c = d if there is one range.
        rows: Kernel rows, shape (R >= 3, P); P is the number of samples padded to LANES.
        owner: Sample of this problem in each row of `rows`, or -1.
        slot_of: By sample of this problem, row of `rows` or -1.
        next_slot: Where the next row goes, shape (1,).
        shared: What other problems may use of them, a `Shared`; None if there are no other problems.
        room: For rows of P.
    """

    bounds: tuple[int, int, int, int]
    rows: NDArray[Any]
    owner: NDArray[np.int64]
    slot_of: NDArray[np.int64]
    next_slot: NDArray[np.int64]
    shared: Any
    room: Room


def row_store(source: Source, num: int, rows: NDArray[Any]) -> RowStore:
    """Return an empty store for one range.

    Args:
        source: Whose kernel rows.
        num: Samples.
        rows: Room for rows, shape (R, P).
    """
    counter = np.zeros(1, np.int64)
    unknown, free = np.full(num, -1, np.int64), np.full(len(rows), -1, np.int64)
    room = room_for(source, rows.shape[1], rows.dtype)
    return RowStore((0, num, num, num), rows, free, unknown, counter, None, room)


@inner
def fetch(source: Source, store: RowStore, t: int) -> int:
    """Compute sample t's kernel row, over the oldest; returns how many values that took."""
    slot_of, owner, next_slot = store.slot_of, store.owner, store.next_slot
    slot = next_slot[0]
    next_slot[0] = (slot + 1) % len(owner)
    if owner[slot] >= 0:
        slot_of[owner[slot]] = -1
    owner[slot] = t
    slot_of[t] = slot
    row = store.rows[slot]
    for k in range(len(slot_of), len(row)):
        row[k] = 0.0
    return _compute(source, store.bounds, store.shared, store.room, t, row)


@inner
def fill_from_gram(gram: Any, store: RowStore) -> None:
    """Write all kernel rows, of which there is room for each, if all kernel values are known: else gram is None."""
    if gram is None:
        return
    a, b, c, d = store.bounds
    n_a, n = b - a, (b - a) + (d - c)
    for t in range(n):
        known, row = gram[a + t if t < n_a else c + t - n_a], store.rows[t]
        for k in range(n_a):
            row[k] = known[a + k]
        for k in range(n_a, n):
            row[k] = known[c + k - n_a]
        for k in range(n, len(row)):
            row[k] = 0.0
        store.slot_of[t] = store.owner[t] = t


@inner
def _compute(
    source: Source, bounds: tuple[int, int, int, int], shared: Any, room: Room, t: int, row: NDArray[Any]
) -> int:
    """Write sample t's kernel row; returns how many values had to be computed."""
    a, b, c, d = bounds
    n_a, n = b - a, (b - a) + (d - c)
    num_values = n
    if shared is None:
        kernel_row(source, a + t, a, b, room, row[:n])
    if shared is not None:
        is_first = t < n_a
        p = a + t if is_first else c + t - n_a
        own, first, last = (row[:n_a], a, b) if is_first else (row[n_a:n], c, d)
        other, other_first, other_last = (row[n_a:n], c, d) if is_first else (row[:n_a], a, b)
        if shared.slot[p] >= 0:
            known = shared.rows[shared.slot[p]]
            for k in range(len(own)):
                own[k] = known[k]
            num_values -= len(own)
        else:
            kernel_row(source, p, first, last, room, own)
            if shared.num[0] < len(shared.rows):
                shared.slot[p] = shared.num[0]
                known = shared.rows[shared.num[0]]
                for k in range(len(own)):
                    known[k] = own[k]
                shared.num[0] += 1
        if other_first < other_last:
            kernel_row(source, p, other_first, other_last, room, other)
    return num_values


@inner
def gradients_from_rows(
    source: Source,
    store: RowStore,
    weights: NDArray[np.float64],
    spare: NDArray[Any],
    g: NDArray[np.float64],
) -> int:
    """Write the sum of all kernel rows times weights to `g`, shape (P,); returns how many values were computed.

    `spare` is room for a row.
    """
    n = len(store.slot_of)
    num_values = 0
    for t in range(len(g)):
        g[t] = 0.0
    for t in range(n):
        weight = weights[t]
        if weight == 0.0:
            continue
        row = spare
        if store.slot_of[t] >= 0:
            row = store.rows[store.slot_of[t]]
        else:
            num_values += _compute(source, store.bounds, store.shared, store.room, t, spare)
        add_scaled(g, weight, row[:n])
    return num_values
