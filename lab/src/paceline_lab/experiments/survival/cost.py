"""Measure what an elastic training costs more than a plain loop while no rank is lost; the two loops take turns.

Rules
1. Both loops are in the same processes, with models of the same kind, and take turns of a few steps. So other load on
   the machine hits both. Two turns that follow each other are compared.
2. Times are of a whole step, from one turn of the loop to the next. Seconds of the processor do not depend on other
   programs that want it, those on the clock do.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data import GlobalBatch, GlobalShuffle

_STEPS = 12  # of a turn; the first ones of it are not counted
_WARM = 2
_BATCH, _WIDTH, _LAYERS = 128, 512, 6


@dataclass(frozen=True)
class Cost:
    """Elastic steps over plain ones, for each pair of turns: medians of a turn's steps, of rank 0."""

    step_ms: float  # plain, on the clock
    by_clock: list[float]
    by_processor: list[float]  # of one rank's process, all threads
    load: tuple[float, float, float]

    def words(self, name: str) -> str:
        """Return the comparison in a line."""
        clock, processor = (statistics.quantiles(each, n=4) for each in (self.by_clock, self.by_processor))
        return (
            f"{name}: {clock[1]:.3f} of a plain step on the clock (quartiles {clock[0]:.3f}, {clock[2]:.3f}), "
            f"{processor[1]:.3f} by processor time ({processor[0]:.3f}, {processor[2]:.3f}); "
            f"{len(self.by_clock)} pairs, a plain step {self.step_ms:.1f} ms, load {self.load[0]:.1f}"
        )


def measure(num_ranks: int, num_pairs: int, *, deterministic: bool, backend: str = "gloo") -> Cost:
    """Train that way on this host. Blocks. CalledProcessError if it cannot be."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "cost.json")
        launch = ["run", "--nproc-per-node", str(num_ranks), "--min-ranks", "1", "-m", __spec__.name]
        words = [str(out), str(num_pairs), str(int(deterministic)), backend]
        subprocess.run(
            [sys.executable, "-m", "paceline", *launch, *words],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return Cost(load=os.getloadavg(), **json.loads(out.read_text()))


class _Training:
    def __init__(self, num_samples: int) -> None:
        torch.manual_seed(7)
        data = TensorDataset(torch.randn(num_samples, _WIDTH), torch.randn(num_samples, _WIDTH))
        self.shuffle = GlobalShuffle(data, GlobalBatch.of(_BATCH, dist.get_world_size()), seed=5)
        layers = [each for _ in range(_LAYERS) for each in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
        self.model = paceline.DistributedDataParallel(nn.Sequential(*layers), batch_sampler=self.shuffle)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.loader = DataLoader(data, batch_sampler=self.shuffle)

    def turn(self, steps: Iterator[list[Any]]) -> tuple[float, float]:
        """Train an epoch; returns the median step, on the clock and of the processor."""
        times: list[tuple[float, float]] = []
        for batches in steps:
            times.append((time.perf_counter(), time.process_time()))
            with self.model.accumulate(batches) as micro_batches:
                for x, y in micro_batches:
                    nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        pairs = list(zip(times[_WARM:], times[_WARM + 1 :], strict=False))
        clock, processor = ([later[i] - sooner[i] for sooner, later in pairs] for i in (0, 1))
        return statistics.median(clock), statistics.fmean(processor)


def main() -> None:
    out, num_pairs, deterministic, backend = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    plain, lasting = _Training(_BATCH * _STEPS), _Training(_BATCH * _STEPS)
    elastic = paceline.Elastic(
        model=lasting.model,
        optimizer=lasting.optimizer,
        scheduler=lasting.scheduler,
        sampler=lasting.shuffle,
        deterministic=bool(int(deterministic)),
    )
    world = dist.group.WORLD
    assert world is not None
    plain.model.membership.rebuild(world, source=0)  # the default group is another one since
    found = []
    for pair in range(-1, int(num_pairs)):
        turns = {}
        for is_elastic in (False, True) if pair % 2 else (True, False):
            each = lasting if is_elastic else plain
            handed_out = elastic.steps(each.loader) if is_elastic else each.shuffle.steps(each.loader)
            turns[is_elastic] = each.turn(iter(handed_out))
        if pair >= 0:
            found.append((turns[False], turns[True]))
    if dist.get_rank() == 0:
        report = {
            "step_ms": statistics.median(plain[0] for plain, _ in found) * 1e3,
            "by_clock": [lasting[0] / plain[0] for plain, lasting in found],
            "by_processor": [lasting[1] / plain[1] for plain, lasting in found],
        }
        Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
