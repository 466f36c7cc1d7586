"""Single kernel rows from samples that are stored feature by feature, and the store that computes them when needed.

For problems so small that few of their kernel rows are ever needed: a row costs a pass over the features that the
sample has, and no matrix product has to be prepared. All but `source_of` and `row_store` is compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from paceline.svm.compiled import compiled, inlined
from paceline.svm.gaussian import values_double, values_single
from paceline.svm.kernels import Kernel
from paceline.svm.sample_forms import DenseSamples, GramSamples, Samples, SparseSamples

DENSE, SPARSE, GRAM = 0, 1, 2
_KINDS = {"rbf": 0, "linear": 1, "poly": 2, "sigmoid": 3, "precomputed": 4}
_SINGLE = 5  # rbf in single precision


class Source(NamedTuple):
    """Samples twice, by row and by feature, and the kernel between them; what is not of the form is empty.

    Attributes:
        form: Dense, sparse or a Gram matrix.
        rows: Dense rows, or the Gram matrix, shape (N, D).
        columns: Dense features, shape (D, N).
        indptr: Of sparse rows, shape (N + 1,).
        indices: Of sparse rows.
        data: Of sparse rows.
        column_indptr: Of sparse features, shape (D + 1,).
        column_indices: Of sparse features, ascending.
        column_data: Of sparse features.
        squares: Squared lengths, shape (N,).
        kind: Of the kernel.
        gamma: Of the kernel.
        coef0: Of the kernel.
        degree: Of the kernel.
    """

    form: int
    rows: NDArray[Any]
    columns: NDArray[Any]
    indptr: NDArray[np.int64]
    indices: NDArray[np.int64]
    data: NDArray[np.float64]
    column_indptr: NDArray[np.int64]
    column_indices: NDArray[np.int64]
    column_data: NDArray[np.float64]
    squares: NDArray[Any]
    kind: int
    gamma: float
    coef0: float
    degree: float


def source_of(kernel: Kernel, samples: Samples, dtype: Any = np.float64) -> Source:
    """The samples in the form that `kernel_row` reads. Gram samples must be numbered from 0 in order.

    Args:
        kernel: Between the samples.
        samples: All of a problem.
        dtype: Of dense rows, and so of their kernel values.
    """
    none, no_numbers, no_index = np.zeros((0, 0)), np.zeros(0), np.zeros(0, np.int64)
    shape = {
        "kind": _KINDS[kernel.name],
        "gamma": kernel.gamma,
        "coef0": kernel.coef0,
        "degree": kernel.degree,
    }
    empty: dict[str, Any] = {
        "rows": none,
        "columns": none,
        **dict.fromkeys(("indptr", "indices", "column_indptr", "column_indices"), no_index),
        **dict.fromkeys(("data", "column_data"), no_numbers),
        "squares": np.ascontiguousarray(samples.squares, np.float64),
        **shape,
    }
    if isinstance(samples, SparseSamples):
        rows = samples.rows.astype(np.float64)
        columns = sp.csc_matrix(rows)
        columns.sort_indices()
        return Source(
            **{
                **empty,
                "form": SPARSE,
                "indptr": rows.indptr.astype(np.int64),
                "indices": rows.indices.astype(np.int64),
                "data": rows.data,
                "column_indptr": columns.indptr.astype(np.int64),
                "column_indices": columns.indices.astype(np.int64),
                "column_data": columns.data,
            }
        )
    if isinstance(samples, GramSamples):
        rows = np.ascontiguousarray(samples.rows, np.float64)
        return Source(**{**empty, "form": GRAM, "rows": rows})
    assert isinstance(samples, DenseSamples)
    rows = np.ascontiguousarray(samples.rows, dtype)
    if dtype == np.float32 and kernel.name == "rbf":
        empty |= {"kind": _SINGLE, "squares": empty["squares"].astype(dtype)}
    return Source(**{**empty, "form": DENSE, "rows": rows, "columns": np.ascontiguousarray(rows.T)})


@compiled
def kernel_row(source: Source, i: int, first: int, last: int, out: NDArray[np.float64]) -> None:
    """Write the kernel values of sample i with samples first to last (exclusive) to `out`, shape (last - first,)."""
    if source.form == GRAM:
        row = source.rows[i]
        for t in range(last - first):
            out[t] = row[first + t]
        return
    if source.form == SPARSE:
        _sparse_products(source, i, first, last, out)
    else:
        _dense_products(source, i, first, last, out)
    _apply(source, i, first, last, out)


@compiled
def diagonal_of(source: Source, out: NDArray[np.float64]) -> None:
    """Write the kernel values of the first samples with themselves to `out`, shape (N,)."""
    if source.kind in (0, _SINGLE):
        out[:] = 1.0
        return
    for i in range(len(out)):
        kernel_row(source, i, i, i + 1, out[i : i + 1])


@compiled
def _dense_products(source: Source, i: int, first: int, last: int, out: NDArray[np.float64]) -> None:
    x, columns = source.rows[i], source.columns
    n = last - first
    which = np.empty(len(x), np.int64)
    num = 0
    for f in range(len(x)):  # what is zero costs nothing
        if x[f] != 0.0:
            which[num] = f
            num += 1
    for t0 in range(0, n, 1024):
        L = min(1024, n - t0)
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


@compiled
def _sparse_products(source: Source, i: int, first: int, last: int, out: NDArray[np.float64]) -> None:
    for t in range(last - first):
        out[t] = 0.0
    for e in range(source.indptr[i], source.indptr[i + 1]):
        v = source.data[e]
        begin, end = source.column_indptr[source.indices[e]], source.column_indptr[source.indices[e] + 1]
        at = begin + np.searchsorted(source.column_indices[begin:end], first)
        while at < end and source.column_indices[at] < last:
            out[source.column_indices[at] - first] += v * source.column_data[at]
            at += 1


@compiled
def _apply(source: Source, i: int, first: int, last: int, out: NDArray[Any]) -> None:
    """Turn products into kernel values, in place."""
    n = last - first
    gamma, coef0 = source.gamma, source.coef0
    if source.kind == _SINGLE:
        values_single(out, source.squares[i], source.squares[first:last], gamma, out)
    elif source.kind == 0:
        values_double(out, source.squares[i], source.squares[first:last], gamma, out)
    elif source.kind == 2:
        degree = source.degree
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
    elif source.kind == 3:
        for t in range(n):
            out[t] = np.tanh(gamma * out[t] + coef0)


class RowStore(NamedTuple):
    """Kernel rows of a problem whose samples are two ranges of a source, and what other problems may use of them.

    Attributes:
        bounds: (a, b, c, d): the samples are a to b and c to d (exclusive) of the source; c = d if there is one range.
        rows: Kernel rows, shape (R >= 3, P); P is the number of samples padded to LANES.
        owner: Sample of this problem in each row of `rows`, or -1.
        slot_of: By sample of this problem, row of `rows` or -1.
        next_slot: Where the next row goes, shape (1,).
        shared: Kernel rows of samples with their own of the two ranges, kept for other problems, shape (M, width).
        shared_slot: By sample of the source, row of `shared` or -1.
        num_shared: How many rows of `shared` are used, shape (1,).
    """

    bounds: tuple[int, int, int, int]
    rows: NDArray[Any]
    owner: NDArray[np.int64]
    slot_of: NDArray[np.int64]
    next_slot: NDArray[np.int64]
    shared: NDArray[np.float64]
    shared_slot: NDArray[np.int64]
    num_shared: NDArray[np.int64]


def row_store(num: int, rows: NDArray[Any]) -> RowStore:
    """An empty store for one range, of which nothing is shared.

    Args:
        num: Samples.
        rows: Room for rows, shape (R, P).
    """
    none, counter = np.zeros((0, 0)), np.zeros(1, np.int64)
    unknown, free = np.full(num, -1, np.int64), np.full(len(rows), -1, np.int64)
    return RowStore((0, num, num, num), rows, free, unknown, counter, none, unknown.copy(), counter.copy())


@compiled
def fetch(source: Source, store: RowStore, t: int) -> int:
    """Compute sample t's kernel row, over the oldest; returns how many values that took."""
    slot_of, owner, next_slot = store.slot_of, store.owner, store.next_slot
    slot = next_slot[0]
    next_slot[0] = (slot + 1) % len(owner)
    if owner[slot] >= 0:
        slot_of[owner[slot]] = -1
    owner[slot] = t
    slot_of[t] = slot
    return _compute(source, store, t, store.rows[slot])


@compiled
def fill_from_gram(gram: NDArray[np.float64], store: RowStore) -> None:
    """Write all kernel rows, of which there is room for each, where all kernel values are known."""
    a, b, c, d = store.bounds
    n_a, n = b - a, (b - a) + (d - c)
    for t in range(n):
        known, row = gram[a + t if t < n_a else c + t - n_a], store.rows[t]
        one, other, rest = row[:n_a], row[n_a:n], row[n:]
        one[:], other[:], rest[:] = known[a:b], known[c:d], 0.0
        store.slot_of[t] = store.owner[t] = t


@inlined
def _compute(source: Source, store: RowStore, t: int, row: NDArray[Any]) -> int:
    """Write sample t's kernel row; returns how many values had to be computed."""
    a, b, c, d = store.bounds
    shared, shared_slot, num_shared = store.shared, store.shared_slot, store.num_shared
    n_a, n = b - a, (b - a) + (d - c)
    is_first = t < n_a
    p = a + t if is_first else c + t - n_a
    own, own_first, own_last = (row[:n_a], a, b) if is_first else (row[n_a:n], c, d)
    for k in range(n, len(row)):
        row[k] = 0.0
    num_values = 0
    if shared_slot[p] >= 0:
        known = shared[shared_slot[p]]
        for k in range(len(own)):
            own[k] = known[k]
    else:
        kernel_row(source, p, own_first, own_last, own)
        num_values += len(own)
        if num_shared[0] < len(shared):
            shared_slot[p] = num_shared[0]
            known = shared[num_shared[0]]
            for k in range(len(own)):
                known[k] = own[k]
            num_shared[0] += 1
    if d > c:
        if is_first:
            kernel_row(source, p, c, d, row[n_a:n])
        else:
            kernel_row(source, p, a, b, row[:n_a])
        num_values += n - len(own)
    return num_values


@compiled
def gradients_from_rows(
    source: Source, store: RowStore, weights: NDArray[np.float64], g: NDArray[np.float64]
) -> int:
    """Write the sum of all kernel rows times weights to `g`, shape (P,); returns how many values were computed."""
    a, b, c, d = store.bounds
    n_a, n = b - a, (b - a) + (d - c)
    spare = np.zeros(len(g), store.rows.dtype)
    num_values = 0
    for t in range(len(g)):
        g[t] = 0.0
    for t in range(n):
        weight = weights[t]
        if weight == 0.0:
            continue
        if store.slot_of[t] >= 0:
            row = store.rows[store.slot_of[t]]
        else:
            row = spare
            p = a + t if t < n_a else c + t - n_a
            kernel_row(source, p, a, b, row[:n_a])
            if d > c:
                kernel_row(source, p, c, d, row[n_a:n])
            num_values += n
        for k in range(n):
            g[k] += weight * row[k]
    return num_values
