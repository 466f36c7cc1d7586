"""Random programs that are stopped and resumed: every sample of every epoch once, gradients as of one process."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from harness.models import generator
from harness.program_comparison import Comparison, take
from harness.program_model import SIZE, loss_of, make_net
from harness.random_programs import Program
from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle, GlobalStream, TokenShuffle


class Counted(IterableDataset[int]):
    """The numbers from 0 on, as a plain generator that keeps state."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.position, self.resumed = num_samples, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resumed = state["position"]

    def __iter__(self) -> Iterator[int]:
        self.position, self.resumed = self.resumed, 0
        while self.position < self.num_samples:
            self.position += 1
            yield self.position - 1


class _Job:
    """The run of one rank: sampler, loop and wrapped model, which a resumed run replaces."""

    def __init__(self, program: Program, rank: int, net: Any) -> None:
        options = program.options
        self.source = options.get("source", "shuffle")
        self.num_samples, self.size = options.get("num_samples", 12), options.get("size", 4)
        self.program, self.rank = program, rank
        self.bucket_cap_mb = options.get("bucket_cap_mb")
        self.trained: dict[int, list[int]] = {}
        self.begin(net, GlobalBatch.of(self.size, program.num_ranks))

    def begin(self, net: Any, batch: GlobalBatch, state: dict[str, Any] | None = None) -> None:
        """Begin like a new process."""
        self.sampler = self._sampler(batch)
        if state is not None:
            self.sampler.load_state_dict(state)
        self.model = DistributedDataParallel(
            copy.deepcopy(net), batch_sampler=self.sampler, bucket_cap_mb=self.bucket_cap_mb
        )
        self.model.__dict__["is_late"] = self.program.slow_rank == self.rank
        self.loop = self.steps()

    def _sampler(self, batch: GlobalBatch) -> Any:
        if self.source == "shuffle":
            return GlobalShuffle(self.num_samples, batch)
        if self.source == "tokens":  # sequences of one length
            return TokenShuffle([3] * self.num_samples, _tokens(batch))
        stateful = self.source == "stream with state"
        return GlobalStream(
            Counted(self.num_samples) if stateful else range(self.num_samples), batch, collate=list
        )

    def shares(self, source: random.Random) -> GlobalBatch:
        """Return a new division of the same batch. Some ranks may get nothing."""
        cuts = sorted(source.randint(0, self.size) for _ in range(self.program.num_ranks - 1))
        return GlobalBatch(tuple(b - a for a, b in zip((0, *cuts), (*cuts, self.size), strict=True)))

    def give(self, batch: GlobalBatch) -> GlobalBatch:
        """Return the batch in the units of the sampler."""
        return _tokens(batch) if self.source == "tokens" else batch

    def steps(self) -> Any:
        """Return the next loop."""
        if isinstance(self.sampler, GlobalStream):
            return self.sampler.steps()
        data: Any = range(self.num_samples)
        return self.sampler.steps(DataLoader(data, batch_sampler=self.sampler, collate_fn=list))

    def next(self, compare: Comparison, names_epoch: bool) -> list[list[int]]:
        """Return the next step's batches, from the next epoch if this one is over."""
        batches = next(self.loop, None)
        if batches is None:
            self.check(compare)
            if names_epoch:
                self.sampler.set_epoch(max(self.trained, default=-1) + 1)
            self.loop = self.steps()
            batches = next(self.loop)
        return batches  # type: ignore[no-any-return]

    def check(self, compare: Comparison) -> None:
        """Check that all epochs so far are complete."""
        for epoch, samples in self.trained.items():
            if sorted(samples) != list(range(self.num_samples)):
                compare.fail(f"epoch {epoch} has trained {sorted(samples)}")


def _tokens(batch: GlobalBatch) -> GlobalBatch:
    return GlobalBatch(tuple(3 * size for size in batch.local))


def resumed(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Check each step's gradient against one process's, and that epochs hold every sample once."""
    alone = make_net(program)
    job = _Job(program, rank, alone)
    for name, seed in [*program.operations, ("finish", -1)]:
        compare.where = f"{name} ({seed})"
        source = random.Random(f"{program.seed} {seed}")  # the same on all ranks
        names_epoch = source.random() < 0.5
        if name == "resume":
            _resume(job, source, compare)
        elif name == "go back":
            state = job.sampler.state_dict()
            next(job.loop, None)
            job.sampler.load_state_dict(state)
            job.loop.close()
            job.loop = job.steps()
        elif name == "change shares":
            job.sampler.change(job.give(job.shares(source)))
        elif name == "train again":
            job.next(compare, names_epoch)
            job.sampler.repeat(job.give(job.shares(source)))
            _train(job, alone, compare, next(job.loop))
        elif name == "train":
            _train(job, alone, compare, job.next(compare, names_epoch))
        else:
            for batches in job.loop:
                _train(job, alone, compare, batches)
            job.check(compare)


def _resume(job: _Job, source: random.Random, compare: Comparison) -> None:
    if source.random() < 0.5:
        job.loop.close()
    state = pickle.loads(pickle.dumps(job.sampler.state_dict()))
    compare.bits.append(json.dumps(state))
    epoch = max(job.trained, default=0)
    job.begin(job.model.module, job.shares(source), state)
    if source.random() < 0.5:  # as a loop over epochs does that has kept its own count
        job.sampler.set_epoch(epoch)


def _train(job: _Job, alone: Any, compare: Comparison, batches: list[list[int]]) -> None:
    job.model.zero_grad()
    with job.model.accumulate(batches) as micro_batches:
        for own in micro_batches:
            loss_of(job.model, _inputs(job.program, own), {}).backward()
    taken = take(job.model.module)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [i for own in batches for i in own])
    samples = sorted(i for own in of_ranks for i in own)
    job.trained.setdefault(job.sampler.epoch, []).extend(samples)
    alone.zero_grad()
    loss_of(alone, _inputs(job.program, samples), {}).backward()
    compare.gradients(job.model, taken, [p.grad for p in alone.parameters()])
    with torch.no_grad():
        for p, q in zip(job.model.module.parameters(), alone.parameters(), strict=True):
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.01)
                q.copy_(p)


def _inputs(program: Program, samples: list[int]) -> Tensor:
    return torch.stack(
        [torch.randn(SIZE, generator=generator(program.seed, i), dtype=torch.float64) for i in samples]
    )
