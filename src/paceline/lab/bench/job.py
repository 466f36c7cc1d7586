"""What a rank is given to do, and how it hands back what it found: files in a folder that is only ours."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

_JOB, _PROGRESS = "job.pickle", "progress"

TellProgress = Callable[[float], None]  # the share of the work that is done, 0 to 1


def save(folder: Path, task: Callable[..., Any], config: Any) -> None:
    """Write down what the ranks are to do: a function at the top level of a module, and its configuration."""
    (folder / _JOB).write_bytes(pickle.dumps((task.__module__, task.__qualname__, config)))


def run(folder: Path, rank: int) -> None:
    """Do it, on this rank, and leave the result."""
    # The launcher wrote it into a folder that is only ours.
    module, name, config = pickle.loads((folder / _JOB).read_bytes())  # noqa: S301

    def tell(done_ratio: float) -> None:
        if rank == 0:
            _replace(folder / _PROGRESS, str(done_ratio).encode())

    result = getattr(importlib.import_module(module), name)(config, tell)
    _replace(_result_path(folder, rank), pickle.dumps(result))


def result(folder: Path, rank: int) -> Any:
    """Return what a rank left.

    Raises:
        FileNotFoundError: It left nothing.
    """
    return pickle.loads(_result_path(folder, rank).read_bytes())  # noqa: S301  # as above


def done_ratio(folder: Path) -> float:
    """Return how far rank 0 is."""
    path = folder / _PROGRESS
    return float(path.read_text()) if path.exists() else 0.0


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}.pickle"


def _replace(path: Path, content: bytes) -> None:
    """Write a file that a reader sees whole or not at all."""
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(content)
    unfinished.replace(path)
