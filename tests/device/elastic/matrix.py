"""Runs that cover all pairs of what matters when a rank dies: `python -m device.elastic.matrix REPORT [--number N]`.

Each line of the report is a run and what was wrong with it. A run that is in the report already is not done again.
Exit code 1: something was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from device import late
from device.elastic.runs import Run, perform
from device.elastic.training import COLLECTIVES, HOST, PLACES, TASKS

MOMENTS = (*HOST, *TASKS, *(f"{place} {name}" for place in PLACES for name in COLLECTIVES), "self-abort")
AXES: dict[str, tuple[object, ...]] = {
    "moment": MOMENTS,
    "again": MOMENTS,  # of a second death
    "optimizer": ("adamw", "adam", "sgd", "adagrad", "adamw foreach"),
    "schedule": (*late.SCHEDULES, "eager"),
    "lead": (2, 5),
    "hears_late_s": (0.0, 0.3),
    "garbage": ("old", "wild"),
    "behind": ("--behind 500", "--behind 40", "--reads-loss"),
    "rank": (0, 1, 2),
}


def rows(number: int) -> Iterator[dict[str, object]]:
    """Yield rows of values, one of each axis, that cover all pairs soon; always the same ones."""
    drawn = random.Random(0)
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(AXES, 2)
        for a in AXES[one]
        for b in AXES[other]
    }
    for _ in range(number):
        candidates = [{name: drawn.choice(values) for name, values in AXES.items()} for _ in range(30)]
        best = max(
            candidates, key=lambda row: len(missing.intersection(itertools.combinations(row.items(), 2)))
        )
        missing.difference_update(itertools.combinations(best.items(), 2))
        yield {**best, "num_missing": len(missing)}


def run_of(row: dict[str, object]) -> Run:
    """Return the job of a row: a death in step 5, and one in step 13."""
    rank = int(str(row["rank"]))
    kept = {name: row[name] for name in ("optimizer", "schedule", "lead", "hears_late_s", "garbage")}
    deaths = (f"{rank} 5 {row['moment']}", f"{(rank + 1) % 3} 13 {row['again']}")
    return Run(deaths, options=tuple(str(row["behind"]).split()), **kept)  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--number", type=int, default=400)
    given = parser.parse_args()
    lines = given.report.read_text().splitlines() if given.report.exists() else []
    done = {json.loads(line)["row"]: json.loads(line) for line in lines}
    for number, row in enumerate(rows(given.number)):
        name = json.dumps(row, sort_keys=True)
        if name not in done:
            with tempfile.TemporaryDirectory(prefix="late-matrix-") as folder:
                outcome = perform(run_of(row), Path(folder))
            done[name] = {"row": name, "wrong": outcome.wrong, "num_killed": outcome.num_killed}
            with given.report.open("a") as report:
                report.write(json.dumps(done[name]) + "\n")
            print(number, outcome.wrong or "same bits", outcome.num_killed, name, flush=True)
    bad = [each for each in done.values() if each["wrong"]]
    print(f"{len(done)} runs, {sum(each['num_killed'] for each in done.values())} deaths, {len(bad)} wrong")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
