"""Does the simulator reproduce what papers measured on up to 352 GPUs, fitted on half of their points?

Nothing is measured here; published points are read off figures. Each curve's free numbers are fitted on the points
that the table calls fitted, and the others are predicted. Figure 2 of Li et al. (60 million numbers, in pieces) has no
published digits: from the numbers fitted to figure 7 follows where larger pieces stop helping.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.options import RESULTS_FOLDER, AsJson, Quick, ResultsFolder, run_cli
from paceline.lab.bench.provenance import collect, load_average
from paceline.lab.report.figures import CURVE_COLORS, Line, Panel, draw_panels
from paceline.lab.report.publication import Report, publish
from paceline.lab.studies.paper_cases import CaseOutcome, all_cases, eight_from_four, solve

NAME = "predicted-papers"
QUICK_EVERY = 9  # of the curves, with --quick
_PIECE_NUMBERS = 60_000_000  # figure 2
_SATURATED = 1.1  # total time over its least


@dataclass(frozen=True)
class Config:
    """What was compared."""

    curves: int


def main(
    quick: Quick = False, as_json: AsJson = False, results_folder: ResultsFolder = RESULTS_FOLDER
) -> None:
    """Fit and predict every curve."""
    load_before = load_average()
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
        provenance=collect(1, load_before),
    )
    publish(report, results_folder, as_json)
    _draw(outcomes, results_folder, report.name)


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
        "numbers": dict(outcome.numbers),
        "predicted": list(outcome.predicted),
        "fitted_x": list(outcome.case.fitted),
        "fitted_errors": outcome.errors(fitted=True),
        "predicted_errors": outcome.errors(fitted=False),
        "predicted_median": median(map(abs, outcome.errors(fitted=False))),
    }


def _draw(outcomes: Sequence[CaseOutcome], folder: Path, name: str) -> None:
    """A picture a figure: curves over published points; hollow are those that were fitted."""
    figures = dict.fromkeys(x.case.figure for x in outcomes)
    for figure in figures:
        chosen = [x for x in outcomes if x.case.figure == figure]
        by_panel: dict[str, list[CaseOutcome]] = {}
        for outcome in chosen:
            by_panel.setdefault(_panel_of(outcome), []).append(outcome)
        panels = [_panel(title, group) for title, group in by_panel.items()]
        words = figure.replace(" ", "").replace(",", "-").replace(".", "-").lower()
        draw_panels(folder / f"{name}-{words}.png", f"{figure}: published points, simulated curves", panels)


def _panel_of(outcome: CaseOutcome) -> str:
    parts = outcome.case.label.split(", ")
    return ", ".join(parts[:2]) if outcome.case.figure == "DDP 7, 8" else outcome.case.figure


def _panel(title: str, outcomes: Sequence[CaseOutcome]) -> Panel:
    lines = []
    for i, outcome in enumerate(outcomes):
        case, color = outcome.case, CURVE_COLORS[i % len(CURVE_COLORS)]
        xs = [x for x, _ in case.points]
        lines.append(Line(case.label, list(zip(xs, outcome.predicted, strict=True)), color, "-", ""))
        known = [point for point in case.points if point[0] in case.fitted]
        others = [point for point in case.points if point[0] not in case.fitted]
        if known:
            lines.append(Line("published, fitted", known, color, " ", "x"))
        if others:
            lines.append(Line("published, predicted", others, color, " ", "o"))
    first = outcomes[0].case
    linear = first.x == "bucket cap MB"
    ticks = sorted({x for outcome in outcomes for x, _ in outcome.case.points})
    return Panel(title, first.x, first.y, lines, ticks=ticks, linear_x=linear)


if __name__ == "__main__":
    run_cli(main)
