"""How much shorter is a step whose gradients the next forward hides as well?

    torch            torch's DistributedDataParallel: backward hides communication
    ours             ours, the same
    ours-forward     ours with overlap_forward, the optimizer through paceline.optim.overlap

Computation is timed (layers sleep: any number of ranks fits on a few cores), gradients and their traffic are real, on
the hosts of an emulated cluster. All sides live in the same processes and alternate.

A turn is several consecutive steps without a barrier between them, from a barrier until the last gradient has arrived
and the last parameter has been stepped: what is put off into the next step is paid for by the last one (the drain). The
step in the steady state is the median of the times from one step's beginning to the next one's.

`least` is what no order of sending goes below (`planning.forward_overlap.least_step_s`), `least without` the same if
backward alone hides communication, both at the link's rate less headers (5 %) and with a ring's bytes, 2 (P-1)/P.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn

from benchmarks.options import RESULTS_FOLDER, AsJson, Quick, ResultsFolder, run_cli
from paceline.errors import ConfigurationError
from paceline.lab.bench.layer_profile import Profile, default_profile
from paceline.lab.bench.limit import ring_bytes_per_rank
from paceline.lab.bench.protocol import ENVIRONMENTS, Allocator, WrongAnswerError, turns
from paceline.lab.bench.provenance import collect, load_average
from paceline.lab.bench.rank_program import TellProgress
from paceline.lab.bench.ranks import choose_place, gather
from paceline.lab.bench.sides import digest, wrap
from paceline.lab.bench.timed_model import TimedModel, gradient_bytes
from paceline.lab.report.figures import draw_figure, show_ratio
from paceline.lab.report.look import look_of
from paceline.lab.report.panels import Bars, bars_of
from paceline.lab.report.publication import Report, Verdict, figure_path, publish
from paceline.lab.report.summary import Summary, slowest_rank
from paceline.optim import overlap
from paceline.planning.forward_overlap import Layer, least_step_s, step_without_s

WARM_UP_STEPS = 8  # three before the ranks agree on an order, three before they do so again, two with it
UNDECIDED_STEPS = 8
FORWARD = "ours-forward"
PAYLOAD_RATIO = 0.95
TARGET_TO_TORCH = 0.82
TARGET_TO_LEAST = 1.05
TOLERANCE = 1e-6  # relative, of the gradients' mean: rounding in another order of sums


@dataclass(frozen=True)
class Config:
    """What is measured."""

    profile: Profile
    side_names: tuple[str, ...]
    num_rounds: int
    num_steps: int  # of a turn
    scale: float
    is_forced: bool
    slow_rank_ratio: float = 1.0  # how much longer the last rank computes


class ProportionalSleep(torch.optim.Optimizer):
    """Takes as long as the share of the parameters that it is given, and changes nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], step_s: float) -> None:
        super().__init__(parameters, {})
        self.step_s = step_s
        self.num_elements = sum(p.numel() for group in self.param_groups for p in group["params"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        mine = sum(p.numel() for group in self.param_groups for p in group["params"])
        time.sleep(self.step_s * mine / self.num_elements)


class Trainee:
    """One side."""

    def __init__(self, name: str, config: Config) -> None:
        self.module = TimedModel(config.profile, dist.get_rank(), config.scale)
        if dist.get_rank() == dist.get_world_size() - 1:
            layers: Any = self.module
            for layer in layers:
                layer.forward_s *= config.slow_rank_ratio
                layer.backward_s *= config.slow_rank_ratio
        if name == FORWARD:
            how: dict[str, Any] = {"overlap_forward": "always" if config.is_forced else True}
            self.model: Any = wrap("ours", self.module, **how)
        else:
            self.model = wrap(name, self.module, init_sync=False)  # parameters are never read
        self.optimizer = ProportionalSleep(self.model.parameters(), config.profile.optimizer_s)
        if name == FORWARD:
            self.optimizer = overlap(self.optimizer, self.model, per_parameter=True)
        self.is_forced = config.is_forced
        self.steady_s: list[float] = []
        self.turn_s: list[float] = []  # of each turn, divided by its steps
        self.backward_s: list[float] = []

    def turn(self, num_steps: int, timed: bool = True) -> None:
        """Train some steps, and wait for everything. Collective."""
        dist.barrier()
        beginnings_s = []
        backward_s = []
        for _ in range(num_steps):
            beginnings_s.append(time.perf_counter())
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.model(torch.zeros(1, requires_grad=True)).sum()
            before_s = time.perf_counter()
            loss.backward()
            backward_s.append(time.perf_counter() - before_s)
            self.optimizer.step()
        self.settle()
        ended_s = time.perf_counter()
        if timed:
            self.steady_s += [b - a for a, b in itertools.pairwise(beginnings_s)]
            self.turn_s.append((ended_s - beginnings_s[0]) / num_steps)
            self.backward_s += backward_s

    def warm_up(self) -> None:
        """Train until nothing changes any more: forward overlap proves its gain first. Collective."""
        self.turn(WARM_UP_STEPS, timed=False)
        while self.is_undecided:
            self.turn(UNDECIDED_STEPS, timed=False)

    @property
    def is_undecided(self) -> bool:
        overlapped = getattr(self.model, "forward_overlap", None)
        if overlapped is None or overlapped.is_on is False or self.is_forced:
            return False
        return overlapped.is_on is None or overlapped.seen is None

    def settle(self) -> None:
        """Wait for what is under way."""
        if hasattr(self.model, "settle"):
            self.model.settle()

    def gradients(self) -> list[torch.Tensor]:
        """One more backward's. Collective."""
        self.optimizer.zero_grad(set_to_none=True)
        self.model(torch.zeros(1, requires_grad=True)).sum().backward()
        self.settle()
        return [p.grad for p in self.module.parameters() if p.grad is not None]


@dataclass(frozen=True)
class SideOutcome:
    """One side; lists are of the slowest rank."""

    name: str
    steady_s: list[float]
    turn_s: list[float]
    backward_s: list[float]
    is_on: bool | None
    predicted: dict[str, float] | None
    seen: dict[str, float] | None
    error: float
    ranks_equal: bool


def measure(config: Config, tell: TellProgress) -> list[SideOutcome]:
    """Train all sides in turn. Collective; every rank returns the same."""
    trainees = [Trainee(name, config) for name in config.side_names]
    for trainee in trainees:
        trainee.warm_up()
    schedule = list(turns(len(trainees), config.num_rounds))
    for num_done, turn in enumerate(schedule):
        trainees[turn.side_index].turn(config.num_steps)
        tell((num_done + 1) / len(schedule))
    return [_outcome(name, trainee) for name, trainee in zip(config.side_names, trainees, strict=True)]


def _outcome(name: str, trainee: Trainee) -> SideOutcome:
    gradients = trainee.gradients()
    error = max(gather(trainee.module.expected_error(gradients, dist.get_world_size())))
    overlapped = getattr(trainee.model, "forward_overlap", None)
    return SideOutcome(
        name,
        _slowest(trainee.steady_s),
        _slowest(trainee.turn_s),
        _slowest(trainee.backward_s),
        None if overlapped is None else overlapped.is_on,
        None if overlapped is None or overlapped.gain is None else asdict(overlapped.gain),
        None if overlapped is None or overlapped.seen is None else asdict(overlapped.seen),
        error,
        len(set(gather(digest(gradients)))) == 1,
    )


def _slowest(mine: list[float]) -> list[float]:
    return slowest_rank(gather(mine))


def check(outcomes: list[SideOutcome]) -> None:
    """Refuse times of wrong answers."""
    for side in outcomes:
        if not (side.ranks_equal and side.error <= TOLERANCE):
            raise WrongAnswerError(
                f"the gradients of {side.name} are {side.error:.2g} away from the mean over the ranks, and the ranks' "
                f"{'are equal' if side.ranks_equal else 'differ'}: its times mean nothing."
            )


def report(
    config: Config, outcomes: list[SideOutcome], place: Any, load_before: float, quick: bool
) -> Report:
    """Turn the outcomes into one row a side."""
    profile = config.profile
    rate = place.rate_bytes_per_s
    num_bytes = gradient_bytes(profile, config.scale)
    least_s = without_s = None
    if rate is not None:
        reduced_per_s = PAYLOAD_RATIO * rate * num_bytes / ring_bytes_per_rank(place.num_ranks, num_bytes)
        layers = _layers(config)
        least_s = least_step_s(layers, profile.optimizer_s, reduced_per_s)
        without_s = step_without_s(layers, profile.optimizer_s, reduced_per_s)
    first = Summary.of(outcomes[0].steady_s).median
    first_turn = Summary.of(outcomes[0].turn_s).median
    rows, verdicts, summaries = [], [], {}
    for side in outcomes:
        steady, turn = Summary.of(side.steady_s), Summary.of(side.turn_s)
        summaries[side.name] = {"steady_s": asdict(steady), "turn_s": asdict(turn)}
        rows.append(
            (
                side.name,
                steady.text(1e3, 0),
                f"{steady.median / first:.2f}",
                turn.text(1e3, 0),
                f"{turn.median / first_turn:.2f}",
                "-" if least_s is None else f"{steady.median / least_s:.3f}",
                "-" if side.is_on is None else ("on" if side.is_on else "off"),
            )
        )
        if side.name == FORWARD:
            verdicts.append(
                Verdict(f"step / {outcomes[0].name}'s", steady.median / first, TARGET_TO_TORCH, "x")
            )
            if least_s is not None:
                verdicts.append(Verdict("step / least", steady.median / least_s, TARGET_TO_LEAST, "x"))
    compute_s = profile.forward_s + profile.backward_s
    name = f"forward_overlap-{profile.workload}-{place.label}"
    what = (
        f"{num_bytes / 1e6:.1f} MB of gradients, {compute_s * 1e3:.0f} ms of compute, "
        f"{profile.optimizer_s * 1e3:.0f} ms of optimizer; {config.num_steps} consecutive steps a turn"
    )
    notes = [
        what,
        "computation sleeps; gradients and traffic are real; no side has a barrier within a turn",
    ]
    if least_s is not None and without_s is not None:
        notes.append(f"least {least_s * 1e3:.0f} ms, least without forward overlap {without_s * 1e3:.0f} ms")
    for side in outcomes:
        for what, gain in (("predicted, without the optimizer", side.predicted), ("seen", side.seen)):
            if gain is not None:
                with_ms, without_ms = gain["with_s"] * 1e3, gain["without_s"] * 1e3
                notes.append(
                    f"{side.name} {what}: {with_ms:.0f} ms a step, {without_ms:.0f} ms without overlap"
                )
    return Report(
        name=name + ("-quick" if quick else ""),
        question="How much shorter is a step whose gradients the next forward hides as well?",
        columns=("side", "step ms", "/ first", "with drain ms", "/ first", "/ least", "overlap"),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=tuple(notes),
        config=config,
        summaries={"sides": summaries, "least_s": least_s, "least_without_s": without_s},
        samples={side.name: asdict(side) for side in outcomes},
        provenance=collect(place.num_ranks, load_before),
    )


def _layers(config: Config) -> list[Layer]:
    profile = config.profile
    slow = max(1.0, config.slow_rank_ratio)
    return [
        Layer(
            layer.forward_s * slow,
            layer.backward_s * slow,
            gradient_bytes(Profile(profile.workload, "", (layer,), 0.0), config.scale),
        )
        for layer in profile.layers
    ]


def main(
    workload: str = "resnet50",
    sides: Annotated[str, typer.Option(help="Comma-separated: torch, ours, ours-forward.")] = (
        "torch,ours,ours-forward"
    ),
    hosts: Annotated[int | None, typer.Option(help="Of an emulated cluster; 0: two ranks on loopback.")] = 4,
    rate: Annotated[str, typer.Option(help="Of each host's link.")] = "1Gbit",
    compute_s: Annotated[float, typer.Option(help="Forward and backward together.")] = 0.9,
    scale: Annotated[float, typer.Option(help="Divides the gradients' bytes.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=2, help="Every side has two turns in each.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Consecutive steps of a turn.")] = 8,
    always: Annotated[bool, typer.Option("--always", help="Overlap without asking whether it pays.")] = False,
    slow_rank: Annotated[float, typer.Option(help="How much longer the last rank computes.")] = 1.0,
    quick: Quick = False,
    as_json: AsJson = False,
    results_folder: ResultsFolder = RESULTS_FOLDER,
) -> None:
    """Compare steps with and without forward overlap."""
    names = tuple(name.strip() for name in sides.split(","))
    if unknown := set(names) - {"torch", "ours", FORWARD}:
        raise ConfigurationError(f"--sides: no side called {unknown}. There are torch, ours and {FORWARD}.")
    if quick:
        compute_s, scale, rounds, steps, always, hosts = 0.02, 64.0, 2, 2, True, 0
    config = Config(
        default_profile(workload).taking(compute_s), names, rounds, steps, scale, always, slow_rank
    )
    place = choose_place(None, 2) if not hosts else choose_place(hosts, None, rate=rate)
    load_before = load_average()
    with place as where:
        outcomes = where.run(measure, config, f"forward overlap, {workload}", ENVIRONMENTS[Allocator.KEEP])[0]
        check(outcomes)
        result = report(config, outcomes, where, load_before, quick)
    publish(result, results_folder, as_json)
    draw(result.record(), figure_path(result, results_folder))


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each side's steps and the least that is possible, from a stored report."""
    summaries = record["summaries"]
    steps = {side: Summary(**found["steady_s"]) for side, found in summaries["sides"].items()}
    first, best = next(iter(steps)), min(steps, key=lambda side: steps[side].median)
    marks = (
        {} if summaries["least_s"] is None else {"no order of pieces goes below": 1e3 * summaries["least_s"]}
    )
    panel = Bars("", "a step, ms", bars_of({side: asdict(step) for side, step in steps.items()}, 1e3), marks)
    words = show_ratio(steps[best].median / steps[first].median, f"{look_of(first).name}'s")
    note = "; ".join(record["notes"][:2])
    return draw_figure(path, f"A step of {look_of(best).name} is {words}", [panel], note)


if __name__ == "__main__":
    run_cli(main)
