"""What is needed after pair updates, compiled by another process meanwhile: dense rows and a Gaussian kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_svm.gaussian import gaussian_rows, scratch_for
from paceline_svm.row_cache import add_rows
from paceline_svm.working_set import violations


def compile_next(types: Any) -> None:
    """Blocks of kernel values, in double precision for the check of the optimum and for predictions; sums; violations.

    Args:
        types: numba's, of the arguments of `smo.solve`.
    """
    number = _gaussian_number(types)
    if number is not None:
        for dtype in dict.fromkeys([number, np.dtype(np.float64)]):
            _block(dtype)
        add_rows(np.ones((1, 1), number), np.zeros(1, np.int64), np.ones(1), np.ones(1))
        table = np.ones((1, 1))
        violations(table[0], table, table, table, table, table > 0, table.copy(), table.copy())


def compile_prediction(types: Any) -> None:
    """What predicts.

    Args:
        types: numba's, of the arguments of `small_problems.solve_some`.
    """
    if _gaussian_number(types) is not None:
        _block(np.dtype(np.float64))


def _gaussian_number(types: Any) -> np.dtype[Any] | None:
    """The precision of dense rows whose kernel is Gaussian; None of others."""
    source = dict(zip(types[0].fields, types[0].types, strict=True))
    is_this = str(source["dense"]) != "none" and str(source["gaussian"]) != "none"
    return np.dtype(str(source["squares"].dtype)) if is_this else None


def _block(dtype: Any) -> None:
    """One kernel value."""
    row, slot, nothing = np.ones(1, dtype), np.zeros(1, np.int64), np.zeros(0)
    block = row.reshape(1, 1)
    scratch = scratch_for(1, dtype)
    gaussian_rows(block, (row, row), 1.0, scratch, row.copy(), block.copy(), slot, 0, nothing, nothing)
