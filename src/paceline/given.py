"""Values that a user gives: files and JSON, checked before any work is done for them, and numbers.

A text or a list in place of a number becomes NaN, which the check of the range refuses.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from paceline.errors import ConfigurationError


def check_output(path: Path, option: str) -> None:
    """Raise ConfigurationError for a file, named by `option`, that could not be written later."""
    reasons = {
        "it is a folder": path.is_dir(),
        f"there is no folder {path.parent}": not path.parent.is_dir(),
        "it may not be written to": not os.access(path if path.exists() else path.parent, os.W_OK),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigurationError(f"{option} {path} cannot be written: {reason}. Pass another file.")


def parse_json(text: str | bytes) -> Any:
    """Return what a text says in JSON; raises ValueError if it is none, or nested more deeply than Python reads."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


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
