"""Does the simulator reproduce what papers measured on up to 352 GPUs, fitted on half of their points?

Nothing is measured here; published points are read off figures. Each curve's free numbers are fitted on the points
that the table calls fitted, and the others are predicted. Figure 2 of Li et al. (60 million numbers, in pieces) has no
published digits: from the numbers fitted to figure 7 follows where larger pieces stop helping.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline_lab.bench.provenance import collect
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder
from paceline_lab.experiments.prediction.paper_cases import CaseOutcome, all_cases, eight_from_four, solve
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import CURVE_COLORS
from paceline_lab.report.panels import Line, Lines
from paceline_lab.report.publication import Report

NAME = "predicted-papers"
LINEAR = "bucket cap MB"  # this axis is
QUICK_EVERY = 9  # of the curves, with --quick
_PIECE_NUMBERS = 60_000_000  # figure 2
_SATURATED = 1.1  # total time over its least
_WHERE = {"DDP": "Li et al. 2020, figure", "Goyal": "Goyal et al. 2017, section", "mLSTM": "mLSTM study"}
_MODELS = {"resnet50": "ResNet-50", "bert": "BERT"}


@dataclass(frozen=True)
class Config:
    """What was compared."""

    curves: int


def main(quick: Quick = False, as_json: AsJson = False, report_folder: ReportFolder = REPORT_FOLDER) -> None:
    """Fit and predict every curve."""
    outcomes = [solve(case) for case in all_cases()[:: QUICK_EVERY if quick else 1]]
    if not quick:
        four = next(x for x in outcomes if x.case.label == "4k, InfiniBand")
        outcomes.append(eight_from_four(four))
    report = Report(
        name=NAME + "-quick" * quick,
        question="Does the simulator reproduce published figures on scaling?",
        columns=("figure", "curve", "fitted", "median, worst", "predicted", "median, worst", "numbers"),
        rows=tuple(_row(outcome) for outcome in outcomes),
        verdicts=(),
        notes=(
            "where the link limits, a step does not depend on computing: fitted `compute s` then means nothing",
            *dict.fromkeys(_remarks(outcomes)),
            *_pieces(outcomes),
        ),
        config=Config(len(outcomes)),
        summaries={f"{x.case.figure}: {x.case.label}": _summary(x) for x in outcomes},
        samples={"published": {f"{x.case.figure}: {x.case.label}": x.case.points for x in outcomes}},
        provenance=collect(1),
    )
    conclude(report, report_folder, as_json, draw)


def _row(outcome: CaseOutcome) -> tuple[str, ...]:
    case = outcome.case
    others = [x for x, _ in case.points if x not in case.fitted]
    return (
        case.figure,
        case.label,
        _list(case.fitted),
        outcome.words(fitted=True),
        _list(others),
        outcome.words(fitted=False),
        ", ".join(f"{name} {value:.3g}" for name, value in outcome.numbers.items()),
    )


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values) or "-"


def _remarks(outcomes: Sequence[CaseOutcome]) -> list[str]:
    return [f"{x.case.figure}, {x.case.label}: {x.case.remark}" for x in outcomes if x.case.remark]


def _pieces(outcomes: Sequence[CaseOutcome]) -> list[str]:
    """Figure 2: the piece from which on larger ones save less than a tenth."""
    found = []
    for outcome in outcomes:
        if (
            outcome.case.label.startswith("resnet50")
            and "16 GPUs" in outcome.case.label
            and "7" in outcome.case.figure
        ):
            fixed_s, rate = outcome.numbers["collective s"], outcome.numbers["rate B/s"]
            s_per_number = 4 * 2 * 15 / 16 / rate
            least_s = _PIECE_NUMBERS * s_per_number + fixed_s
            pieces = [2**i for i in range(10, 26)]
            enough = next(
                n for n in pieces
                if math.ceil(_PIECE_NUMBERS / n) * fixed_s + _PIECE_NUMBERS * s_per_number <= _SATURATED * least_s
            )  # fmt: skip
            found.append(
                f"DDP 2, by the numbers of {outcome.case.label}: pieces of {enough:,} numbers are within a tenth of "
                "one piece (the paper's text: Gloo saturates at about 500,000, NCCL not by 20 million)"
            )
    return found


def _summary(outcome: CaseOutcome) -> dict[str, Any]:
    return {
        "axes": [outcome.case.x, outcome.case.y],
        "numbers": dict(outcome.numbers),
        "predicted": list(outcome.predicted),
        "fitted_x": list(outcome.case.fitted),
        "fitted_errors": outcome.errors(fitted=True),
        "predicted_errors": outcome.errors(fitted=False),
        "predicted_median": median(map(abs, outcome.errors(fitted=False))),
    }


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw simulated curves over published points from a stored report: crosses were fitted, dots predicted."""
    panels: dict[str, list[Line]] = {}
    axes: dict[str, tuple[str, str]] = {}
    for name, found in record["summaries"].items():
        figure, _, label = name.partition(": ")
        title = ", ".join([figure, *label.split(", ")[:2]]) if figure == "DDP 7, 8" else figure
        lines = panels.setdefault(title, [])
        color = CURVE_COLORS[sum(bool(line.label) for line in lines) % len(CURVE_COLORS)]
        points = record["samples"]["published"][name]
        known = [point for point in points if point[0] in found["fitted_x"]]
        others = [point for point in points if point[0] not in found["fitted_x"]]
        curve = [(x, y) for (x, _), y in zip(points, found["predicted"], strict=True)]
        short = label.removeprefix(title.removeprefix(f"{figure}, ")).removeprefix(", ")
        lines.append(Line(_in_words(short or label), curve, color, "-", ""))
        lines += [
            Line("", chosen, color, " ", mark) for chosen, mark in ((known, "x"), (others, "o")) if chosen
        ]
        axes[title] = tuple(found["axes"])
    drawn = {
        title: Lines(
            _in_words(title),
            axes[title][0].replace(LINEAR, "bucket cap, MB"),
            axes[title][1],
            lines,
            {} if axes[title][0] == LINEAR else {x: f"{x:g}" for line in lines for x, _ in line.points},
            log_x=axes[title][0] != LINEAR,
        )
        for title, lines in panels.items()
    }
    errors = [abs(error) for found in record["summaries"].values() for error in found["predicted_errors"]]
    title = (
        f"Half of the published points (dots) are predicted to {100 * median(errors):.0f} % by curves fitted on others "
        "(crosses)"
    )
    caps = [panel for name, panel in drawn.items() if name.startswith("DDP 7, 8")]
    others = [panel for name, panel in drawn.items() if not name.startswith("DDP 7, 8")]
    return draw_figure(path, title, caps) and draw_figure(
        path.with_stem(f"{path.stem}-scaling"), title, others, columns=1
    )


def _in_words(name: str) -> str:
    for short, word in {**_WHERE, **_MODELS}.items():
        name = name.replace(short, word)
    return name
