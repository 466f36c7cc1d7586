"""Which variables are optimised together? The worst violators of all ranks, and those that came in last time.

Rules
1. Every rank nominates its own; all ranks see all nominations and choose alike, so no rank has to be asked twice.
2. Ties are broken by the variable's scrambled number: the choice does not depend on the number of ranks, and the first
   working set, when all are tied, is a sample of the whole set even if the rows are sorted.
3. The newer half of the last working set stays, or variables would come and go in pairs of sets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import compiled
from paceline.svm.nominations import FIELDS, Nominations, scrambled

_LARGE_PROBLEM = 24_000
_ONE_SET = 2_048


def choose(nominations: Nominations, num: int) -> NDArray[np.float64]:
    """`num` nominated variables, taken in turn from both lists, best first, each once; shape (<= num, 5)."""
    orders = []
    for table, sign in ((nominations.growing, 1.0), (nominations.shrinking, -1.0)):
        rows = np.flatnonzero(~np.isnan(table[:, 0]))
        tie = scrambled(table[rows, 1].astype(np.int64))
        orders.append(rows[np.lexsort((tie, sign * table[rows, 0]))])
    out = np.empty((num, FIELDS))
    return out[: _in_turn(nominations.growing, orders[0], nominations.shrinking, orders[1], out)]


@compiled
def _in_turn(
    growing: NDArray[np.float64],
    first: NDArray[np.int64],
    shrinking: NDArray[np.float64],
    second: NDArray[np.int64],
    out: NDArray[np.float64],
) -> int:
    """Write rows of both tables in turn to `out`, in the orders given, a variable once; returns how many."""
    taken = set()
    taken.add(-1.0)  # so that its type is known
    num = 0
    for k in range(max(len(first), len(second))):
        for table, order in ((growing, first), (shrinking, second)):
            if k < len(order) and num < len(out):
                row = table[order[k]]
                if row[1] not in taken:
                    taken.add(row[1])
                    out[num] = row
                    num += 1
    return num


def working_set_size(num_variables: int, num_free: int = 0) -> int:
    """How many variables are optimised together; even. Small problems are one working set.

    A working set that holds all variables between their bounds makes few turns; one that is larger than that costs
    kernel values and pair updates for nothing.

    Args:
        num_variables: Of the problem.
        num_free: Those between their bounds, as known so far.
    """
    if num_variables <= _ONE_SET:
        return max(2, num_variables + num_variables % 2)
    least = min(max(num_variables // 12, 512), 1_024 if num_variables < _LARGE_PROBLEM else _ONE_SET)
    return min(max(least, 3 * num_free // 2), _ONE_SET, num_variables // 4) // 2 * 2
