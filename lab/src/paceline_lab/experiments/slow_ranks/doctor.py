"""Grade `paceline doctor`: does it name the right rank, cause and step after the repair, and raise no false alarm?

Real processes: four ranks on this machine under torch's own DDP, one of which is made slow (`injections`). As root,
also three emulated hosts, one of which has a slow or lossy link (`links`). Each case is recorded for 20 steps and
diagnosed. The predicted step is compared with steps without the injection, before and after.

Only cases in which the injection made the step at least 5 % longer count; the others are listed. Seeds run outermost,
so a study that is stopped has graded every cause equally often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigurationError
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.ranks import LoopbackRanks
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder, StoreFile
from paceline_lab.experiments.runner import conclude, keeping
from paceline_lab.experiments.slow_ranks.grading import COLUMNS, Grade, Row, grades_of, rows_of
from paceline_lab.experiments.slow_ranks.injected_training import Training, train_cases
from paceline_lab.experiments.slow_ranks.injections import CAUSES, Case
from paceline_lab.experiments.slow_ranks.links import (
    CLEAN_LINKS,
    LINK_CAUSES,
    is_possible,
    links_of,
    record_apart,
    record_link,
)
from paceline_lab.experiments.slow_ranks.records import stored
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import OURS
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.publication import Report, Verdict

NAME = "doctor"
_RIGHT, _CAUSE = 0.99, 0.95
_NUM_RANKS = 4


@dataclass(frozen=True)
class Config:
    """The cases that are graded.

    Attributes:
        seeds: Number of seeds of every cause and strength.
        clean: Number of runs without any injection.
        links: Whether emulated hosts are graded as well.
        causes: The only causes; empty: all.
    """

    seeds: int
    clean: int
    links: bool
    causes: tuple[str, ...] = ()

    def cases_of(self, seed: int) -> list[Case]:
        """Return the cases of one seed for single ranks. Causes with a delay need emulated hosts."""
        causes = {
            name: of
            for name, of in CAUSES.items()
            if name != "clean" and self._asks(name) and (self.links or not of.delay)
        }
        found = [Case(name, strength, seed) for name, of in causes.items() for strength in of.strengths]
        each = -(-self.clean // self.seeds)
        return found + [Case("clean", 0, x) for x in range(seed * each, min(self.clean, (seed + 1) * each))]

    def links_of(self, seed: int) -> list[Case]:
        """Return the cases of one seed for links of emulated hosts, and the clean ones to compare them with."""
        found = [x for x in links_of(seed) if x.cause != CLEAN_LINKS and self._asks(x.cause)]
        return [Case(CLEAN_LINKS, 0, seed), *found] if self.links and found else []

    def _asks(self, cause: str) -> bool:
        return not self.causes or cause in self.causes


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every cause and strength.")] = 20,
    clean: Annotated[int, typer.Option(min=0, help="Runs without an injection, in all.")] = 100,
    links: Annotated[bool, typer.Option(help="Grade links on emulated hosts as well, as root.")] = True,
    cause: Annotated[
        list[str] | None, typer.Option(help="Only this cause; may be given again.", show_default="all")
    ] = None,
    quick: Quick = False,
    store: StoreFile = None,
    report: ReportFolder = REPORT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Grade the doctor. What ranks recorded is stored run by run, and graded anew each time: also by later rules."""
    if unknown := set(cause or ()) - {*CAUSES, *LINK_CAUSES}:
        raise ConfigurationError(
            f"no cause is called {min(unknown)!r}; these are: {', '.join({**CAUSES, **LINK_CAUSES})}."
        )
    config = Config(seeds, clean, links and is_possible(), tuple(cause or ()))
    if quick:
        config = Config(1, 1, links=False, causes=("forward",))
    file = (store or report / f"{NAME}.jsonl").absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    with keeping(file):
        for seed in range(config.seeds):
            _run_missing(file, config.cases_of(seed), config.links_of(seed))
    recorded = stored(file)
    conclude(_report(grades_of(recorded), config), report, as_json, draw)


def _run_missing(file: Path, cases: list[Case], links: list[Case]) -> None:
    known = stored(file)
    missing = tuple(case for case in cases if case not in known)
    here = tuple(case for case in missing if not case.of.delay)
    if here:
        LoopbackRanks(_NUM_RANKS).run(train_cases, Training(here, file), f"{len(here)} slow ranks")
    record_apart([case for case in missing if case.of.delay], file)
    for case in links:
        if case not in known:
            record_link(case, file)


def _units() -> dict[str, str]:
    return {name: of.unit for name, of in CAUSES.items()} | {
        name: of.unit for name, of in LINK_CAUSES.items()
    }


def _report(grades: list[Grade], config: Config) -> Report:
    rows = rows_of(grades, _units())
    asked = [row for row in rows if row.cause != "clean"]
    num = sum(row.num_effective for row in asked) or 1
    alarms = sum(row.num_wrong for row in rows if row.cause == "clean")
    predicted = sum(row.num_predicted for row in asked) or 1
    verdicts = (
        Verdict("right rank", 1 - sum(row.num_right for row in asked) / num, 1 - _RIGHT, "of runs missed"),
        Verdict("right cause", 1 - sum(row.num_cause for row in asked) / num, 1 - _CAUSE, "of runs missed"),
        Verdict("wrong rank named", sum(row.num_wrong for row in asked) / num, 0.01, "of runs"),
        Verdict(
            "link's direction",
            1 - sum(row.num_direction for row in rows) / (sum(row.num_directed for row in rows) or 1),
            1 - _CAUSE,
            "of runs missed",
        ),
        Verdict("what-if", 1 - sum(row.num_close for row in asked) / predicted, 0.05, "off by over 5 %"),
        Verdict("clean runs", float(alarms), 0.0, "alarms"),
    )
    ineffective = sum(row.num - row.num_effective for row in asked)
    notes = (
        f"{ineffective} runs whose effect is below 5 % of a step, or what clean runs do not exclude, do not count",
        "silent is not wrong, and counts as missed",
    )
    return Report(
        NAME,
        "Does the doctor name the right rank, the cause and the step after the repair?",
        COLUMNS,
        tuple(row.cells() for row in rows),
        verdicts,
        notes,
        config,
        {f"{row.cause} {row.strength:g}": asdict(row) for row in rows},
        {"grades": [asdict(x) for x in grades]},
        collect(_NUM_RANKS),
        {"ranks": f"{_NUM_RANKS} on this machine; links: 3 emulated hosts"},
    )


def draw(record: Mapping[str, Any], path: Path) -> object:
    """One bar per cause: in which share of the runs that count the right rank was named."""
    rows = [Row(**found) for found in record["summaries"].values()]
    asked = [row for row in rows if row.cause != "clean" and row.num_effective]
    bars = []
    for cause in dict.fromkeys(row.cause for row in asked):
        of_cause = [row for row in asked if row.cause == cause]
        named, counted = (
            sum(getattr(row, key) for row in of_cause) for key in ("num_right", "num_effective")
        )
        bars.append(Bar(cause, 100 * named / counted, OURS, f"{named} of {counted}"))
    num, right = sum(row.num_effective for row in asked), sum(row.num_right for row in asked)
    title = f"The doctor named the right rank in {right} of {num} runs"
    note = "Four ranks under torch's DDP, unchanged; links: three emulated hosts."
    return draw_figure(path, title, [Bars("", "right rank, % of runs", bars)], note)
