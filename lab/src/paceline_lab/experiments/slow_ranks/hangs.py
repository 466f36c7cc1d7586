"""Measure whether a hanging rank is named within 10 s, with its stack, without false alarms at long steps.

Three ranks under `paceline run`, as a user starts them, under torch's DDP and Paceline's. In each case one rank hangs
at a step, or takes a hundred times as long as a step for a reason (`hanging_training`). The messages on standard error
are graded: the launcher's while it runs, its last one, and those of each rank that waits.

Torch's flight recorder is measured on the same hangs of torch's DDP. For Gloo it writes nothing by itself. So each rank
dumps it once a second, and torch's own analyzer reads all dumps.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from paceline_lab.bench.provenance import collect
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder, StoreFile
from paceline_lab.experiments.runner import conclude, keeping
from paceline_lab.experiments.slow_ranks.hanging_jobs import NUM_RANKS, Case, Said, run
from paceline_lab.experiments.slow_ranks.hanging_training import HANGS, LONG
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.terminal import progress_bar

NAME = "doctor-hangs"
_WRAPPERS = ("torch", "paceline")


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Jobs of every kind and wrapper.")] = 5,
    how: Annotated[
        list[str] | None, typer.Option(help="Only this; may be given again.", show_default="all")
    ] = None,
    quick: Quick = False,
    store: StoreFile = None,
    report: ReportFolder = REPORT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Let ranks hang, or take long, and grade the messages about it."""
    kinds = how or ([next(iter(HANGS))] if quick else [*HANGS, *LONG])
    wrappers = _WRAPPERS[:1] if quick else _WRAPPERS
    cases = [
        Case(x, wrapper, seed) for seed in range(1 if quick else seeds) for x in kinds for wrapper in wrappers
    ]
    file = (store or report / f"{NAME}.jsonl").absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    known = stored(file)
    missing = [x for x in cases if (x.how, x.wrapper, x.seed) not in known]
    with keeping(file), progress_bar(f"{len(missing)} jobs") as tell:
        for number, case in enumerate(missing):
            said = run(case)
            with file.open("a") as lines:
                lines.write(json.dumps(asdict(said)) + "\n")
            tell((number + 1) / len(missing))
    conclude(_report(list(stored(file).values())), report, as_json)


def stored(file: Path) -> dict[tuple[str, str, int], Said]:
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):  # it was cut off
            words = json.loads(line)
            words |= {name: tuple(words[name]) for name in ("lines", "told_ranks")}
            found[words["how"], words["wrapper"], words["seed"]] = Said(**words)
    return found


def _report(jobs: list[Said]) -> Report:
    hangs, long = [x for x in jobs if x.is_hang], [x for x in jobs if not x.is_hang]
    false = sum(bool(x.lines) for x in long)
    failed = sum(x.code != 0 for x in long)
    num = len(hangs) or 1
    flights = [x for x in hangs if x.wrapper == "torch"]
    verdicts = (
        Verdict("absent rank", 1 - sum(x.is_rank_right for x in hangs) / num, 0.0, "of hangs missed"),
        Verdict("within 10 s", 1 - sum(x.is_in_time for x in hangs) / num, 0.0, "of hangs missed"),
        Verdict("collective", 1 - sum(x.is_collective_right for x in hangs) / num, 0.0, "of hangs missed"),
        Verdict("Python stack", 1 - sum(x.is_stack_right for x in hangs) / num, 0.0, "of hangs missed"),
        Verdict(
            "on every rank, and last", 1 - sum(x.is_everywhere for x in hangs) / num, 0.0, "of hangs missed"
        ),
        Verdict("steps that take long", float(false), 0.0, "alarms"),
    )
    kinds = list(dict.fromkeys((x.how, x.wrapper) for x in jobs))
    rows = tuple(_row([x for x in jobs if (x.how, x.wrapper) == kind]) for kind in kinds)
    seen = sum(x.fewest == x.rank for x in flights)
    notes = (
        f"{failed} of {len(long)} jobs that only take long ended with an error",
        f"torch's flight recorder, {len(flights)} hangs: by itself it says nothing over Gloo",
        f"dumped by a thread of ours, the absent rank has fewest entries in {seen}; its analyzer's words are stored",
        "no dump has the stack of a rank that hangs",
    )
    summary: Mapping[str, Any] = {
        "hangs": len(hangs),
        "long": len(long),
        "false": false,
        "told_s": _times(x.told_s for x in hangs),
        "load": max((x.load for x in jobs), default=0.0),
    }
    return Report(
        NAME,
        "Is a rank that hangs named within 10 s, and is nothing said of steps that only take long?",
        (
            "what the rank does",
            "DDP",
            "jobs",
            "right rank",
            "collective",
            "stack",
            "told all",
            "median s",
            "alarms",
        ),
        rows,
        verdicts,
        notes,
        None,
        dict(summary),
        {"jobs": [asdict(x) for x in jobs]},
        collect(NUM_RANKS),
        {"ranks": f"{NUM_RANKS} on this machine, under paceline run"},
    )


def _times(told_s: Iterable[float | None]) -> dict[str, float]:
    known = [x for x in told_s if x is not None]
    return {"median": median(known), "most": max(known)} if known else {}


def _row(jobs: list[Said]) -> tuple[str, ...]:
    first = jobs[0]
    if not first.is_hang:
        return (first.how, first.wrapper, str(len(jobs)), *[""] * 5, str(sum(bool(x.lines) for x in jobs)))
    times = _times(x.told_s for x in jobs)
    graded = ("is_rank_right", "is_collective_right", "is_stack_right", "is_everywhere")
    return (
        first.how,
        first.wrapper,
        str(len(jobs)),
        *(str(sum(getattr(x, name) for x in jobs)) for name in graded),
        f"{times['median']:.1f}" if times else "never",
        "",
    )
