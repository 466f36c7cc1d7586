"""Measure whether `compression="auto"` chooses well, over link rates, against no compression and every fixed codec.

One rank on each host of an emulated cluster. Computation sleeps (`paceline_lab.bench.timed_model`), so that it does not
compete for two cores; gradients, codecs and traffic are real. Two models with about the same bytes of gradients and
different computing: where communication hides behind backward, no codec can pay.

Each side is a model of its own, trained by the same processes in turns of several steps, there and back. Auto has
decided before its first timed turn; what deciding took is reported apart: all its steps from the first one on.
A step is as long as on its slowest rank. Ratios are taken within a round, then summarised.

    regret      auto / the best fixed choice among none and the codecs that auto may choose
    overhead    auto / none

`auto` has its default candidates, `auto-any` chooses among all codecs of the run.
"""

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer

from paceline import quantities
from paceline.errors import ConfigurationError
from paceline.quantities import show_rate, show_seconds
from paceline.reductions.auto import Auto
from paceline_lab.bench.layer_profile import default_profile
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator, BenchmarkError, turns
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import ClusterRanks, LoopbackRanks, gather
from paceline_lab.bench.ranks import Ranks as Place
from paceline_lab.bench.sides import StepTimes, Trainee
from paceline_lab.bench.timed_model import TimedWorkload
from paceline_lab.emulation import ClusterSpec
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    Quick,
    ReportFolder,
    Rounds,
)
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import look_of
from paceline_lab.report.panels import Line, Lines
from paceline_lab.report.publication import Report, Verdict, stored_report
from paceline_lab.report.summary import Summary, ratios, slowest_rank

NAME = "auto-compression"
AUTO, AUTO_ANY = "auto", "auto-any"
UNLIMITED, LOOPBACK = "unlimited", "loopback"
WARM_UP_STEPS = 3
MOST_STEPS = 150  # in which auto must have decided; with four candidates it takes 58
TARGET_REGRET, TARGET_OVERHEAD = 1.05, 1.02


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: Name in the report.
        workload: Workload whose layers it has.
        scale: Divides its bytes.
        compute_s: Forward and backward.
    """

    name: str
    workload: str
    scale: float
    compute_s: float


CASES = (Case("light", "bert", 200, 0.1), Case("heavy", "resnet50", 48, 0.4))


@dataclass(frozen=True)
class Config:
    """The settings of a measurement at one rate."""

    codecs: tuple[str, ...]
    candidates: tuple[str, ...]  # of auto; those of auto-any are all codecs
    cases: tuple[Case, ...]
    num_rounds: int
    steps_per_turn: int

    @property
    def autos(self) -> dict[str, tuple[str, ...]]:
        """Candidates, by side."""
        return {AUTO: self.candidates, AUTO_ANY: self.codecs}

    @property
    def sides(self) -> tuple[str, ...]:
        return ("none", *self.codecs, *self.autos)


@dataclass(frozen=True)
class Outcome:
    """The times of one model.

    Attributes:
        case: The case.
        step_s: Times of all timed steps, by side.
        deciding_s: Times of each auto's steps until it had decided.
        reports: Report of each auto.
        gradient_bytes: Bytes of the model's gradients.
        steps_per_round: Steps of each side per round.
    """

    case: str
    step_s: dict[str, list[float]]
    deciding_s: dict[str, list[float]]
    reports: dict[str, dict[str, Any]]
    gradient_bytes: int
    steps_per_round: int = 6


def measure(config: Config, tell: TellProgress) -> list[Outcome]:
    """Run all models. Collective; every rank returns the same."""
    return [_measure(config, case, place, tell) for place, case in enumerate(config.cases)]


def _measure(config: Config, case: Case, place: int, tell: TellProgress) -> Outcome:
    profile = default_profile(case.workload).taking(case.compute_s)
    workload = TimedWorkload(profile, dist.get_rank(), case.scale)
    autos = {name: Auto(candidates) for name, candidates in config.autos.items()}
    trainees = [_trainee(name, workload, autos) for name in config.sides]
    deciding = {name: StepTimes() for name in autos}
    for name, trainee in zip(config.sides, trainees, strict=True):
        if name in autos:
            _decide(trainee, autos[name], deciding[name])
        else:
            for _ in range(WARM_UP_STEPS):
                trainee.step()
    gc.collect()
    times = [StepTimes() for _ in trainees]
    schedule = list(turns(len(trainees), config.num_rounds))
    for num_done, turn in enumerate(schedule):
        for _ in range(config.steps_per_turn):
            trainees[turn.side_index].step(times[turn.side_index])
        tell((place + num_done / len(schedule)) / len(config.cases))
    everyone = gather([[each.totals_s() for each in many] for many in (times, deciding.values())])
    return Outcome(
        case.name,
        {name: slowest_rank([mine[0][i] for mine in everyone]) for i, name in enumerate(config.sides)},
        {name: slowest_rank([mine[1][i] for mine in everyone]) for i, name in enumerate(autos)},
        {name: auto.report() for name, auto in autos.items()},
        sum(4 * p.numel() for p in trainees[0].module.parameters()),
        2 * config.steps_per_turn,
    )


def _trainee(name: str, workload: TimedWorkload, autos: dict[str, Auto]) -> Trainee:
    compression = None if name == "none" else autos.get(name, name)
    return Trainee("ours", workload, init_sync=False, compression=compression)


def _decide(trainee: Trainee, auto: Auto, times: StepTimes) -> None:
    """Train until auto has settled: what it would have chosen cannot be graded before."""
    for _ in range(MOST_STEPS):
        trainee.step(times)
        if auto.report()["phase"] == "settled":
            return
    raise BenchmarkError(f"auto has not settled after {MOST_STEPS} steps: {auto.report()['history']}")


@dataclass(frozen=True)
class Point:
    """One model at one rate.

    Attributes:
        rate: Rate of every host's link, in words.
        outcome: Measurement at this rate.
    """

    rate: str
    outcome: Outcome

    def rounds_s(self, side: str) -> list[float]:
        """Each round's median step."""
        steps, size = self.outcome.step_s[side], self.outcome.steps_per_round
        return [Summary.of(steps[at : at + size]).median for at in range(0, len(steps), size)]

    def median_s(self, side: str) -> float:
        return Summary.of(self.rounds_s(side)).median

    def best(self, candidates: Sequence[str]) -> str:
        return min(("none", *candidates), key=self.median_s)

    def ratio(self, side: str, other: str) -> Summary:
        return Summary.of(ratios(self.rounds_s(side), self.rounds_s(other)))


def report(points: list[Point], config: Config, hosts: int, quick: bool) -> Report:
    """One row for each model at each rate."""
    rows, verdicts, summaries = [], [], []
    for point in points:
        where = f"{point.outcome.case}, {point.rate}"
        said = []
        for auto, candidates in config.autos.items():
            best, deciding = point.best(candidates), point.outcome.deciding_s[auto]
            regret, overhead = point.ratio(auto, best), point.ratio(auto, "none")
            verdicts += [
                Verdict(f"{where}: {auto} / best fixed ({best})", regret.median, TARGET_REGRET, "x"),
                Verdict(f"{where}: {auto} / none", overhead.median, TARGET_OVERHEAD, "x"),
            ]
            relative = sum(deciding) / (len(deciding) * point.median_s("none"))
            summaries.append(
                {
                    "case": point.outcome.case,
                    "rate": point.rate,
                    "auto": auto,
                    "in_use": point.outcome.reports[auto]["in_use"],
                    "best": best,
                    "regret": asdict(regret),
                    "overhead": asdict(overhead),
                    "deciding_steps": len(deciding),
                    "deciding_to_none": relative,
                    "step_s": {side: asdict(Summary.of(point.rounds_s(side))) for side in config.sides},
                }
            )
            said.append(
                (point.outcome.reports[auto]["in_use"] or "none", regret, overhead, len(deciding), relative)
            )
        rows.append(
            (
                point.outcome.case,
                point.rate,
                *[f"{point.median_s(side) * 1e3:.0f}" for side in config.sides],
                *[
                    f"{chosen} {regret.median:.2f} {overhead.median:.2f} ({num_steps}: {relative:.2f})"
                    for chosen, regret, overhead, num_steps, relative in said
                ],
            )
        )
    return Report(
        name=NAME + ("-quick" if quick else ""),
        question="Does compression='auto' choose well?",
        columns=(
            "model",
            "rate",
            *[f"{side} ms" for side in config.sides],
            *[f"{auto}: choice, / best, / none (steps to decide: / none)" for auto in config.autos],
        ),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=(
            "computation sleeps; gradients, codecs and traffic are real",
            f"auto may choose among {', '.join(config.candidates)}, auto-any among {', '.join(config.codecs)}",
            "best: the fastest of none and what may be chosen, all the time",
            "steps to decide: how many, and their mean as a multiple of a step without compression",
            "rates may have been measured in several runs (--keep); the command is the last one's",
        ),
        config=config,
        summaries={"points": summaries},
        samples={"points": [{"rate": point.rate, **asdict(point.outcome)} for point in points]},
        provenance=collect(hosts),
    )


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw a panel a model: a step's time by link rate, over that without compression."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    rates = list(dict.fromkeys(point["rate"] for point in record["summaries"]["points"]))
    ticks = {float(place): _rate_name(rate) for place, rate in enumerate(rates)}
    for point in record["summaries"]["points"]:
        if point["auto"] != AUTO:
            continue  # the same times stand with each auto
        for side, summary in point["step_s"].items():
            if side != "none":
                ratio = summary["median"] / point["step_s"]["none"]["median"]
                lines = found.setdefault(point["case"], {}).setdefault(side, [])
                lines.append((float(rates.index(point["rate"])), ratio))
    codecs = record["config"]["codecs"]
    computing = {case["name"]: case["compute_s"] for case in record["config"]["cases"]}
    panels = [
        Lines(
            f"{case} model: computes for {show_seconds(computing[case])}",
            "rate of each host's link",
            "step / step without compression",
            [Line(look_of(side).name, points, look_of(side).color) for side, points in lines.items()],
            ticks,
            bottom=None,
            levels={"no compression": 1.0},
        )
        for case, lines in found.items()
    ]
    autos = [ratio for lines in found.values() for _, ratio in lines[AUTO]]
    fixed = [
        ratio
        for lines in found.values()
        for side, line in lines.items()
        if side in codecs
        for _, ratio in line
    ]
    return draw_figure(
        path,
        f'compression="auto" saves up to {100 * (1 - min(autos)):.0f} % of a step and costs at most '
        f"{100 * max(0.0, max(autos) - 1):.0f} %; a codec that is always on costs up to {100 * (max(fixed) - 1):.0f} %",
        panels,
        f"{record['provenance']['num_ranks']} emulated hosts; layers sleep, codecs and traffic are real.",
        columns=1,
    )


def _rate_name(rate: str) -> str:
    if rate in (UNLIMITED, LOOPBACK):
        return "no limit" if rate == UNLIMITED else "one host"
    return show_rate(quantities.rate(rate, "--rates"))


def main(
    rates: Annotated[
        str,
        typer.Option(
            help="Rates of each host's link, comma-separated. 'unlimited', or 'loopback': no hosts."
        ),
    ] = ("50mbit,200mbit,1gbit,unlimited"),
    codecs: Annotated[str, typer.Option(help="Fixed codecs to compare with, comma-separated.")] = "bf16,int8",
    candidates: Annotated[str, typer.Option(help="Codecs that auto may choose, comma-separated.")] = "bf16",
    hosts: Annotated[int, typer.Option(min=2, help="Number of hosts, with one rank each.")] = 4,
    rounds: Rounds = 2,
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps per turn.")] = 3,
    keep: Annotated[bool, typer.Option("--keep", help="Keep stored points of other rates.")] = False,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Sweep link rates, and set auto against every fixed choice."""
    names = tuple(rate.strip() for rate in rates.split(","))
    config = Config(_words(codecs), _words(candidates), CASES, rounds, steps)
    if not set(config.candidates) <= set(config.codecs):
        raise ConfigurationError(
            f"--candidates {candidates} are compared with, too: add them to --codecs {codecs}."
        )
    if quick:
        names, hosts = (LOOPBACK,), 2
        config = Config(config.candidates, config.candidates, (Case("light", "tiny", 1, 0.01),), 2, 1)
    points = _points_of_others(report_folder, config, names) if keep else []
    for rate in names:
        with place(hosts, rate) as where:
            outcomes = where.run(measure, config, f"auto at {rate}", ENVIRONMENTS[Allocator.KEEP])[0]
        points += [Point(rate, outcome) for outcome in outcomes]
        points.sort(key=lambda point: _bits_per_s(point.rate))
        # A table after every rate: an interrupted sweep leaves what it has.
        if rate == names[-1] or not as_json:
            result = report(points, config, hosts, quick)
            conclude(result, report_folder, as_json, draw)


def place(hosts: int, rate: str) -> Place:
    """Return where the ranks run: hosts with links of this rate, or this machine."""
    if rate == LOOPBACK:
        return LoopbackRanks(hosts)
    # A queue that holds what four ranks send at once: losses would show retransmission, not compression.
    links: dict[str, Any] = {"offload": True, "queue": "1MiB"}
    if rate != UNLIMITED:
        links["rate"] = rate
    spec = ClusterSpec.parse(hosts=hosts, **links)
    return ClusterRanks(spec)


def _bits_per_s(rate: str) -> float:
    """Return the rate as a number, by which rates are sorted; the unlimited last."""
    limit = (
        None if rate in (UNLIMITED, LOOPBACK) else ClusterSpec.parse(hosts=2, rate=rate).rate_bits_per_s[0]
    )
    return math.inf if limit is None else limit


def _points_of_others(folder: Path, config: Config, rates: Sequence[str]) -> list[Point]:
    """Return the points that earlier runs have stored, except those at these rates."""
    path = folder / f"{NAME}.json"
    if not path.exists():
        return []
    record = stored_report(path)
    samples = [dict(sample) for sample in record["samples"]["points"]]
    others = [(sample.pop("rate"), Outcome(**sample)) for sample in samples]
    return [
        Point(rate, outcome)
        for rate, outcome in others
        if rate not in rates and set(config.sides) <= set(outcome.step_s)
    ]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
