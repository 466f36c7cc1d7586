"""One kernel row at a time, from samples that are stored feature by feature: compiled.

For problems so small that few of their kernel rows are ever needed: a row costs a pass over the features that the
sample has, and no matrix product has to be prepared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from paceline.svm.compiled import compiled
from paceline.svm.gaussian import values_double, values_single
from paceline.svm.kernels import Kernel
from paceline.svm.samples import DenseSamples, GramSamples, Samples, SparseSamples

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
