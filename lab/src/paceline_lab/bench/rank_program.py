"""The program that runs a task on one rank, and the files by which it gets the task and hands back its result.

Started once a rank, as `python -m paceline_lab.bench.rank_program FOLDER`. The folder is private to the launch.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # a bucket on a slow link takes minutes; torchrun sees who dies
_TASK, _PROGRESS = "task.pickle", "progress"

TellProgress = Callable[[float], None]  # the share of the work that is done, 0 to 1


def save_task(folder: Path, task: Callable[..., Any], config: Any) -> None:
    """Write the ranks' task: a function at the top level of a module, and its configuration."""
    (folder / _TASK).write_bytes(pickle.dumps((task.__module__, task.__qualname__, config)))


def run_task(folder: Path, rank: int) -> None:
    """Perform the task on this rank, and write its result into the folder."""
    # The launcher wrote it into a private folder.
    module, name, config = pickle.loads((folder / _TASK).read_bytes())  # noqa: S301

    def tell(done_ratio: float) -> None:
        if rank == 0:
            _replace(folder / _PROGRESS, str(done_ratio).encode())

    result = getattr(importlib.import_module(module), name)(config, tell)
    _replace(_result_path(folder, rank), pickle.dumps(result))


def read_result(folder: Path, rank: int) -> Any:
    """Return the result that a rank wrote.

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


def main(folder: Path) -> None:
    """Open a Gloo group and run the task that lies in `folder`."""
    import torch  # noqa: PLC0415  # ranks of MPI run tasks without it
    import torch.distributed as dist  # noqa: PLC0415

    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is the command's: it may carry JSON
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    run_task(folder, dist.get_rank())
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the result is written; a peer's library must not hold up the end
