"""Measure how long unequal machines take to a given loss, by torch's DDP, HetSeq's rule, fixed and automatic shares.

The hosts are an emulated cluster's, and the training is real. All sides train the same samples in the same steps, so
they differ only in the time of a step. The report says by how much losses differ. The result is the time until the
training loss, a mean of 8 steps, first falls to the target.

    --compute timed   ranks take for their samples what their speed says, a third in forward: they compute, and sleep
                      for the rest. So they hardly compete for this machine's cores, as machines of their own do not
    --compute quota   hosts have CPU quotas, three fifths of this machine's cores together, and compute for real: needs
                      an otherwise idle machine

`--workloads masked,translation --seeds 5` are HetSeq's two tasks, small: a BERT on bytes, and a transformer that puts
numbers into words. Medians of the seeds are shown, each seed with its own parameters, samples and target.

`--workloads bert` has a part of the gradients of HetSeq's model, and layers that only take time. Its steps are the
same, without a loss; seven eighths of them are the target. A case takes two minutes: with `--parts FOLDER` and `--only
1`, then 2, then neither, all can be measured one at a time.

    torch     torch.nn.parallel.DistributedDataParallel, equal shares
    HetSeq    the same with its step: six sums over the ranks, gradients times W / sum(sample_size), where its
              sample_size is a constant of the model (1 for images, BERT's sequence length), clipped to 25 (Ding et al.
              2021 and its code)
    fixed     shares by the speeds at the start, which a user would have to know
    auto      balance="auto", from equal shares
    ideal     arithmetic: samples could be divided, nothing is communicated. Under quotas: all processor time that
              the ranks of torch used, divided by the cores of all hosts
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.errors import ConfigurationError
from paceline.planning import Speed, best_shares
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import ClusterRanks, gather
from paceline_lab.emulation import ClusterSpec, Scenario
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, PartsFolder, Quick, ReportFolder
from paceline_lab.experiments.runner import conclude, measured, train_each
from paceline_lab.experiments.unequal.shares import Case
from paceline_lab.experiments.unequal.time_to_loss_models import count, make_task
from paceline_lab.experiments.unequal.time_to_loss_outcome import (
    AUTO,
    FIXED,
    HETSEQ,
    SIDES,
    TORCH,
    Job,
    Outcome,
    draw,
    report,
)

EPOCH_SAMPLES = 60_000  # at most: what Fashion-MNIST has
QUOTA_RATIO = 0.6  # of all cores: so little that any two of four hosts fit on one core of two
QUOTA_SAMPLES = {"images": 384, "text": 480}  # a rank: an ideal step of about 0.25 s
QUOTA_WIDTH = 32  # of the CNN, so that images cost as much as text
READY, HALF_WAY = "ready to train", "half of the steps are done"  # what a scenario waits for
QUOTAS_SET_S = 1.0  # time for it to set all hosts' quotas


def cases(workload: str) -> tuple[Case, ...]:
    """A mixed cluster, and an equal one of which a host is throttled."""
    ideal_s = {"bert": 0.4, "masked": 0.8, "translation": 0.8}.get(workload, 0.2)
    return (
        Case((1, 1, 2, 4), ideal_s=ideal_s, samples_per_rank=48),
        Case((1, 1, 1, 1), ideal_s=ideal_s, samples_per_rank=48, throttled=(2, 4.0)),
    )


# ---- how it is trained


class Training:
    """One side's model, sampler and step."""

    def __init__(self, job: Job, side: str) -> None:
        case, rank = job.case, dist.get_rank()
        speed = case.speeds()[rank] if job.quotas is None else None
        width = 8 if job.quotas is None else QUOTA_WIDTH
        steps_an_epoch = min(job.num_steps, EPOCH_SAMPLES // case.size)
        self.task = make_task(job.workload, case.size * steps_an_epoch, speed, width, job.seed)
        self.network, self.side = self.task.network, side
        self.shuffle = GlobalShuffle(self.task.data, first_shares(job.case, side), seed=1 + job.seed)
        self.model: nn.Module
        if side in (TORCH, HETSEQ):
            self.model = nn.parallel.DistributedDataParallel(self.network)
        else:
            balance = "auto" if side == AUTO else None
            self.model = DistributedDataParallel(self.network, batch_sampler=self.shuffle, balance=balance)
        self.optimizer = self.task.optimizer(self.model)
        self._steps = self._all_steps()

    def _all_steps(self) -> Iterator[Any]:
        loader = DataLoader(self.task.data, batch_sampler=self.shuffle)
        for epoch in itertools.count():
            self.shuffle.set_epoch(epoch)
            yield from self.shuffle.steps(loader)

    def step(self) -> tuple[float, int]:
        """Train a step; the sum of this rank's losses, and of how many."""
        batches = next(self._steps)
        total, number = 0.0, 0
        if isinstance(self.model, DistributedDataParallel):
            with self.model.accumulate(batches, weight=count) as micro_batches:
                for batch in micro_batches:
                    total, number = total + self._backward(batch) * count(batch), number + count(batch)
        else:
            for batch in batches:
                total, number = total + self._backward(batch) * count(batch), number + count(batch)
            if self.side == HETSEQ:
                self._weigh_as_hetseq(total, number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, number

    def _backward(self, batch: Sequence[Tensor]) -> float:
        loss = self.task.loss(self.model, batch)
        loss.backward()
        return float(loss.detach())

    def _weigh_as_hetseq(self, total: float, number: int) -> None:
        sums = torch.tensor([self.task.sample_size, number, total, 0.0, number, 0.0], dtype=torch.float64)
        dist.all_reduce(sums)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(dist.get_world_size() / sums[0].item())
        nn.utils.clip_grad_norm_(self.model.parameters(), 25)


def first_shares(case: Case, side: str) -> GlobalBatch:
    """Return equal shares, or for the side with fixed shares, shares by speed."""
    if side == FIXED:
        speeds = [Speed(0.0, float(slowness)) for slowness in case.slowness]
        return GlobalBatch(best_shares(speeds, case.size))
    return GlobalBatch((case.samples_per_rank,) * len(case.slowness))


def train_all(job: Job, tell: TellProgress) -> dict[str, dict[str, Any]]:
    """Return the results of `train`, by side. Collective."""
    Training(job, TORCH).step()  # the first side would warm up for the others
    return train_each(SIDES, partial(train, job), tell)


def train(job: Job, side: str) -> dict[str, Any]:
    """Train all steps: when each ended on the last rank, the mean loss, and each rank's processor time. Collective."""
    training = Training(job, side)
    seen: dict[str, Any] = {"end_s": [], "loss": [], "number": [], "processor_s": []}
    dist.barrier()
    if job.quotas is not None:  # hosts have whole cores until the first side begins, to start sooner
        _say(READY)
        time.sleep(QUOTAS_SET_S)
        dist.barrier()
    began_s = time.perf_counter()
    for step in range(job.num_steps):
        if step == job.num_steps // 2 and job.case.throttled is not None:
            rank, factor = job.case.throttled
            if job.quotas is None and dist.get_rank() == rank and training.network.speed is not None:
                training.network.speed = training.network.speed.times(factor)
            if job.quotas is not None:
                _say(HALF_WAY)
        processor_s = time.process_time()
        total, number = training.step()
        seen["end_s"].append(time.perf_counter() - began_s)
        seen["loss"].append(total)
        seen["number"].append(number)
        seen["processor_s"].append(time.process_time() - processor_s)
    seen["samples"] = list(training.shuffle.batch.samples)
    everyone = gather(seen)
    if not job.learns:
        for seen in everyone:
            seen["loss"] = [1 - step / job.num_steps for step in range(job.num_steps)]
            seen["number"] = [1] * job.num_steps
    return {
        "end_s": [max(ends) for ends in zip(*(rank["end_s"] for rank in everyone), strict=True)],
        "loss": [
            sum(losses) / sum(numbers)
            for losses, numbers in zip(
                zip(*(rank["loss"] for rank in everyone), strict=True),
                zip(*(rank["number"] for rank in everyone), strict=True),
                strict=True,
            )
        ],
        "processor_s": [rank["processor_s"] for rank in everyone],
        "samples": everyone[0]["samples"],
    }


def _say(words: str) -> None:
    if dist.get_rank() == 0:
        print(words, flush=True)


def main(
    compute: Annotated[
        str, typer.Option(help="timed: layers sleep; quota: hosts get a part of a core.")
    ] = "timed",
    workloads: Annotated[
        str, typer.Option(help="Workloads, comma-separated: images, text, masked, translation, bert.")
    ] = "images,text",
    steps: Annotated[int, typer.Option(min=16, help="Number of steps of each training.")] = 64,
    seeds: Annotated[int, typer.Option(min=1, help="Number of trainings of each workload.")] = 1,
    rate: Annotated[str, typer.Option(help="Rate of each host's link.")] = "1Gbit",
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
    parts: PartsFolder = None,
    only: Annotated[
        int | None, typer.Option(min=1, max=2, help="Number of the case, 1 or 2. Each workload has two.")
    ] = None,
) -> None:
    """Train every job with every side on an emulated cluster."""
    if compute not in ("timed", "quota"):
        raise ConfigurationError(f"--compute {compute} is neither timed nor quota.")
    names = workloads.split(",")
    chosen = slice(None) if only is None else slice(only - 1, only)
    jobs = [
        Job(name, case, steps, seed=seed)
        for seed in range(seeds)
        for name in names
        for case in cases(name)[chosen]
    ]
    if quick:
        jobs = [Job(names[-1], Case((1, 3), ideal_s=0.02, samples_per_rank=8), 16)]
    if compute == "quota":
        jobs = [_with_quotas(job) for job in jobs]
    found = [measured(parts, (job, rate), partial(_run, job, rate)) for job in jobs]
    outcomes = [Outcome.of(job, runs) for job, runs in zip(jobs, found, strict=True)]
    result = report(outcomes, cluster_of(jobs[-1], rate), compute, quick)
    conclude(result, report_folder, as_json, draw)


def _run(job: Job, rate: str) -> dict[str, dict[str, Any]]:
    with cluster_of(job, rate) as ranks:
        return ranks.run(train_all, job, job.name)[0]


def cluster_of(job: Job, rate: str) -> ClusterRanks:
    """A host a rank. It gets the job's quota when a side begins; the throttled one's shrinks half-way."""
    words: dict[str, Any] = {"hosts": len(job.case.slowness), "rate": rate}
    if job.quotas is None:
        return ClusterRanks(ClusterSpec.parse(**words))
    lines = [f"after {READY}"]
    lines += [f"0s host{host} cores {100 * cores:g}%" for host, cores in enumerate(job.quotas)]
    if job.case.throttled is not None:
        rank, factor = job.case.throttled
        lines += [f"after {HALF_WAY}", f"0s host{rank} cores {100 * job.quotas[rank] / factor:g}%"]
    lines *= len(SIDES)
    return ClusterRanks(ClusterSpec.parse(**words, cpu="100%"), Scenario.parse("\n".join(lines)))


def _with_quotas(job: Job) -> Job:
    """Return a job with so many samples that a step takes several periods of the kernel's quota."""
    if job.workload not in QUOTA_SAMPLES:
        raise ConfigurationError(f"--compute quota: {job.workload} takes time only. Leave it out.")
    case = replace(job.case, samples_per_rank=QUOTA_SAMPLES[job.workload])
    return replace(job, case=case, quotas=quotas_of(case))


def quotas_of(case: Case) -> tuple[float, ...]:
    """Cores of each host by its speed, `QUOTA_RATIO` of this machine's together and at most one each."""
    speeds = [1 / slowness for slowness in case.slowness]
    fastest = min(1.0, QUOTA_RATIO * (os.cpu_count() or 1) / sum(speeds))
    return tuple(round(fastest * speed, 3) for speed in speeds)
