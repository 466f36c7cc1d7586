"""Measure the bytes on the wire and the time that a step saves by leaving layers out.

    torch            torch's DistributedDataParallel(find_unused_parameters=True), which reduces unused ones, too
    ours-unused      Paceline, the same
    ours-agreed      Paceline with skip_all_reduce_unused_params=True, buckets cut by droppable=
    ours-skip        Paceline with droppable=, each step within `model.skip(...)`: no search

`--case depth`: stochastic depth; block b of B is dropped with probability b / 2B (Huang et al. 2016, linear decay to
1/2), by the same seed on all ranks; a shortcut that changes the shape stays. `--case backbone`: all but the last layer
frozen after wrapping, as a fine-tune does before it thaws them.

Computation is timed (layers sleep), gradients and their traffic are real, on the hosts of an emulated cluster. All
sides live in the same processes, alternate, and drop the same layers in the same steps. Bytes are what the kernel has
counted on this rank's network devices, headers and acknowledgements included.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from paceline.errors import ConfigurationError
from paceline_lab.bench.layer_profile import Profile, default_profile
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator, WrongAnswerError
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import gather
from paceline_lab.bench.sides import wrap
from paceline_lab.bench.timed_model import TimedModel, gradient_bytes
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    ComputeS,
    Hosts,
    Quick,
    Rate,
    ReportFolder,
    Rounds,
    Steps,
)
from paceline_lab.experiments.runner import cluster_or_loopback, conclude, train_in_turn
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.look import look_of
from paceline_lab.report.panels import Bars, bars_of
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, slowest_rank

SIDES = ("torch", "ours-unused", "ours-agreed", "ours-skip")
WARM_UP_STEPS = 3
LAST_SURVIVAL = 0.5
TARGET_TO_TORCH = 1.0
TOLERANCE = 1e-6  # relative, of the gradients' mean
_BLOCK = re.compile(r"(\d+)\.body\.")  # a residual branch of ResNet's


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    case: str
    profile: Profile
    num_rounds: int
    num_steps: int  # of a turn
    scale: float


class Droppable(nn.Module):
    """The profile's layers, in blocks of which a forward leaves some out; or behind a frozen backbone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.timed = TimedModel(config.profile, dist.get_rank(), config.scale)
        layers: list[Any] = list(self.timed)
        names = [layer.name for layer in config.profile.layers]
        if config.case == "depth":
            found = [_BLOCK.match(name) for name in names]
            keys = [match and f"block {match[1]}" for match in found]
        else:
            keys = ["backbone"] * (len(names) - 1) + [None]
        self.parts = [(key, layer) for key, layer in zip(keys, layers, strict=True)]
        self.units = {key: [one for other, one in self.parts if other == key] for key in keys if key}

    def forward(self, x: Tensor, dropped: Sequence[str]) -> Tensor:
        """Return `x`, later."""
        for key, layer in self.parts:
            if key not in dropped:
                x = layer(x)
        return x


class Trainee:
    """One side."""

    def __init__(self, name: str, config: Config) -> None:
        self.name, self.case = name, config.case
        self.module = Droppable(config)
        units = list(self.module.units.values())
        options: dict[str, dict[str, Any]] = {
            "torch": {"find_unused_parameters": True},
            "ours-unused": {"find_unused_parameters": True},
            "ours-agreed": {"skip_all_reduce_unused_params": True, "droppable": units},
            "ours-skip": {"droppable": units},
        }
        self.model: Any = wrap(name.partition("-")[0], self.module, init_sync=False, **options[name])
        self.num_begun = 0
        self.step_s: list[float] = []
        self.sent_bytes: list[int] = []  # a step, of each turn
        self.dropped_ratio: list[float] = []  # of the gradients' bytes
        self._is_frozen = False

    def turn(self, num_steps: int, timed: bool = True) -> None:
        """Train some consecutive steps. Collective."""
        self._freeze(self.case == "backbone")
        dist.barrier()
        before, began_s = sent_bytes(), time.perf_counter()
        for _ in range(num_steps):
            self._step(self._draw())
        ended_s = time.perf_counter()
        if timed:
            self.step_s.append((ended_s - began_s) / num_steps)
            self.sent_bytes.append((sent_bytes() - before) // num_steps)

    def _draw(self) -> list[str]:
        self.num_begun += 1
        keys = list(self.module.units)
        if self.case == "backbone":
            return []
        source = random.Random(f"depth {self.num_begun}")
        survivals = [1 - (place + 1) / len(keys) * (1 - LAST_SURVIVAL) for place in range(len(keys))]
        return [key for key, survival in zip(keys, survivals, strict=True) if source.random() >= survival]

    def _step(self, dropped: Sequence[str]) -> None:
        left_out = list(self.module.units) if self._is_frozen else list(dropped)
        self.dropped_ratio.append(_num_elements(self.module, left_out) / _num_elements(self.module))
        self.model.zero_grad(set_to_none=True)
        with self._skip(left_out):
            x = torch.zeros(1, requires_grad=not self._is_frozen)  # frozen layers have no backward then
            self.model(x, dropped).sum().backward()

    def _skip(self, keys: Sequence[str]) -> AbstractContextManager[None]:
        if self.name != "ours-skip":
            return nullcontext()
        result: AbstractContextManager[None] = self.model.skip([self.module.units[key] for key in keys])
        return result

    def _freeze(self, is_frozen: bool) -> None:
        self._is_frozen = is_frozen
        for layers in self.module.units.values() if self.case == "backbone" else ():
            for layer in layers:
                layer.requires_grad_(not is_frozen)

    def error_of_whole_step(self) -> float:
        """Return how far a step of all layers is from the mean over ranks. Collective."""
        self._freeze(False)
        self._step([])
        gradients = [p.grad for p in self.module.timed.parameters() if p.grad is not None]
        return self.module.timed.expected_error(gradients, dist.get_world_size())


def _num_elements(module: Droppable, keys: Sequence[str] | None = None) -> int:
    layers = [layer for key, layer in module.parts if keys is None or key in keys]
    return sum(p.numel() for layer in layers for p in layer.parameters())


def sent_bytes() -> int:
    """Bytes that this host's devices have sent, as the kernel counts; those of loopback where there is no other."""
    rows = [line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    sent = {name.strip(): int(numbers.split()[8]) for name, numbers in rows}
    others = sum(count for name, count in sent.items() if name != "lo")
    return others or sent.get("lo", 0)


@dataclass(frozen=True)
class SideOutcome:
    """One side; times of the slowest rank, bytes of the mean one."""

    name: str
    step_s: list[float]
    sent_bytes: list[float]
    dropped_ratio: float
    error: float


def measure(config: Config, tell: TellProgress) -> list[SideOutcome]:
    """Train all sides in turn. Collective; every rank returns the same."""
    trainees = [Trainee(name, config) for name in SIDES]
    for trainee in trainees:
        trainee.turn(WARM_UP_STEPS, timed=False)
    train_in_turn(trainees, config.num_rounds, config.num_steps, tell)
    return [_outcome(trainee) for trainee in trainees]


def _outcome(trainee: Trainee) -> SideOutcome:
    timed = trainee.dropped_ratio[WARM_UP_STEPS:]
    by_rank = gather(trainee.sent_bytes)
    return SideOutcome(
        trainee.name,
        slowest_rank(gather(trainee.step_s)),
        [sum(each) / len(each) for each in zip(*by_rank, strict=True)],
        sum(timed) / len(timed),
        max(gather(trainee.error_of_whole_step())),
    )


def check(outcomes: list[SideOutcome]) -> None:
    """Refuse times of wrong answers, and of sides that did not drop the same."""
    for side in outcomes:
        if not side.error <= TOLERANCE or side.dropped_ratio != outcomes[0].dropped_ratio:
            raise WrongAnswerError(
                f"{side.name}: a step of all layers is {side.error:.2g} away from the mean over the ranks, and it "
                f"dropped {side.dropped_ratio:.4f} of the gradients, {outcomes[0].name} {outcomes[0].dropped_ratio:.4f}"
                ": its times mean nothing."
            )


def report(config: Config, outcomes: list[SideOutcome], place: Any, quick: bool) -> Report:
    """Turn the outcomes into one row a side."""
    steps = {side.name: Summary.of(side.step_s) for side in outcomes}
    sent = {side.name: Summary.of(side.sent_bytes) for side in outcomes}
    first = outcomes[0].name
    rows = [
        (
            name,
            steps[name].text(1e3, 0),
            f"{steps[name].median / steps[first].median:.2f}",
            sent[name].text(1e-6, 1),
            f"{sent[name].median / sent[first].median:.2f}" if sent[first].median else "-",
        )
        for name in steps
    ]
    num_bytes = gradient_bytes(config.profile, config.scale)
    compute_s = config.profile.forward_s + config.profile.backward_s
    dropped = outcomes[0].dropped_ratio
    return Report(
        name=f"skipped_layers-{config.case}-{place.label}" + ("-quick" if quick else ""),
        question="What does a step save that leaves layers out?",
        columns=("side", "step ms", "/ first", "sent MB", "/ first"),
        rows=tuple(rows),
        verdicts=tuple(
            Verdict(
                f"{name}'s step / torch's", steps[name].median / steps[first].median, TARGET_TO_TORCH, "x"
            )
            for name in SIDES[2:]
        ),
        notes=(
            f"{num_bytes / 1e6:.1f} MB of gradients, {compute_s * 1e3:.0f} ms of compute when nothing is dropped",
            f"{dropped:.1%} of the gradients were left out, the same in all sides' steps",
        ),
        config=config,
        summaries={
            "step_s": {name: asdict(step) for name, step in steps.items()},
            "sent_bytes": {name: asdict(each) for name, each in sent.items()},
            "dropped_ratio": dropped,
        },
        samples={side.name: asdict(side) for side in outcomes},
        provenance=collect(place.num_ranks),
    )


def main(
    case: Annotated[
        str, typer.Option(help="Case: depth (stochastic depth) or backbone (a frozen one).")
    ] = "depth",
    workload: str = "resnet50",
    hosts: Hosts = 4,
    rate: Rate = "1Gbit",
    compute_s: ComputeS = 0.45,
    scale: Annotated[float, typer.Option(help="Divisor of the gradients' bytes.")] = 2.0,
    rounds: Rounds = 2,
    steps: Steps = 6,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Compare steps that leave layers out."""
    if case not in ("depth", "backbone"):
        raise ConfigurationError(f"--case {case}: depth or backbone.")
    if quick:
        compute_s, scale, rounds, steps, hosts = 0.02, 64.0, 2, 2, 0
    config = Config(case, default_profile(workload).taking(compute_s), rounds, steps, scale)
    place = cluster_or_loopback(hosts, rate)
    with place as where:
        outcomes = where.run(measure, config, f"skipped layers, {case}", ENVIRONMENTS[Allocator.KEEP])[0]
        check(outcomes)
        result = report(config, outcomes, where, quick)
    conclude(result, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each side's steps and bytes, from a stored report."""
    summaries = record["summaries"]
    times, sent = summaries["step_s"], summaries["sent_bytes"]
    panels = [
        Bars("", "step time, ms", bars_of(times, 1e3)),
        Bars("", "sent in a step, MB", bars_of(sent, 1e-6)),
    ]
    ratio = times["ours-skip"]["median"] / times["torch"]["median"]
    what = "dropped layers" if record["config"]["case"] == "depth" else "a frozen backbone"
    title = f"With {what} a step is {show_ratio(ratio, look_of('torch').name + chr(39) + 's')}"
    return draw_figure(path, title, panels, columns=1)
