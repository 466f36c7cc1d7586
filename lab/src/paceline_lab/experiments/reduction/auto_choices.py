"""Measure how often `compression="auto"` chooses well, for many sets of candidates.

Every model, link rate and set of candidates is a run. Auto trains until it has settled. Then auto, each codec and no
compression take turns (`auto_compression.measure`). Steps are short and few, so that many runs fit. Other programs on
the same cores change all sides of a round alike.

    choice      auto's choice, used all the time / the best fixed choice among none and the run's candidates
    regret      auto itself / that best fixed choice; as noisy as two measurements of one codec

Auto is right in a run if its choice is at most 1.05.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline_lab.bench.provenance import collect
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder, Rounds, names_in
from paceline_lab.experiments.reduction import auto_compression
from paceline_lab.experiments.reduction.auto_compression import Case, Point, measure
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import CURVE_COLORS, OURS
from paceline_lab.report.panels import Line, Lines
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary

NAME = "auto-choices"
TARGET_WRONG = 0.05  # of all runs
CODECS = ("bf16", "int8", "topk", "powersgd")
SETS = (
    ("bf16",),
    ("bf16", "int8"),
    ("int8", "powersgd"),
    ("bf16", "int8", "powersgd"),
    ("topk", "powersgd", "int8", "bf16"),
)
CASES = (
    Case("bert, short", "bert", 500, 0.02),
    Case("bert, long", "bert", 500, 0.08),
    Case("resnet50", "resnet50", 96, 0.04),
    Case("wide_mlp", "wide_mlp", 24, 0.02),
)


@dataclass(frozen=True)
class Config(auto_compression.Config):
    """The settings at one rate: an auto for each set of candidates."""

    sets: tuple[tuple[str, ...], ...] = SETS

    @property
    def autos(self) -> dict[str, tuple[str, ...]]:
        return {"auto: " + " ".join(candidates): candidates for candidates in self.sets}


@dataclass(frozen=True)
class Choice:
    """One run."""

    case: str
    rate: str
    candidates: tuple[str, ...]
    chosen: str
    best: str
    choice: float
    regret: float
    step_s: dict[str, float]  # medians: of none, of each codec, and of auto
    num_steps: int  # until auto had settled


def choices(points: list[Point], config: Config) -> list[Choice]:
    """Return one for each model, rate and set of candidates."""
    found = []
    for point in points:
        for side, candidates in config.autos.items():
            best, chosen = point.best(candidates), point.outcome.reports[side]["in_use"] or "none"
            found.append(
                Choice(
                    point.outcome.case,
                    point.rate,
                    candidates,
                    chosen,
                    best,
                    point.ratio(chosen, best).median,
                    point.ratio(side, best).median,
                    {"auto": point.median_s(side)}
                    | {name: point.median_s(name) for name in ("none", *config.codecs)},
                    len(point.outcome.deciding_s[side]),
                )
            )
    return found


def report(points: list[Point], config: Config, hosts: int, load: tuple[float, float], quick: bool) -> Report:
    """One row for each set of candidates, and one for all runs."""
    found = choices(points, config)
    rows, verdicts = [], []
    for candidates in (None, *config.sets):
        runs = [run for run in found if candidates in (None, run.candidates)]
        regret = Summary.of([run.regret for run in runs])
        num_wrong = sum(run.choice > auto_compression.TARGET_REGRET for run in runs)
        num_close = sum(run.regret <= auto_compression.TARGET_REGRET for run in runs)
        words = "all" if candidates is None else " ".join(candidates)
        rows.append(
            (
                words,
                str(len(runs)),
                str(len(runs) - num_wrong),
                f"{max(run.choice for run in runs):.2f}",
                str(num_close),
                f"{regret.median:.2f}",
                f"{Summary.of([run.step_s['auto'] / run.step_s['none'] for run in runs]).median:.2f}",
            )
        )
        if candidates is None:
            verdicts.append(
                Verdict("runs more than 5 % from the best", num_wrong / len(runs), TARGET_WRONG, "")
            )
    return Report(
        name=NAME + ("-quick" if quick else ""),
        question="How often does compression='auto' choose well?",
        columns=(
            "candidates",
            "runs",
            "choice within 5 % of the best",
            "worst choice / best",
            "auto itself within 5 %",
            "auto / best, median",
            "auto / none, median",
        ),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=(
            "computation sleeps; gradients, codecs and traffic are real",
            f"load of the machine, one minute's mean: {load[0]:.1f} before, {load[1]:.1f} after",
        ),
        config=config,
        summaries={"runs": [asdict(run) for run in found]},
        samples={"points": [{"rate": point.rate, **asdict(point.outcome)} for point in points]},
        provenance=collect(hosts),
    )


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw how many runs take at most so long: with the chosen codec all the time, and with auto itself."""
    runs = record["summaries"]["runs"]
    lines = []
    for name, kind, color in (("what it chose", "choice", OURS), ("auto itself", "regret", CURVE_COLORS[2])):
        ordered = sorted(run[kind] for run in runs)
        points = [(ratio, 100 * (place + 1) / len(ordered)) for place, ratio in enumerate(ordered)]
        lines.append(Line(name, points, color, marker=""))
    num_right = sum(run["choice"] <= auto_compression.TARGET_REGRET for run in runs)
    panel = Lines(
        "runs with at most this ratio (%)",
        "step / step with the best fixed choice",
        "runs (%)",
        lines,
    )
    return draw_figure(
        path,
        f'compression="auto" chooses within 5 % of the best in {num_right} of {len(runs)} runs',
        [panel],
        f"{record['provenance']['num_ranks']} emulated hosts; layers sleep, codecs and traffic are real.",
        columns=1,
    )


def main(
    rates: Annotated[
        str,
        typer.Option(
            help="Rates of each host's link, comma-separated. 'unlimited', or 'loopback': no hosts."
        ),
    ] = "50mbit,100mbit,300mbit,1gbit,unlimited",
    hosts: Annotated[int, typer.Option(min=2, help="Number of hosts, with one rank each.")] = 2,
    rounds: Rounds = 2,
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps per turn.")] = 2,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Let auto choose in every model, rate and set of candidates, and grade it by the best fixed choice."""
    names = names_in(rates)
    config = Config(CODECS, (), CASES, rounds, steps)
    if quick:
        names, hosts = (auto_compression.LOOPBACK,), 2
        config = Config(("bf16",), (), (Case("light", "tiny", 1, 0.01),), 2, 1, (("bf16",),))
    before, points = os.getloadavg()[0], []
    for rate in names:
        with auto_compression.place(hosts, rate) as where:
            outcomes = where.run(measure, config, f"auto at {rate}", ENVIRONMENTS[Allocator.KEEP])[0]
        points += [Point(rate, outcome) for outcome in outcomes]
        if rate == names[-1] or not as_json:
            load = (before, os.getloadavg()[0])
            conclude(report(points, config, hosts, load, quick), report_folder, as_json, draw)
