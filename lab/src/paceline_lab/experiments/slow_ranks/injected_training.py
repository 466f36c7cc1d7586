"""The training in which the doctor is graded: one job of real processes, case after case, recorded as any script is.

Eight layers, three buckets, 72 ms a step. In each case: steps without the injection, steps with it, which are
diagnosed, and steps without it again. What the repair brings is the mean of before and after, so that a machine that
slows down meanwhile takes no side. A link is slow in its whole job, which records only that.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.observe.run_folder import begin_run
from paceline.recording.recorder import OurSteps, Recorder, header_of_rank
from paceline.recording.torch_ddp import RecordedTorchDDP
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import gather
from paceline_lab.experiments.slow_ranks.injections import Busy, Case, Injected
from paceline_lab.experiments.slow_ranks.records import BEFORE, REPAIRED, SLOW, store

NUM_STEPS, NUM_WITHOUT = 24, 14  # the first four of each do not count
_BATCH, _TOKENS = 4, 32
_USUAL_LAYERS = 8
# Of layers, and a bucket's MiB; on links, wide ones: what a ring sends at once is then longer than the burst of 15 KB
# that an emulated link lets pass unhindered.
_SIZES, _LINKS_SIZES = (96, 0.075), (192, 0.3)
_FORWARD_S, _BACKWARD_S, _OPTIMIZER_S, _LOADER_S = 0.016, 0.032, 0.003, 0.003


class _Slow(torch.autograd.Function):
    """Takes its time in backward, inside its layer."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, work: Any) -> torch.Tensor:
        context.work = work
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.work()
        return gradient.clone(), None


class _Layer(nn.Module):
    def __init__(self, number: int, width: int, busy: Busy, injected: Injected) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self._number, self._busy, self._injected = number, busy, injected
        self._part = 1 / injected.case.of.num_layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ratio = self._injected.tokens_ratio
        self._busy(ratio * self._part * _FORWARD_S, self._injected.extra_s("forward", self._number))
        slowly: Any = _Slow.apply
        found: torch.Tensor = slowly(torch.relu(self.linear(x)), self._backward)
        return found

    def _backward(self) -> None:
        extra_s = self._injected.extra_s("backward of a layer", self._number)
        self._busy(self._injected.tokens_ratio * self._part * _BACKWARD_S, extra_s)


class _Net(nn.Module):
    def __init__(self, width: int, busy: Busy, injected: Injected) -> None:
        super().__init__()
        self.words = nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            _Layer(i, width, busy, injected) for i in range(injected.case.of.num_layers)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(tokens).mean(1)
        for layer in self.layers:
            x = layer(x)
        return x


class _Batches(Dataset[torch.Tensor]):
    """Whole batches, so that their length may change."""

    def __init__(self, busy: Busy, injected: Injected, size: int) -> None:
        self._busy, self._injected, self._size = busy, injected, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        self._busy(_LOADER_S, self._injected.extra_s("loader"))
        return torch.zeros(_BATCH, round(_TOKENS * self._injected.tokens_ratio), dtype=torch.long)


@dataclass(frozen=True)
class Training:
    """The cases of one job of ranks.

    Attributes:
        cases: Cases that run one after another.
        file: File to which each case is written as soon as it has run.
        slow_host: Host whose link is slow in this job; -1: no host. None: one rank is made slow instead.
    """

    cases: tuple[Case, ...]
    file: Path
    slow_host: int | None = None


def train_cases(training: Training, tell: TellProgress) -> None:
    """Run cases one after another; rank 0 stores what all have recorded. Collective."""
    for number, case in enumerate(training.cases):
        _train(case, training)
        tell((number + 1) / len(training.cases))


def _train(case: Case, training: Training) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    injected = Injected(case, rank, num_ranks)
    busy = Busy(case, rank)
    torch.manual_seed(case.seed)
    width, bucket_mib = _SIZES if training.slow_host is None else _LINKS_SIZES
    bucket_mib *= case.of.num_layers / _USUAL_LAYERS  # as many buckets, however many layers
    net = _Net(width, busy, injected)
    ddp = paceline.DistributedDataParallel if case.of.wrapper == "paceline" else TorchDDP
    model: Any = ddp(net, bucket_cap_mb=bucket_mib)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    optimizer.register_step_pre_hook(lambda *_: busy(_OPTIMIZER_S, injected.extra_s("optimizer")))
    batches = iter(DataLoader(_Batches(busy, injected, NUM_STEPS + 2 * NUM_WITHOUT), batch_size=None))
    folders = gather(tempfile.mkdtemp(prefix="paceline-doctor-") if rank == 0 else "")
    folder = Path(folders[0])
    is_of_rank = training.slow_host is None
    try:
        if is_of_rank:
            _steps(model, optimizer, batches, injected, folder / BEFORE, NUM_WITHOUT)
        injected.begin()
        if case.cause == "buckets too small":
            model = ddp(net, bucket_cap_mb=case.strength)
        _steps(model, optimizer, batches, injected, folder / SLOW, NUM_STEPS)
        injected.end()
        if case.cause == "buckets too small":
            model = ddp(net, bucket_cap_mb=bucket_mib)
        if is_of_rank:
            _steps(model, optimizer, batches, injected, folder / REPAIRED, NUM_WITHOUT)
        if rank == 0:
            culprit = case.culprit(num_ranks) if training.slow_host is None else training.slow_host
            layer = f"layers.{case.layer()}.linear" if case.cause == "backward of a layer" else ""
            store(training.file, case, culprit, layer, folder)
    finally:
        injected.end()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)


def _steps(
    model: Any, optimizer: Any, batches: Any, injected: Injected, folder: Path, num_steps: int
) -> None:
    rank = dist.get_rank()
    if rank == 0:
        begin_run(folder, ["study"])
    dist.barrier()
    recorded = None
    if isinstance(model, paceline.DistributedDataParallel):
        recorder = Recorder(header_of_rank(folder, "paceline", "cpu", rank, dist.get_world_size()), folder)
        ours: OurSteps = cast("Any", model.membership.model).recording
        ours.record_by(recorder)
    else:
        header = header_of_rank(folder, "torch", "cpu", rank, dist.get_world_size())
        recorded = RecordedTorchDDP(model, Recorder(header, folder))
    for step in range(num_steps):
        injected.step = step
        injected.between_steps(folder.parent)
        tokens = next(batches)
        optimizer.zero_grad()
        model(tokens).sum().backward()
        optimizer.step()
    if recorded is not None:
        recorded.detach()
    dist.barrier()
