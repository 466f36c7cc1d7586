"""Measure whether unequal machines work all the time: steps with equal shares, with `balance="auto"`, and the ideal.

Every rank sleeps for its samples, a third in forward and the rest in backward, by its own speed. So ranks do not
compete for the machine's cores. Gradients, weights, reports and their exchange over Gloo are real. The ideal is
arithmetic: the time at which all ranks would finish together if samples could be divided; it has no communication.

    auto / ideal     median of the steps after the first 20, as measured
    shares / ideal   what the last step's shares would take, by arithmetic: without what the machine adds
    best / ideal     the same loop, given the best shares from the start: what the machine adds to the ideal
    equal / auto     what was gained
    auto / fixed     equal speeds: the same loop with fixed shares, in alternating turns
    cost             processor time that weighing and measuring add to a plain loop's step
    followed         a rank is throttled in mid-run: steps until shares are within a tenth of the new ideal
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel
from paceline.data import Balance, GlobalBatch, GlobalShuffle
from paceline.planning import Speed, best_shares, lower_bound_s, makespan_s
from paceline_lab.bench.protocol import turns
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks, gather
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, PartsFolder, Quick, ReportFolder
from paceline_lab.experiments.runner import conclude, measured
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import CURVE_COLORS
from paceline_lab.report.panels import Line, Lines
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, differences, ratios, slowest_rank

NAME = "unequal"
SLEEPING, IDLE = "sleeping", "idle"
EQUAL, BEST, AUTO, FIXED, PLAIN = "equal", "best", "auto", "fixed", "plain"
LEARNING_STEPS = 20  # the goal: near the ideal after so many
TARGET_IDEAL, TARGET_COST, TARGET_FOLLOWED = 1.05, 1.01, 10.0
NEAR = 1.1
TYPICAL_STEP_S = 0.1


@dataclass(frozen=True)
class Case:
    """A set of ranks with their speeds.

    Attributes:
        slowness: Time per sample of each rank, relative to the fastest.
        fixed_s: Fixed time of every rank's step.
        ideal_s: Approximate time of an ideal step; the time per sample follows.
        samples_per_rank: Samples of a rank with equal shares.
        throttled: Rank that gets slower in the middle of the run, and how many times; None: no rank does.
    """

    slowness: tuple[float, ...]
    fixed_s: float = 0.0
    ideal_s: float = 0.3
    samples_per_rank: int = 32
    throttled: tuple[int, float] | None = None

    @property
    def name(self) -> str:
        words = ":".join(f"{each:g}" for each in self.slowness)
        if self.fixed_s:
            words += f", fixed {self.fixed_s / self.ideal_s:.0%}"
        return words + (f", rank {self.throttled[0]} x {self.throttled[1]:g}" if self.throttled else "")

    @property
    def size(self) -> int:
        return self.samples_per_rank * len(self.slowness)

    def speeds(self) -> list[Speed]:
        if not self.ideal_s:
            return [Speed(0.0, 0.0)] * len(self.slowness)
        one_s = (self.ideal_s - self.fixed_s) * sum(1 / each for each in self.slowness) / self.size
        return [Speed(self.fixed_s, one_s * each) for each in self.slowness]


CASES = (
    Case((1, 2)),
    Case((1, 8)),
    Case((1, 8), fixed_s=0.1),
    Case((1, 1, 2, 2)),
    Case((1, 1, 2, 2, 4, 4, 8, 8), ideal_s=0.6),
    Case((1, 1, 1, 1), throttled=(2, 3.0)),
)


@dataclass(frozen=True)
class Config:
    """The settings of a measurement.

    Attributes:
        cases: Cases of unequal ranks.
        num_steps: Steps of each run.
        cost_ranks: Number of equal ranks on which the cost is measured.
        num_rounds: Rounds of the cost's turns.
        steps_per_turn: Steps of each of these turns.
    """

    cases: tuple[Case, ...]
    num_steps: int
    cost_ranks: int
    num_rounds: int
    steps_per_turn: int


class _Sleep(torch.autograd.Function):
    """The identity, whose backward takes `seconds`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


sleep_in_backward: Any = _Sleep.apply


class Slow(nn.Module):
    """A small network that takes as long for n samples as `speed` says."""

    def __init__(self, speed: Speed) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.speed = speed
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.speed.step_s(len(x))
        time.sleep(seconds / 3)
        output: Tensor = self.layers(sleep_in_backward(x.requires_grad_(), seconds * 2 / 3))
        return output


class Training:
    """One side: its own model, sampler and loop, step by step."""

    def __init__(self, side: str, case: Case, num_steps: int) -> None:
        data = TensorDataset(torch.randn(case.size * (num_steps + 1), 64))
        batch = GlobalBatch((case.samples_per_rank,) * len(case.slowness))
        if side == BEST:
            batch = GlobalBatch(best_shares(case.speeds(), case.size))
        self.network = Slow(case.speeds()[dist.get_rank()])
        self.shuffle = GlobalShuffle(data, batch)
        arguments: dict[str, Any] = {} if side == PLAIN else {"batch_sampler": self.shuffle}
        if side == AUTO:
            # Steps of no duration are to be measured, and not to be improved.
            arguments["balance"] = "auto" if case.ideal_s else Balance(gain_ratio=0.99)
        self.model = DistributedDataParallel(self.network, **arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._steps = iter(self.shuffle.steps(DataLoader(data, batch_sampler=self.shuffle)))
        self._is_plain = side == PLAIN

    def step(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Train a step; how long it took by `clock`, in seconds."""
        began_s = clock()
        batches = next(self._steps)
        if self._is_plain:
            for (x,) in batches:
                self.model(x).square().mean().backward()
        else:
            with self.model.accumulate(batches) as micro_batches:
                for (x,) in micro_batches:
                    self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return clock() - began_s

    @property
    def samples(self) -> tuple[int, ...]:
        """Return the samples of each rank in the last step."""
        assert self.shuffle.step is not None
        return self.shuffle.step.samples


@dataclass(frozen=True)
class Run:
    """One case.

    Attributes:
        case: Case of the run.
        step_s: Time of each step, by side.
        ideal_s: Ideal time of each step.
        shares_s: Time of each balanced step's shares on a machine without overhead.
        report: Report of the balancing.
    """

    case: Case
    step_s: dict[str, list[float]]
    ideal_s: list[float]
    shares_s: list[float]
    report: dict[str, Any]

    def ratio_to_ideal(self) -> list[float]:
        return ratios(self.step_s[AUTO], self.ideal_s)

    @property
    def throttled_at(self) -> int:
        return len(self.ideal_s) // 2

    def followed_after(self) -> int:
        """Steps after the throttling until the shares of all further steps are near the ideal."""
        after = ratios(self.shares_s, self.ideal_s)[self.throttled_at :]
        return max((place + 1 for place, ratio in enumerate(after) if ratio > NEAR), default=0)


def measure(work: tuple[Case, int], tell: TellProgress) -> Run:
    """Equal shares, then balanced ones. Collective; every rank returns the same."""
    case, num_steps = work
    step_s: dict[str, list[float]] = {}
    ideal: list[float] = []
    shares: list[float] = []
    report: dict[str, Any] = {}
    for side in (EQUAL, BEST, AUTO):
        training, mine = Training(side, case, num_steps), []
        speeds = case.speeds()
        ideal, shares = [], []
        for place in range(num_steps if side == AUTO else max(num_steps // 4, 3)):
            if case.throttled is not None and side == AUTO and place == num_steps // 2:
                rank, factor = case.throttled
                speeds[rank] = speeds[rank].times(factor)
                training.network.speed = speeds[dist.get_rank()]
            ideal.append(lower_bound_s(speeds, case.size))
            mine.append(training.step())
            shares.append(makespan_s(speeds, training.samples))
            tell((len(step_s) + place / num_steps) / 3)
        step_s[side] = slowest_rank(gather(mine))
        report = training.model.balance_report()
    return Run(case, step_s, ideal, shares, report)


def measure_cost(config: Config, tell: TellProgress) -> dict[str, dict[str, list[float]]]:
    """Equal ranks, in turns: with computing, and without, so that only the cost is left. Collective."""
    slowness = (1.0,) * config.cost_ranks
    return {
        SLEEPING: _alternate(config, Case(slowness), (FIXED, AUTO), 1),
        IDLE: _alternate(config, Case(slowness, ideal_s=0.0), (PLAIN, FIXED, AUTO), 10),
    }


def _alternate(config: Config, case: Case, sides: Sequence[str], times_more: int) -> dict[str, list[float]]:
    schedule = list(turns(len(sides), config.num_rounds))
    num_steps = config.steps_per_turn * times_more
    trainings = [Training(side, case, LEARNING_STEPS + num_steps * 2 * config.num_rounds) for side in sides]
    for training in trainings:
        for _ in range(LEARNING_STEPS // 2):
            training.step()
    # Without computing processor time counts, which the machine's load does not lengthen.
    clock = time.perf_counter if case.ideal_s else time.process_time
    times: list[list[float]] = [[] for _ in sides]
    for turn in schedule:
        times[turn.side_index] += [trainings[turn.side_index].step(clock) for _ in range(num_steps)]
    everyone = gather(times)
    return {side: slowest_rank([mine[at] for mine in everyone]) for at, side in enumerate(sides)}


def report(
    runs: Sequence[Run],
    cost: dict[str, dict[str, list[float]]],
    config: Config,
    quick: bool,
) -> Report:
    """A row for each case."""
    rows, verdicts, summaries = [], [], []
    for run in runs:
        is_throttled = run.case.throttled is not None
        late = run.ratio_to_ideal()[LEARNING_STEPS:]
        settled = Summary.of(late[len(late) // 2 :] if is_throttled else late or run.ratio_to_ideal())
        gain = Summary.of(run.step_s[EQUAL]).median / Summary.of(run.step_s[AUTO][-len(late) :]).median
        equal = Summary.of(run.step_s[EQUAL]).median / run.ideal_s[0]
        best = Summary.of(run.step_s[BEST]).median / run.ideal_s[0]
        shares = ratios(run.shares_s, run.ideal_s)[-1]
        verdicts.append(Verdict(f"{run.case.name}: shares / ideal", shares, TARGET_IDEAL, "x"))
        verdicts.append(Verdict(f"{run.case.name}: auto / ideal", settled.median, TARGET_IDEAL, "x"))
        followed = run.followed_after() if is_throttled else None
        if followed is not None:
            verdicts.append(Verdict(f"{run.case.name}: followed", followed, TARGET_FOLLOWED, "steps"))
        rows.append(
            (
                run.case.name,
                str(len(run.case.slowness)),
                f"{equal:.2f}",
                f"{shares:.3f}",
                f"{best:.3f}",
                f"{settled.median:.3f}",
                "-" if is_throttled else f"{gain:.2f}",
                " ".join(map(str, run.report["samples"])),
                "-" if followed is None else str(followed),
            )
        )
        summaries.append(
            {
                "case": run.case.name,
                "num_ranks": len(run.case.slowness),
                "equal_to_ideal": equal,
                "best_to_ideal": best,
                "shares_to_ideal": shares,
                "auto_to_ideal": settled.median,
                "gain": None if is_throttled else gain,
                "samples": run.report["samples"],
                "followed_after": followed,
            }
        )
    ratio = Summary.of(ratios(*(_rounds(cost[SLEEPING][side], config) for side in (AUTO, FIXED))))
    verdicts.append(Verdict("equal speeds: auto / fixed", ratio.median, TARGET_COST, "x"))
    idle = {side: _rounds(steps, config) for side, steps in cost[IDLE].items()}
    costs = {"auto_to_fixed": ratio.median}
    for side in (FIXED, PLAIN):
        extra_s = Summary.of(differences(idle[AUTO], idle[side])).median
        costs[f"auto_minus_{side}_ms"] = 1e3 * extra_s
    share = costs["auto_minus_plain_ms"] / 1e3 / TYPICAL_STEP_S
    verdicts.append(Verdict(f"weighing and measuring, of a step of {TYPICAL_STEP_S:g} s", share, 0.01, "x"))
    return Report(
        name=NAME + ("-quick" if quick else ""),
        question="Do unequal machines work all the time?",
        columns=(
            "slowness",
            "ranks",
            "equal / ideal",
            "shares / ideal",
            "best / ideal",
            "auto / ideal",
            "equal / auto",
            "samples",
            "followed after",
        ),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=(
            "computation sleeps; gradients, weights and reports are real, over Gloo on loopback",
            f"auto / ideal: median of the steps after {LEARNING_STEPS}; where a rank is throttled, of the last quarter",
            f"a balanced step uses {costs['auto_minus_fixed_ms']:.2f} ms of a processor more than a fixed one",
            f"and {costs['auto_minus_plain_ms']:.2f} ms more than in a plain loop ({config.cost_ranks} ranks)",
        ),
        config=config,
        summaries={"cases": summaries, "cost": costs},
        samples={
            "cases": [
                {
                    "case": run.case.name,
                    "step_s": run.step_s,
                    "ideal_s": run.ideal_s,
                    "shares_s": run.shares_s,
                }
                for run in runs
            ],
            "cost_s": cost,
        },
        provenance=collect(max(len(run.case.slowness) for run in runs)),
    )


def _rounds(steps_s: Sequence[float], config: Config) -> list[float]:
    size = len(steps_s) // config.num_rounds
    return [Summary.of(steps_s[at : at + size]).median for at in range(0, len(steps_s), size)]


def main(
    steps: Annotated[int, typer.Option(min=24, help="Number of steps of each run.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds in which the cost is measured.")] = 6,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
    parts: PartsFolder = None,
) -> None:
    """Run all cases, then the cost with equal speeds."""
    config = Config(CASES, steps, 2, rounds, 5)
    if quick:
        case = Case((1, 4), ideal_s=0.02)
        config = Config((case,), 24, 2, 1, 2)
    steps_each = config.num_steps
    runs = [
        measured(parts, (case, steps_each), partial(_run_case, case, steps_each)) for case in config.cases
    ]
    cost = measured(parts, (config.cost_ranks, config.num_rounds), partial(_run_cost, config))
    result = report(runs, cost, config, quick)
    conclude(result, report_folder, as_json, draw)


def _run_case(case: Case, num_steps: int) -> Run:
    return LoopbackRanks(len(case.slowness)).run(measure, (case, num_steps), case.name)[0]


def _run_cost(config: Config) -> dict[str, dict[str, list[float]]]:
    return LoopbackRanks(config.cost_ranks).run(measure_cost, config, "cost")[0]


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each case's steps as multiples of its ideal, from a stored report."""
    lines = []
    for i, run in enumerate(record["samples"]["cases"]):
        ratios = [
            step_s / ideal_s for step_s, ideal_s in zip(run["step_s"][AUTO], run["ideal_s"], strict=True)
        ]
        color = CURVE_COLORS[i % len(CURVE_COLORS)]
        lines.append(Line(run["case"], list(enumerate(ratios, 1)), color, marker=""))
    axes = Lines(
        "", "step", "multiple of the ideal", lines, top=3.0, levels={"5 % above the ideal": TARGET_IDEAL}
    )
    return draw_figure(path, 'balance="auto" brings steps of unequal ranks to the ideal', [axes])
