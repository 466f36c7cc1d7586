"""Measured parts of a benchmark, so that it can be stopped and goes on later: what is there is not measured again."""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

Part = TypeVar("Part")

PartsFolder = Annotated[
    Path | None, typer.Option("--parts", help="Keep each part here, and do not measure again what is there.")
]


def measured(folder: Path | None, key: object, measure: Callable[[], Part]) -> Part:
    """Return the part kept under `key`, whose text says everything that it depends on; else measure and keep it.

    Args:
        folder: For this version of the code only; None: nothing is kept.
        key: Of the part.
        measure: Returns what can be pickled.
    """
    if folder is None:
        return measure()
    path = folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.part"
    if path.exists():
        kept: Part = pickle.loads(path.read_bytes())
        return kept
    part = measure()
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(part))
    return part
