"""The training that the study of shadows runs, on each rank: a small real model, or ResNet-50's layers that sleep.

Rules
1. Each rank writes the number of completed steps into a file of its own, before each step. So the file says where a
   rank was that was killed.
2. A file `mode` says what rank 0 does besides: nothing, `async` or `plain`. It saves every `_SAVE_S` then. The study
   changes the mode while training goes on, so all modes have the same load of the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.optim import shard
from paceline_lab.bench.layer_profile import default_profile
from paceline_lab.bench.timed_model import TimedModel

_SAVE_S = 10.0
_NUM_SAMPLES, _BATCH, _WIDTH = 960, 64, 8


class _Saves:
    """Saves of rank 0 next to the steps, with the times at which a state was taken and was on the disk."""

    def __init__(self, folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._net, self._optimizer = folder, net, optimizer
        self._due_s = self._taken_s = 0.0
        self._under_way: Any = None
        self._log = (folder / "saves").open("a", buffering=1)

    def look(self) -> None:
        """Save if the mode says so. Blocks as the mode does."""
        mode, now_s = (self._folder / "mode").read_text(), time.time()
        if self._under_way is not None and self._under_way.done():
            self._log.write(json.dumps(["async", self._taken_s, now_s]) + "\n")
            self._under_way = None
        if mode == "none" or now_s < self._due_s or self._under_way is not None:
            return
        self._due_s, self._taken_s = now_s + _SAVE_S, now_s
        state: dict[str, Any] = {"model": self._net.state_dict(), "optimizer": self._optimizer.state_dict()}
        if mode == "async":
            self._under_way = dcp.async_save(state, checkpoint_id=self._folder / "async", no_dist=True)
        else:
            torch.save(state, self._folder / "plain.pt")
            self._log.write(json.dumps(["plain", now_s, time.time()]) + "\n")


def main() -> None:
    kind, folder, num_epochs, pace_s = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    is_sharded = kind == "sharded"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    is_timed = kind == "timed"
    data = TensorDataset(torch.randn(_NUM_SAMPLES, _WIDTH), torch.randint(0, 3, (_NUM_SAMPLES,)))
    shuffle = GlobalShuffle(data, GlobalBatch.of(_BATCH, dist.get_world_size()))
    net: nn.Module = nn.Sequential(nn.Linear(_WIDTH, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))
    torch.manual_seed(dist.get_rank())
    if is_timed:
        net = TimedModel(default_profile("resnet50"), int(os.environ["LOCAL_RANK"]))
        for each in net.parameters():
            each.data.zero_()
    model = paceline.DistributedDataParallel(net, batch_sampler=shuffle)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if is_sharded:
        shard(optimizer, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    more: dict[str, Any] = {"checkpoint": folder / "checkpoints", "shadow": 1} if is_sharded else {}
    is_logical = kind in ("sharded", "logical")
    elastic = paceline.Elastic(model, optimizer, scheduler, shuffle, deterministic=is_logical, **more)
    saves = _Saves(folder, net, optimizer) if is_timed else None
    sys.stdout.write(
        f"pid {os.getpid()} begins after step {elastic.step}\n"
    )  # in one write: ranks share the pipe
    sys.stdout.flush()
    furthest = num_undone = 0
    with (folder / f"progress-{os.getpid()}").open("wb", buffering=0) as progress:
        for _ in range(shuffle.epoch, num_epochs):
            for batches in elastic.steps(DataLoader(data, batch_sampler=shuffle)):
                os.pwrite(progress.fileno(), f"{elastic.step:12d}".encode(), 0)
                num_undone += max(furthest - elastic.step, 0)
                furthest = max(furthest, elastic.step)
                if is_timed and dist.get_rank() == 0:
                    with (folder / "times").open("a") as times:
                        times.write(f"{time.time()}\n")
                _train(model, batches, optimizer, is_timed)
                time.sleep(0.0 if (folder / "hurry").exists() else pace_s)
                scheduler.step()
                if saves is not None and dist.get_rank() == 0:
                    saves.look()
    bits = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in net.parameters()))
    sys.stdout.write(f"{elastic.step} steps, undone {num_undone}, bits {bits.hexdigest()}\n")


def _train(model: Any, batches: Any, optimizer: torch.optim.Optimizer, is_timed: bool) -> None:
    with model.accumulate(batches) as micro_batches:
        for x, y in micro_batches:
            loss: Tensor
            if is_timed:
                loss = model(torch.zeros(1, requires_grad=True)).sum()
            else:
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
