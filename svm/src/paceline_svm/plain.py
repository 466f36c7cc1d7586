"""Compiled functions in plain Python, for a first fit that does not wait for the compiler.

Rules
1. The same operations in the same order as in compiled code. That fuses multiplications with additions, which NumPy
   cannot: so results agree within rounding, a fit may begin with one and end with the other, and both end with the same
   check of the optimum. Without fusing bits would be equal, but warm fits took 4 % longer on average.
2. Loops over many numbers are NumPy's, written once more here (`_TWINS`). The rest is the source of compiled code
   itself, with these in their places.
3. What would be slow without a compiler has no twin and waits: products of sparse rows.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_svm.compiled import FAR
from paceline_svm.gaussian import LOG2_E, TAYLOR
from paceline_svm.smo import LEAST_CURVATURE

_STEPS = 64  # pair updates between two looks whether the code is there

# -- pair updates: lanes are the last axis


def _lower_and_raise(F: Any, closed_up: Any, closed_down: Any, least: Any, most: Any) -> None:
    np.minimum(least, (F + closed_up).min(axis=0), out=least)
    np.maximum(most, (F + closed_down).max(axis=0), out=most)


def _follow(
    F: Any, closed_up: Any, closed_down: Any, Ki: Any, Kj: Any, delta: Any, least: Any, most: Any
) -> None:
    F += delta * (Ki - Kj)
    _lower_and_raise(F, closed_up, closed_down, least, most)


def _gains(
    F: Any, closed_down: Any, Ki: Any, diagonal: Any, least: Any, di: Any, gain: Any, most: Any
) -> None:
    number = F.dtype.type
    t = np.maximum(F + closed_down - least, number(0))
    curvature = np.maximum(di + diagonal - number(2) * Ki, number(LEAST_CURVATURE))
    np.divide(t * t, curvature, out=gain)
    np.maximum(most, gain.max(axis=0), out=most)


# -- kernel values


def _values(number: Any, bits: Any, num_terms: int, least: float, mantissa: int) -> Callable[..., None]:
    def values(dots: Any, square: Any, squares: Any, gamma: float, scratch: Any, out: Any) -> None:
        scale, half = number(2.0 * gamma * LOG2_E), number(-gamma * LOG2_E)
        z = scale * dots.astype(number) + (half * square.astype(number) + half * squares.astype(number))
        z = np.clip(z, number(least), number(0.0))
        n = (z - number(0.5)).astype(bits)
        r = z - n.astype(number)
        p = np.full_like(r, TAYLOR[num_terms - 1])
        for term in (*TAYLOR[num_terms - 2 :: -1], 1.0):
            p *= r
            p += number(term)
        power = (n + bits(1 - least)) << bits(mantissa)
        np.multiply(p, power.view(number), out=out)

    return values


_single = _values(np.float32, np.int32, 7, -126.0, 23)
_double = _values(np.float64, np.int64, 13, -1022.0, 52)


def _gaussian_rows(
    dots: Any,
    squares: Any,
    gamma: float,
    scratch: Any,
    spare: Any,
    out: Any,
    slots: Any,
    first: int,
    factors: Any,
    total: Any,
) -> None:
    found = np.empty_like(dots)
    values = _double if scratch[0] is None else _single
    values(dots, squares[0][:, None], squares[1], gamma, None, found)
    _copy_rows(found, out, slots, first, factors, total)


def _copy_rows(values: Any, out: Any, slots: Any, first: int, factors: Any, total: Any) -> None:
    last = first + values.shape[1]
    kept = slots >= 0
    out[slots[kept], first:last] = values[kept]
    for k in range(len(factors)):
        total[first:last] += factors[k] * values[k]


def _dense_products(x: Any, columns: Any, first: int, last: int, which: Any, out: Any) -> None:
    at, fours = np.flatnonzero(x), 0
    out[:] = 0
    while fours + 4 <= len(at):
        a, b, c, d = (x[f] * columns[f, first:last] for f in at[fours : fours + 4])
        out += a + b + c + d
        fours += 4
    for f in at[fours:]:
        out += x[f] * columns[f, first:last]


def _add_scaled(total: Any, factor: Any, row: Any) -> None:
    total[: len(row)] += factor * row


def _add_rows(rows: Any, slots: Any, factors: Any, total: Any) -> None:
    N, fours = len(total), 0
    while fours + 4 <= len(slots):
        a, b, c, d = (factors[k] * rows[slots[k], :N] for k in range(fours, fours + 4))
        total += a + b + c + d
        fours += 4
    for k in range(fours, len(slots)):
        total += factors[k] * rows[slots[k], :N]


def _fill_from_gram(gram: Any, store: Any) -> None:
    if gram is None:
        return
    a, b, c, d = store.bounds
    members = np.concatenate([np.arange(a, b), np.arange(c, d)])
    n = len(members)
    store.rows[:n, :n] = gram[np.ix_(members, members)]
    store.rows[:n, n:] = 0.0
    store.slot_of[:n] = store.owner[:n] = np.arange(n)


def _mirror(block: Any, known: int, size: int) -> None:
    block[:known, known:size] = block[known:size, :known].T


def _violations(
    g: Any,
    linear: Any,
    beta: Any,
    lower: Any,
    upper: Any,
    left_out: Any,
    up_table: Any,
    low_table: Any,
) -> tuple[float, float, int]:
    f, may_grow, may_shrink = g + linear, beta < upper, beta > lower
    up_table[:] = np.where(may_grow & ~left_out, f, FAR)
    low_table[:] = np.where(may_shrink & ~left_out, -f, FAR)
    least, most = f[may_grow].min(initial=np.inf), f[may_shrink].max(initial=-np.inf)
    return float(least), float(most), int((may_grow & may_shrink).sum())


_TWINS: dict[str, Callable[..., Any]] = {
    "extremes": _lower_and_raise,
    "follow": _follow,
    "gains": _gains,
    "least_of": lambda lanes: lanes.min(),
    "largest_of": lambda lanes: lanes.max(),
    "values_single": _single,
    "values_double": _double,
    "gaussian_rows": _gaussian_rows,
    "copy_rows": _copy_rows,
    "_dense_products": _dense_products,
    "add_scaled": _add_scaled,
    "add_rows": _add_rows,
    "fill_from_gram": _fill_from_gram,
    "_mirror": _mirror,
    "violations": _violations,
}


class _CodeIsThereError(Exception):
    """Stop, and do it again with compiled code."""


def _plain(function: Callable[..., Any], is_there: Callable[[], bool]) -> Any:
    """A function that was made for numba as one of Python, with all that it calls."""
    name = function.__name__
    if name in _TWINS:
        return _TWINS[name]
    scope = dict(function.__globals__)
    for used in function.__code__.co_names:
        called = getattr(scope.get(used), "py_func", None)
        if called is not None:
            scope[used] = _plain(called, is_there)
    made = types.FunctionType(function.__code__, scope, name)
    return _in_pieces(made, is_there) if name == "_update_pairs" else made


def _in_pieces(update_pairs: Callable[..., Any], is_there: Callable[[], bool]) -> Callable[..., Any]:
    """Pair updates that end with `_CodeIsThereError` once they could be made by compiled code."""

    def update(lanes: Any, variables: Any, memory: Any, rows: Any, tolerance: float, max_steps: int) -> Any:
        steps, decrease = 0, 0.0
        while True:
            if is_there():
                raise _CodeIsThereError
            size = min(_STEPS, max_steps - steps)
            done, by, missing = update_pairs(lanes, variables, memory, rows, tolerance, size)
            steps, decrease = steps + done, decrease + by
            if done < size or missing >= 0 or steps >= max_steps:
                return steps, decrease, missing

    return update


def stand_in(
    made: Any, changes: Callable[..., list[NDArray[Any]]] | None, is_there: Callable[[], bool]
) -> Callable[..., Any] | None:
    """What to call instead of a function that is being compiled; None if it has to be waited for.

    Args:
        made: The function, by numba.
        changes: The arrays that a long call changes, of its arguments; None: a call is short.
        is_there: Whether it is compiled by now: then a long call begins again, with compiled code.
    """
    if changes is None:
        return _TWINS.get(made.py_func.__name__)
    here = _plain(made.py_func, is_there)

    def instead(*arguments: Any) -> Any:
        before = [array.copy() for array in changes(*arguments)]
        try:
            return here(*arguments)
        except _CodeIsThereError:
            for array, old in zip(changes(*arguments), before, strict=True):
                array[...] = old
            return made(*arguments)

    return instead
