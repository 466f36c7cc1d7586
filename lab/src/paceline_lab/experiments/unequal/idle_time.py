"""How long do the fast ranks of unequal machines wait, with equal shares and with `balance="auto"`?

Ranks sleep for their samples. The last steps of each run are noted as `model.timings` has them: when a rank computed,
and when it waited for the others. Ranks of one machine have one clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks, gather
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder
from paceline_lab.experiments.runner import conclude
from paceline_lab.experiments.unequal.shares import AUTO, EQUAL, Case, Training
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.panels import Lanes
from paceline_lab.report.publication import Report

NAMES = {EQUAL: "equal shares", AUTO: 'balance="auto"'}
SLOWNESS, NUM_NOTED = (1.0, 1.0, 4.0), 3


@dataclass(frozen=True)
class Config:
    """What is measured."""

    case: Case
    num_steps: int


def measure(config: Config, tell: TellProgress) -> dict[str, Any]:
    """Train with equal shares, then with balanced ones. Collective; every rank returns the same."""
    found: dict[str, Any] = {}
    for side in NAMES:
        training = Training(side, config.case, config.num_steps)
        for place in range(config.num_steps):
            training.step()
            tell((len(found) + place / config.num_steps) / len(NAMES))
        mine = [
            (step.started_s - step.last_forward_s, step.started_s + step.backward_s, step.exposed_s)
            for step in training.model.timings.recent(NUM_NOTED)
        ]
        found[side] = {"samples": list(training.samples), "steps_of_ranks": gather(mine)}
    return found


def report(config: Config, found: Mapping[str, Any]) -> Report:
    """One row a side: the part of all ranks' time in which they wait."""
    idle = {side: idle_ratio(run["steps_of_ranks"]) for side, run in found.items()}
    return Report(
        name="idle-time",
        question="How long do the fast ranks of unequal machines wait?",
        columns=("shares", "samples", "waiting"),
        rows=tuple(
            (NAMES[side], " + ".join(map(str, run["samples"])), f"{idle[side]:.0%}")
            for side, run in found.items()
        ),
        verdicts=(),
        notes=("ranks sleep for their samples; one machine; the last steps of a run",),
        config=config,
        summaries={side: {"idle_ratio": ratio} for side, ratio in idle.items()},
        samples=dict(found),
        provenance=collect(len(config.case.slowness)),
    )


def idle_ratio(steps_of_ranks: list[list[tuple[float, float, float]]]) -> float:
    """Return the part of all ranks' time, from the first step noted to the end of the last, in which they waited."""
    waited_s = sum(waited for steps in steps_of_ranks for _, _, waited in steps)
    whole_s = sum(steps[-1][1] + steps[-1][2] - steps[0][0] for steps in steps_of_ranks)
    return waited_s / whole_s


def main(
    steps: Annotated[int, typer.Option(min=8, help="Number of steps of each run.")] = 40,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Compare equal shares with balanced ones on three ranks, of which the last is four times slower."""
    config = Config(Case(SLOWNESS, ideal_s=0.03 if quick else 0.6), 8 if quick else steps)
    ranks = LoopbackRanks(len(SLOWNESS))
    found = ranks.run(measure, config, "idle time of unequal ranks")[0]
    conclude(report(config, found), report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw when each rank computed and when it waited, from a stored report; both sides over the same time."""
    panels, until_ms = [], 0.0
    for side, run in record["samples"].items():
        first_s = min(steps[0][0] for steps in run["steps_of_ranks"])
        lanes = {}
        for rank, steps in enumerate(run["steps_of_ranks"]):
            slow = record["config"]["case"]["slowness"][rank]
            name = f"rank {rank}" + (f", {slow:g} times slower" if slow > 1 else "")
            lanes[name] = [
                span
                for began, computed, waited in steps
                for span in (
                    ("computes", 1e3 * (began - first_s), 1e3 * (computed - first_s)),
                    ("waits", 1e3 * (computed - first_s), 1e3 * (computed + waited - first_s)),
                )
            ]
        until_ms = max(until_ms, *(spans[-1][2] for spans in lanes.values()))
        shares = " + ".join(map(str, run["samples"]))
        panels.append((f"{NAMES[side]}: {shares} samples per step", lanes))
    before, after = (record["summaries"][side]["idle_ratio"] for side in NAMES)
    return draw_figure(
        path,
        f'With balance="auto" ranks wait {after:.0%} of their time instead of {before:.0%}',
        [Lanes(title, "ms", lanes, {}, until_ms) for title, lanes in panels],
        "Three ranks on one machine sleep for their samples. The last three steps of each run.",
        columns=1,
    )
