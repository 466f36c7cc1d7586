"""The repository that this package was imported from. Only a checkout has stored results and tests."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from paceline.errors import ConfigurationError

_MARK = "lab/src/paceline_lab/checkout.py"  # this file, from the repository's root


@cache
def repository() -> Path | None:
    """Return the repository's root; None where this package was installed from a wheel."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / _MARK).exists() else None


def in_repository(path: str, what: str) -> Path:
    """Return a path of the repository.

    Args:
        path: Path from the repository's root.
        what: Words for the error, such as "the stored results".

    Raises:
        ConfigurationError: There is no checkout, or it does not have it.
    """
    root = repository()
    if root is None or not (root / path).exists():
        raise ConfigurationError(
            f"{what} lies in the source repository ({path}), which this installation does not have. Clone the "
            "repository and install from there: pip install -e . -e plan -e lab -e svm."
        )
    return root / path


def stored_result(name: str) -> dict[str, Any]:
    """Return a stored report of `lab/results`.

    Raises:
        ConfigurationError: There is no checkout, or it has no such report.
    """
    record: dict[str, Any] = json.loads(
        in_repository(f"lab/results/{name}.json", f"the report {name}").read_text()
    )
    return record
