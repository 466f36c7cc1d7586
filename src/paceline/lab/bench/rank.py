"""The program that `ranks` starts once a rank: open the group, run the job, leave its result as a file."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.lab.bench import job

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # a bucket on a slow link takes minutes; torchrun sees who dies


def main(folder: Path) -> None:
    """Run the job that lies in `folder`."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is the command's: it may carry JSON
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    job.run(folder, dist.get_rank())
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the result is written; a peer's library must not hold up the end
