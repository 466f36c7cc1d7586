"""The program that `ranks` starts once a rank: open the group, run the task, leave its result as a file."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.bench.ranks import JOB_FILE, PROGRESS_FILE

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # a bucket on a slow link takes minutes; torchrun sees who dies


def main(folder: Path) -> None:
    """Run the job that lies in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    rank = dist.get_rank()
    # The launcher wrote it into a folder that is only ours.
    module, name, config = pickle.loads((folder / JOB_FILE).read_bytes())  # noqa: S301

    def tell(done_ratio: float) -> None:
        if rank == 0:
            _replace(folder / PROGRESS_FILE, str(done_ratio).encode())

    result = getattr(importlib.import_module(module), name)(config, tell)
    _replace(folder / f"result-{rank}.pickle", pickle.dumps(result))
    dist.barrier()


def _replace(path: Path, content: bytes) -> None:
    """Write a file that a reader sees whole or not at all."""
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(content)
    unfinished.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the result is written; a peer's library must not hold up the end
