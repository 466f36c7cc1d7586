"""Soak: shares that change at random must not lose or double a sample, or let replicas drift. Speed is not measured.

Small training on real processes over Gloo. In random steps shares change to random ones (none for some ranks), a rank
stalls or runs out of memory, or `balance` moves samples. Sometimes all leave the epoch and resume from `state_dict()`.
All but what balance does follows from a seed.

Checked: each epoch has every sample once, over all ranks, and parameters are bitwise equal on all ranks. In the end
they are those of one process that trained the same global batches, up to rounding.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel
from paceline.data import Balance, GlobalBatch, GlobalShuffle
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks, gather

NUM_SAMPLES, SIZE = 1000, 24
RATE = 0.02

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Config:
    """The length of the soak, and its seed.

    Attributes:
        num_steps: Number of steps that succeed.
        seed: Seed of everything.
        workers: Number of workers of each rank's loader.
    """

    num_steps: int
    seed: int = 0
    workers: int = 0


@dataclass(frozen=True)
class Outcome:
    """The events of a soak; the same on every rank.

    Attributes:
        num_steps: Steps that succeeded.
        num_epochs: Epochs whose samples were counted.
        num_changes: Changes of shares, by hand or by balance.
        num_repeats: Steps that were given up.
        num_restarts: Restarts from a state.
        num_bad_epochs: Epochs in which a sample was missing or came twice.
        num_drifts: Checks at which ranks had different parameters.
        difference: Relative difference from one process in the end.
    """

    num_steps: int
    num_epochs: int
    num_changes: int
    num_repeats: int
    num_restarts: int
    num_bad_epochs: int
    num_drifts: int
    difference: float


class Fragile(nn.Module):
    """A network that can be made to stall, or to run out of memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        self.stall_s, self.fails = 0.0, False

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.stall_s)
        if self.fails:
            raise MemoryError(f"{len(x)} samples")
        output: Tensor = self.body(x)
        return output


def data() -> TensorDataset:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, dtype=torch.float64, generator=source)
    return TensorDataset(x, torch.arange(NUM_SAMPLES))


def loss_of(output: Tensor, index: Tensor) -> Tensor:
    """Return a loss that depends on the sample, so that a sample that counts twice is seen."""
    return (output.square().sum(1) * (1 + index / NUM_SAMPLES)).mean()


class Soak:
    """One rank's loop. `draw` is the same on all ranks."""

    def __init__(self, config: Config) -> None:
        self.config, self.draw = config, random.Random(config.seed)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.data, self.network = data(), Fragile()
        self.shuffle = GlobalShuffle(self.data, GlobalBatch((SIZE // self.num_ranks,) * self.num_ranks))
        self.loader = self._loader()
        self.model = DistributedDataParallel(
            self.network, batch_sampler=self.shuffle, balance=Balance(num_ignored=0)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        self.steps, self.changes, self.repeats, self.restarts, self.drifts = 0, 0, 0, 0, 0
        self.seen: list[list[int]] = []  # by epoch, on this rank
        self.sizes: list[int] = []  # of each step, over all ranks

    def _loader(self) -> DataLoader[Any]:
        workers = self.config.workers
        return DataLoader(
            self.data, batch_sampler=self.shuffle, num_workers=workers, persistent_workers=workers > 0
        )

    def run(self, tell: TellProgress) -> Outcome:
        while self.steps < self.config.num_steps:
            if len(self.seen) <= self.shuffle.epoch:
                self.seen.append([])
            self._epoch(tell)
        whole = gather(self.seen[:-1])
        bad = sum(
            sorted(i for ranks in whole for i in ranks[at]) != list(range(NUM_SAMPLES))
            for at in range(len(self.seen) - 1)
        )
        return Outcome(
            self.steps,
            len(self.seen) - 1,
            self.changes,
            self.repeats,
            self.restarts,
            bad,
            self.drifts,
            self._difference(),
        )

    def _epoch(self, tell: TellProgress) -> None:
        loop = self.shuffle.steps(self.loader)
        epoch = None
        for batches in loop:
            if epoch is None:
                epoch = self.shuffle.epoch
                if len(self.seen) <= epoch:
                    self.seen.append([])
            if not self._step(batches):
                continue
            if self.steps % 50 == 0:
                self._check_drift()
                tell(self.steps / self.config.num_steps)
            if self.steps >= self.config.num_steps:
                loop.close()
                return
            if self.draw.random() < 0.004:
                state = self.shuffle.state_dict()
                loop.close()
                self.shuffle.load_state_dict(state)
                self.restarts += 1
                return
            self._maybe_change()

    def _step(self, batches: list[Any]) -> bool:
        victim, chance = self.draw.randrange(self.num_ranks), self.draw.random()
        sizes = self.shuffle.step.samples if self.shuffle.step is not None else ()
        self.network.fails = self.rank == victim and chance < 0.2 and sizes[victim] > SIZE // 2
        self.network.stall_s = 0.02 if self.rank == victim and 0.9 < chance < 0.93 else 0.0
        before = self.shuffle.batch
        self.optimizer.zero_grad()
        with self.model.accumulate(batches) as micro_batches:
            for x, index in micro_batches:
                loss_of(self.model(x), index).backward()
        self.changes += self.shuffle.batch != before
        if micro_batches.repeats:
            self.repeats += 1
            return False
        self.optimizer.step()
        self.steps += 1
        self.seen[-1] += [i for _, index in batches for i in index.tolist()]
        self.sizes.append(round(micro_batches.total_weight))
        return True

    def _maybe_change(self) -> None:
        if self.draw.random() < 0.3:
            cuts = sorted(self.draw.randint(0, SIZE) for _ in range(self.num_ranks - 1))
            local = tuple(b - a for a, b in zip((0, *cuts), (*cuts, SIZE), strict=True))
            self.shuffle.change(GlobalBatch(local), position=max(gather(self.shuffle.fetched)))
            self.changes += 1

    def _check_drift(self) -> None:
        of_ranks = gather([p.detach().numpy().tobytes() for p in self.model.parameters()])
        self.drifts += any(other != of_ranks[0] for other in of_ranks)

    def _difference(self) -> float:
        alone = Fragile()
        optimizer = torch.optim.SGD(alone.parameters(), lr=RATE, momentum=0.9)
        rows = self._rows_in_order()
        for size in self.sizes:
            x, index = self.data[[next(rows) for _ in range(size)]]
            optimizer.zero_grad()
            loss_of(alone(x), index).backward()
            optimizer.step()
        pairs = zip(self.network.parameters(), alone.parameters(), strict=True)
        return max(float(((p - q).norm() / q.norm()).item()) for p, q in pairs)

    def _rows_in_order(self) -> Iterator[int]:
        epoch = 0
        while True:
            yield from self.shuffle.order(epoch).tolist()
            epoch += 1


def soak(config: Config, tell: TellProgress) -> Outcome:
    """Run one rank. Collective; every rank returns the same."""
    return Soak(config).run(tell)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps.")] = 3000,
    ranks: Annotated[
        int, typer.Option(min=3, help="Number of ranks. Two do not always have room for the batch.")
    ] = 3,
    seed: int = 0,
    workers: Annotated[int, typer.Option(min=0, help="Number of workers of each rank's loader.")] = 0,
) -> None:
    """Train with shares that change at random, and check."""
    began_s = time.perf_counter()
    outcomes = LoopbackRanks(ranks).run(soak, Config(steps, seed, workers), "soak")
    print(outcomes[0])
    print(f"{ranks} ranks, {time.perf_counter() - began_s:.0f} s")
    good = all(
        outcome.num_bad_epochs == outcome.num_drifts == 0 and outcome.difference < 1e-9
        for outcome in outcomes
    )
    print("nothing lost, nothing doubled, no drift" if good else "FAILED")
    raise typer.Exit(0 if good else 1)
