"""Measure steps of a model under `torch.compile`, by what is compiled, beside torch's class.

The name of a side has its class and what is compiled. Without a further word that is nothing.

    around         the wrapper
    inside         the module, before it is wrapped
    whole step     forward, loss and backward together

All sides train the same model on the same batches, in turn, in the same processes. A turn is several steps behind a
barrier. Dynamo counts graphs and breaks on rank 0 while a side is compiled alone. In the turns equal graphs are shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel
from paceline.optim import overlap
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator, WrongAnswerError
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import Ranks, choose_place, gather
from paceline_lab.bench.sides import SEED, digest
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Hosts, Quick, Rate, ReportFolder, Rounds
from paceline_lab.experiments.runner import conclude, refuse_unequal, train_in_turn
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, OURS
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.publication import Report
from paceline_lab.report.summary import Summary, slowest_rank
from paceline_lab.workloads import make_workload

TORCH, OURS_PLAIN, OURS_AROUND = "torch", "paceline", "paceline, around"
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"compression": "bf16"},
    "overlap_forward": {"overlap_forward": "always"},
}
SIDES = (
    TORCH,
    "torch, around",
    "torch, inside",
    OURS_PLAIN,
    OURS_AROUND,
    "paceline, inside",
    "paceline, whole step",
    "paceline, bf16",
    "paceline, bf16, around",
    "paceline, overlap_forward",
    "paceline, overlap_forward, around",
)
WARM_UP_STEPS, NUM_BATCHES = 3, 4
CLOSE = 1e-4  # of the loss: a compiler rounds in another order


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    workload: str
    steps_per_turn: int
    quick: bool


@dataclass(frozen=True)
class Counts:
    """The graphs and breaks of one side's first steps, and their last loss."""

    num_graphs: int
    num_breaks: int
    loss: float


@dataclass(frozen=True)
class Found:
    """The times and counts of one side; the same on every rank."""

    step_s: list[float]  # of the slowest rank
    counts: Counts  # rank 0's
    are_equal: bool  # bitwise, the parameters of all ranks


class Trainee:
    """One side, and how it trains a step."""

    def __init__(self, side: str, config: Config) -> None:
        name, *words = side.split(", ")
        self.workload = make_workload(config.workload, config.quick)
        torch.manual_seed(SEED)
        module: Any = self.workload.make_model()
        options = [OPTIONS[word] for word in words if word in OPTIONS]
        if "inside" in words:
            module = torch.compile(module)
        wrap: Any = TorchDDP if name == TORCH else DistributedDataParallel
        wrapped = wrap(module, **(options[0] if options else {}))
        self.model: Any = torch.compile(wrapped) if "around" in words else wrapped
        self.train: Callable[[Any], Tensor] = self._forward_and_backward
        if "whole step" in words:
            self.train = torch.compile(self._forward_and_backward)
        self.wrapped, self.defers = wrapped, "overlap_forward" in words
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        self.optimizer = overlap(optimizer, wrapped) if self.defers else optimizer
        self.batches = [self.workload.make_batch(dist.get_rank(), step) for step in range(NUM_BATCHES)]
        self.step_s: list[float] = []

    def _forward_and_backward(self, batch: Any) -> Tensor:
        loss, _ = self.workload.loss(self.model, batch, None)
        loss.backward()
        return loss

    def warm_up(self) -> float:
        """Train the first steps, and return the last one's loss."""
        return [float(self._step(step).detach()) for step in range(WARM_UP_STEPS)][-1]

    def _step(self, step: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.train(self.batches[step % NUM_BATCHES])
        self.optimizer.step()
        return loss

    def turn(self, num_steps: int) -> None:
        """Train some steps behind a barrier, up to the last parameter. Collective."""
        dist.barrier()
        began_s = time.perf_counter()
        for step in range(num_steps):
            self._step(step)
        if self.defers:
            self.wrapped.flush()
        self.step_s.append((time.perf_counter() - began_s) / num_steps)


def count(side: str, config: Config) -> Counts:
    """Compile a side alone. Collective."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    loss = Trainee(side, config).warm_up()
    return Counts(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), loss)


def measure(arguments: tuple[Config, int], tell: TellProgress) -> dict[str, Found]:
    """Train all sides in turn. Collective; the same on every rank."""
    config, num_rounds = arguments
    torch._dynamo.config.recompile_limit = 8 * len(SIDES)  # each side compiles the same functions again
    counts = {side: count(side, config) for side in SIDES}
    torch._dynamo.reset()
    trainees = {side: Trainee(side, config) for side in SIDES}
    for trainee in trainees.values():
        trainee.warm_up()
    train_in_turn(list(trainees.values()), num_rounds, config.steps_per_turn, tell)
    found = {}
    for side, each in trainees.items():
        digests = gather(digest([p.detach() for p in each.wrapped.parameters()]))
        found[side] = Found(
            slowest_rank(gather(each.step_s)), gather(counts[side])[0], len(set(digests)) == 1
        )
    return found


def report(config: Config, found: dict[str, Found], place: Ranks) -> Report:
    """A row a side."""
    steps = {side: Summary.of(each.step_s) for side, each in found.items()}
    return Report(
        name=f"compiled-{config.workload}-{place.label}" + ("-quick" if config.quick else ""),
        question="How long is a step under torch.compile, by what is compiled?",
        columns=("side", "step ms", "step / torch's", "graphs", "breaks"),
        rows=tuple(
            (
                side,
                steps[side].text(1e3, 1),
                f"{steps[side].median / steps[TORCH].median:.2f}",
                str(each.counts.num_graphs),
                str(each.counts.num_breaks),
            )
            for side, each in found.items()
        ),
        verdicts=(),
        notes=make_workload(config.workload, config.quick).notes(),
        config=config,
        summaries={
            "step_s": {side: asdict(each) for side, each in steps.items()},
            "step_ratios": {side: each.median / steps[TORCH].median for side, each in steps.items()},
            "graphs": {side: each.counts.num_graphs for side, each in found.items()},
            "breaks": {side: each.counts.num_breaks for side, each in found.items()},
        },
        samples={side: asdict(each) for side, each in found.items()},
        provenance=collect(place.num_ranks),
        place=place.describe(),
    )


def main(
    workload: Annotated[str, typer.Option(help="As of `paceline bench workloads`.")] = "transformer",
    hosts: Hosts = 0,
    rate: Rate = "1Gbit",
    rounds: Rounds = 5,
    steps_per_turn: Annotated[int, typer.Option(min=1, help="Number of consecutive steps per turn.")] = 3,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Time steps under torch.compile, on this machine or on hosts of an emulated cluster."""
    if quick:
        hosts, rounds, steps_per_turn = 0, 2, 1
    config = Config(workload, steps_per_turn, quick)
    with choose_place(hosts or None, ranks_per_host=1 if hosts else 2, rate=rate if hosts else None) as place:
        found = place.run(measure, (config, rounds), "compiled steps", ENVIRONMENTS[Allocator.KEEP])[0]
    refuse_unequal(side for side, each in found.items() if not each.are_equal)
    for side, each in found.items():
        expected = found["paceline, bf16" if "bf16" in side else OURS_PLAIN].counts.loss
        if not abs(each.counts.loss - expected) <= CLOSE * abs(expected):
            raise WrongAnswerError(f"{side} came to a loss of {each.counts.loss}, uncompiled to {expected}")
    conclude(report(config, found, place), report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each side's steps, from a stored report."""
    steps = {side: Summary(**found) for side, found in record["summaries"]["step_s"].items()}
    bars = [
        Bar(side, step.times(1e3), BASELINE if side.startswith(TORCH) else OURS)
        for side, step in steps.items()
    ]
    ratio = steps[OURS_AROUND].median / steps[OURS_PLAIN].median
    return draw_figure(
        path,
        f"A compiled wrapper takes {ratio:.2f} of the step that is not compiled",
        [Bars("", "step time, ms", bars)],
        f"{record['config']['workload']}. Medians and quartiles; "
        f"load average {record['provenance']['load_average_before']:.1f}.",
    )
