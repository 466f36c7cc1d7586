"""Kernel rows of a small problem, each computed when it is first needed, the oldest overwritten: compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import compiled, inlined
from paceline.svm.kernel_row import Source, kernel_row


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
