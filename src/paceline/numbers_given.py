"""Numbers that a caller gives: a text or a list becomes NaN, which the check of the range refuses."""

from __future__ import annotations

import math
from typing import Any


def number(value: Any) -> float:
    """Return a number of any kind (Python's, numpy's, a tensor of one element) as a float; NaN for anything else.

    For checks like `if not 0 < number(ratio) <= 1: raise ConfigurationError(f"ratio={ratio!r} must be ...")`: NaN is in
    no range.
    """
    if isinstance(value, str | bytes):
        return math.nan  # float("25") would be a number
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan
