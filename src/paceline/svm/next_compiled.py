"""What a fit of a large problem needs after its pair updates, compiled by another process while these are."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.svm.gaussian import gaussian_rows, scratch_for
from paceline.svm.row_cache import add_rows


def compile_next(types: Any) -> None:
    """Call them with one sample, as a fit of dense rows with a Gaussian kernel does; others find theirs not compiled.

    Args:
        types: numba's, of the arguments of `smo.solve`.
    """
    source, variables = types[0], types[2]
    if str(source.types[source.fields.index("gaussian")]) != "float64":
        return
    number = np.dtype(str(variables.types[0].dtype))
    none, slot, one = np.zeros(0), np.zeros(1, np.int64), np.ones(1)
    for dtype in dict.fromkeys([number, np.dtype(np.float64)]):
        row = np.ones(1, dtype)
        block = row.reshape(1, 1)
        gaussian_rows(
            block, (row, row), 1.0, scratch_for(1, dtype), row.copy(), block.copy(), slot, 0, none, none
        )
    add_rows(np.ones((1, 1), number), slot, one, one.copy())
