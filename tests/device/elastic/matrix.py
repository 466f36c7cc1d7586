"""Runs that cover all pairs of what matters when a rank dies: `python -m device.elastic.matrix` in `tests`.

    python -m device.elastic.matrix --report ../lab/results/survival-device.json --workers 2

The report has each run, what was wrong with it, and how many processes died. It is written after each run. A run that
is in the report is not performed again. Exit code 1: something was wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import random
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from device import late
from device.elastic.runs import Run, perform
from device.elastic.training import COLLECTIVES, HOST, PLACES, TASKS
from harness import warm

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
LIMIT_S = 1200.0
"""Until a run hangs. Runs are performed beside other load."""


def pairs_of(row: dict[str, object]) -> set[Any]:
    """Return the pairs of values that a row covers."""
    return {*itertools.combinations(((name, row[name]) for name in AXES), 2)}


def rows() -> Iterator[dict[str, object]]:
    """Yield rows of values, one of each axis, that cover all pairs; always the same ones.

    Each pair of two moments is in one row. So there are no more rows than such pairs.
    """
    drawn = random.Random(0)
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(AXES, 2)
        for a in AXES[one]
        for b in AXES[other]
    }
    moments = [*itertools.product(MOMENTS, MOMENTS)]
    drawn.shuffle(moments)
    for moment, again in moments:
        candidates = [
            {name: drawn.choice(values) for name, values in AXES.items()} | {"moment": moment, "again": again}
            for _ in range(30)
        ]
        best = max(candidates, key=lambda row: len(missing & pairs_of(row)))
        missing -= pairs_of(best)
        yield best
    assert not missing, f"pairs in no row: {missing}"


def run_of(row: dict[str, object]) -> Run:
    """Return the job of a row: a death in step 5, and one in step 13, of 20 steps."""
    rank = int(str(row["rank"]))
    kept = {name: row[name] for name in ("optimizer", "schedule", "lead", "hears_late_s", "garbage")}
    deaths = (f"{rank} 5 {row['moment']}", f"{(rank + 1) % 3} 13 {row['again']}")
    options = ("--epochs", "2", *str(row["behind"]).split())
    return Run(deaths, options=options, limit_s=LIMIT_S, **kept)  # type: ignore[arg-type]


def performed(row: dict[str, object]) -> dict[str, Any]:
    """Perform the job of a row; return what the report says of it."""
    with tempfile.TemporaryDirectory(prefix="late-matrix-") as folder:
        outcome = perform(run_of(row), Path(folder))
    said = {"said": outcome.said[-4000:]} if outcome.wrong else {}
    return {
        "row": row,
        "wrong": outcome.wrong,
        "num_killed": outcome.num_killed,
        "load": round(os.getloadavg()[0], 1),
        **said,
    }


def write(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Write a report of these runs, one run a line."""
    wrong = [each for each in runs if each["wrong"]]
    covered = set().union(*(pairs_of(each["row"]) for each in runs if not each["wrong"]))
    about = {
        "command": "python -m device.elastic.matrix",
        "torch": torch.__version__,
        "num_runs": len(runs),
        "num_deaths": sum(each["num_killed"] for each in runs),
        "num_wrong": len(wrong),
        "num_pairs": len(set().union(*map(pairs_of, rows()))),
        "num_pairs_covered": len(covered),
    }
    lines = ",\n  ".join(map(json.dumps, runs))
    part = path.with_suffix(".part")
    part.write_text(f'{json.dumps(about, indent=2)[:-2]},\n  "runs": [\n  {lines}\n  ]\n}}\n')
    part.rename(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--number", type=int, help="of the first rows; all by default")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    runs = json.loads(given.report.read_text())["runs"] if given.report.exists() else []
    done = [each["row"] for each in runs]
    waiting = [row for row in itertools.islice(rows(), given.number) if row not in done]
    warm.folder()  # the processes are forks of one, also those of several threads
    writing = threading.Lock()

    def perform_and_write(row: dict[str, object]) -> None:
        found = performed(row)
        with writing:
            runs.append(found)
            write(given.report, runs)
            print(len(runs), found["wrong"] or "same bits", found["num_killed"], row, flush=True)

    with concurrent.futures.ThreadPoolExecutor(given.workers) as threads:
        for each in [threads.submit(perform_and_write, row) for row in waiting]:
            each.result()
    bad = [each for each in runs if each["wrong"]]
    print(f"{len(runs)} runs, {sum(each['num_killed'] for each in runs)} deaths, {len(bad)} wrong")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
