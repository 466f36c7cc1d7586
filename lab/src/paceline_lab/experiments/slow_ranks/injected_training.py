"""The training in which the doctor is graded: one job of real processes, case after case, recorded as any script is.

Eight layers, three buckets, 72 ms a step. In each case: steps without the injection, steps with it, which are
diagnosed, and steps without it again. What the repair brings is the mean of before and after, so that a machine that
slows down meanwhile takes no side.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.diagnosis import Diagnosis, diagnose
from paceline.diagnosis.step_table import table_of
from paceline.observe.run_folder import begin_run
from paceline.observe.run_reading import Run, read_run
from paceline.recording.our_steps import OurSteps
from paceline.recording.recorder import Recorder, header_of_rank
from paceline.recording.torch_ddp import RecordedTorchDDP
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import gather
from paceline_lab.experiments.slow_ranks.injections import NUM_LAYERS, Busy, Case, Injected

NUM_STEPS, NUM_WITHOUT = 24, 14  # the first four of each do not count
_WIDTH, _BATCH, _TOKENS = 96, 4, 32
_FORWARD_S, _BACKWARD_S, _OPTIMIZER_S, _LOADER_S = 0.002, 0.004, 0.003, 0.003


@dataclass(frozen=True)
class Graded:
    """A case and what came of it.

    Attributes:
        case: What was done.
        culprit: To whom; of a link, its host.
        layer: Where, in backward.
        diagnosis: What was said, as a dictionary.
        step_s: The median step with the injection.
        mean_s: The mean one.
        repaired_s: The median step without it.
        repaired_mean_s: The mean one.
        drift: The median step after the repair over the one before the injection, less 1: what the machine did.
    """

    case: Case
    culprit: int
    layer: str
    diagnosis: Diagnosis
    step_s: float
    mean_s: float
    repaired_s: float
    repaired_mean_s: float
    drift: float


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
    def __init__(self, number: int, busy: Busy, injected: Injected) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self._number, self._busy, self._injected = number, busy, injected

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ratio = self._injected.tokens_ratio
        self._busy(ratio * _FORWARD_S, self._injected.extra_s("forward", self._number))
        slowly: Any = _Slow.apply
        found: torch.Tensor = slowly(torch.relu(self.linear(x)), self._backward)
        return found

    def _backward(self) -> None:
        extra_s = self._injected.extra_s("backward of a layer", self._number)
        self._busy(self._injected.tokens_ratio * _BACKWARD_S, extra_s)


class _Net(nn.Module):
    def __init__(self, busy: Busy, injected: Injected) -> None:
        super().__init__()
        self.words = nn.Embedding(64, _WIDTH)
        self.layers = nn.ModuleList(_Layer(i, busy, injected) for i in range(NUM_LAYERS))

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
    """What one job of ranks trains.

    Attributes:
        cases: One after another.
        keep: Folder in which what was recorded is kept; None: it is removed.
    """

    cases: tuple[Case, ...]
    keep: Path | None = None


def train_cases(training: Training, tell: TellProgress) -> list[Graded]:
    """Run cases one after another. Collective; every rank returns the same."""
    found = []
    for number, case in enumerate(training.cases):
        found.append(_train(case, training.keep))
        tell((number + 1) / len(training.cases))
    return found


def _train(case: Case, keep: Path | None) -> Graded:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    injected = Injected(case, rank, num_ranks)
    busy = Busy(case.seed, rank, case.of.arithmetic_s)
    torch.manual_seed(case.seed)
    net = _Net(busy, injected)
    ddp = paceline.DistributedDataParallel if case.of.wrapper == "paceline" else TorchDDP
    model: Any = ddp(net, bucket_cap_mb=0.075)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    optimizer.register_step_pre_hook(lambda *_: busy(_OPTIMIZER_S, injected.extra_s("optimizer")))
    batches = iter(DataLoader(_Batches(busy, injected, NUM_STEPS + 2 * NUM_WITHOUT), batch_size=None))
    folders = gather(tempfile.mkdtemp(prefix="paceline-doctor-") if rank == 0 else "")
    folder = Path(folders[0])
    try:
        before = _steps(model, optimizer, batches, injected, folder / "before", NUM_WITHOUT)
        injected.begin()
        if case.cause == "buckets too small":
            model = ddp(net, bucket_cap_mb=case.strength)
        run = _steps(model, optimizer, batches, injected, folder / "injected", NUM_STEPS)
        injected.end()
        if case.cause == "buckets too small":
            model = ddp(net, bucket_cap_mb=0.075)
        repaired = _steps(model, optimizer, batches, injected, folder / "repaired", NUM_WITHOUT)
    finally:
        injected.end()
        dist.barrier()
        if rank == 0:
            if keep is not None:
                shutil.copytree(
                    folder, keep / f"{case.cause} {case.strength:g} {case.seed}", dirs_exist_ok=True
                )
            shutil.rmtree(folder)
    steps_s = table_of(run).steps_s
    without_s = [table_of(x).steps_s for x in (before, repaired)]
    culprit, layer = case.culprit(num_ranks), f"layers.{case.layer()}.linear"
    is_layer = case.cause == "backward of a layer"
    return Graded(
        case,
        culprit,
        layer if is_layer else "",
        diagnose(run),
        _median(steps_s),
        sum(steps_s) / len(steps_s),
        sum(map(_median, without_s)) / 2,
        sum(sum(x) / len(x) for x in without_s) / 2,
        _median(without_s[1]) / _median(without_s[0]) - 1,
    )


def _steps(model: Any, optimizer: Any, batches: Any, injected: Injected, folder: Path, num_steps: int) -> Run:
    """Train, recorded into a folder; returns what was recorded."""
    rank = dist.get_rank()
    if rank == 0:
        begin_run(folder, ["study"])
    dist.barrier()
    recorded = None
    if isinstance(model, paceline.DistributedDataParallel):
        recorder = Recorder(header_of_rank(folder, "paceline", "cpu", rank, dist.get_world_size()), folder)
        ours: OurSteps = model._steps.recording
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
    return read_run(folder)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
