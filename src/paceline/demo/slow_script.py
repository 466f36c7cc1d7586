"""The script of `paceline demo doctor`: plain torch with torch's DDP, and nothing of Paceline.

Its argument is the step after which rank 2 reads its samples slowly; without one all ranks are alike.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

NUM_STEPS, BATCH = 100, 8


class Files(Dataset[torch.Tensor]):
    """A data set whose files lie on a disk; rank 2's disk becomes slow."""

    def __init__(self, rank: int, slow_after: int) -> None:
        self._slow_from = slow_after * BATCH if rank == 2 else NUM_STEPS * BATCH

    def __len__(self) -> int:
        return NUM_STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.010 if index >= self._slow_from else 0.002)
        return torch.full((32,), index / len(self))


def main() -> None:
    """Train, and let rank 0 print the step time now and then."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    files = Files(rank, int(sys.argv[1]) if len(sys.argv) > 1 else NUM_STEPS)
    began_s = time.perf_counter()
    for step, x in enumerate(DataLoader(files, batch_size=BATCH), start=1):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if rank == 0 and step % 25 == 0:
            now_s = time.perf_counter()
            print(f"   step {step:>3}: {(now_s - began_s) / 25 * 1e3:3.0f} ms", flush=True)  # noqa: T201  a script
            began_s = now_s
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
