"""Loops over kernel rows: copied, summed up, shortened; products of sparse rows: compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import LANES, compiled


@compiled
def copy_rows(
    values: NDArray[Any],
    out: NDArray[Any],
    slots: NDArray[np.int64],
    first: int,
    factors: NDArray[np.float64],
    total: NDArray[np.float64],
) -> None:
    """Write `values`, shape (M, N), into `out[slots, first:first + N]`, and sum them up, as `rbf_rows_single` does."""
    M, N = values.shape
    sums = total[first : first + N] if len(factors) else total[:0]
    for k in range(M):
        G = values[k]
        if slots[k] >= 0:
            o = out[slots[k], first : first + N]
            for t in range(N):
                o[t] = G[t]
        if len(factors):
            factor = factors[k]
            for t in range(N):
                sums[t] += factor * G[t]


@compiled
def add_rows(
    rows: NDArray[Any], slots: NDArray[np.int64], factors: NDArray[np.float64], total: NDArray[np.float64]
) -> None:
    """Add sum_k factors[k] * rows[slots[k], :N] to `total`, shape (N,), in double precision."""
    N = len(total)
    M = len(slots)
    width = 4096
    for t0 in range(0, N, width):
        L = min(width, N - t0)
        o = total[t0 : t0 + L]
        k = 0
        while k + 4 <= M:
            a, b = rows[slots[k], t0 : t0 + L], rows[slots[k + 1], t0 : t0 + L]
            c, d = rows[slots[k + 2], t0 : t0 + L], rows[slots[k + 3], t0 : t0 + L]
            u, v, w, x = factors[k], factors[k + 1], factors[k + 2], factors[k + 3]
            for t in range(L):
                o[t] += u * a[t] + v * b[t] + w * c[t] + x * d[t]
            k += 4
        while k < M:
            a = rows[slots[k], t0 : t0 + L]
            u = factors[k]
            for t in range(L):
                o[t] += u * a[t]
            k += 1


@compiled
def sparse_dots(
    indptr: NDArray[Any],
    indices: NDArray[Any],
    data: NDArray[Any],
    panel: NDArray[Any],
    out: NDArray[Any],
) -> None:
    """Dot products of sparse rows with a dense panel.

    Args:
        indptr: Of N sparse rows in CSR form, shape (N + 1,).
        indices: Column indices.
        data: Values.
        panel: LANES other rows side by side, shape (features, LANES).
        out: The products, shape (LANES, N).
    """
    N = len(indptr) - 1
    acc = np.empty(LANES, out.dtype)
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


@compiled
def compact_rows(
    flat: NDArray[Any], old_width: int, slots: NDArray[np.int64], keep: NDArray[np.int64]
) -> None:
    """Move rows to the front of `flat`, and of each keep only some columns.

    Args:
        flat: Rows of `old_width` numbers end to end; afterwards row i is old row slots[i], len(keep) numbers wide.
        old_width: Numbers a row.
        slots: Rows to keep, ascending, shape (M,).
        keep: Columns to keep, ascending.
    """
    width = len(keep)
    for i in range(len(slots)):
        source = slots[i] * old_width
        target = i * width
        for j in range(width):
            flat[target + j] = flat[source + keep[j]]
