"""Does any random training program give other gradients than one process on the whole batch? A search, not a timing.

    python -m benchmarks.fuzz --programs 5000
    python -m benchmarks.fuzz --program '{"seed": 7, ...}'   # as a failure prints it

The generator and the oracle are those of the tests; CI performs 200 programs of other seeds. A failure is shrunk and
printed with the command that repeats it; the exit status is then 1.
"""

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.options import REPOSITORY, RESULTS_FOLDER, Quick, ResultsFolder, run_cli
from paceline.lab.report.terminal import progress_bar

sys.path.insert(0, str(REPOSITORY / "tests"))

from program_oracle import explain, find_failures  # found in the tests' folder
from random_programs import Program, draw
from ranks import close_pools, pool

BATCH = 50  # programs of one launch
QUICK_PROGRAMS = 20
MAX_REPORTS = 5  # beyond them failures are counted, not shrunk


@dataclass
class Found:
    """What a search has come to.

    Attributes:
        first_seed: Of the programs, which have consecutive ones.
        num_programs: That were performed.
        kinds: How many of each kind.
        operations: How often each was performed.
        failures: Seeds, and for the first of them the report.
    """

    first_seed: int
    num_programs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def perform(self, programs: list[Program]) -> None:
        """Perform programs and count them."""
        for num_ranks in (2, 3):
            mine = [one for one in programs if one.num_ranks == num_ranks]
            failures = find_failures(mine, pool(num_ranks)) if mine else {}
            for program, words in failures.items():
                is_shrunk = len(self.failures) < MAX_REPORTS
                report = explain(program, words, pool) if is_shrunk else f"seed {program.seed}: {words[0]}"
                print(report, file=sys.stderr, flush=True)
                self.failures.append(report)
        self.num_programs += len(programs)
        self.kinds.update(one.kind for one in programs)
        self.operations.update(name for one in programs for name, _ in one.operations)


def main(
    programs: Annotated[int, typer.Option(min=1, help="How many.")] = 5000,
    first_seed: Annotated[int, typer.Option(help="Of the first program; the others' follow.")] = 100_000,
    program: Annotated[str | None, typer.Option(help="This one, as a failure prints it.")] = None,
    quick: Quick = False,
    results_folder: ResultsFolder = RESULTS_FOLDER,
) -> None:
    """Perform random programs on 2 and 3 ranks beside bare copies of the model and torch's class."""
    found = Found(first_seed)
    began_s = time.perf_counter()
    try:
        if program is not None:
            found.perform([_read(program)])
        else:
            count = QUICK_PROGRAMS if quick else programs
            print(f"seeds {first_seed} to {first_seed + count - 1}", flush=True)
            with progress_bar("random programs") as show:
                for start in range(first_seed, first_seed + count, BATCH):
                    found.perform(
                        [draw(seed) for seed in range(start, min(start + BATCH, first_seed + count))]
                    )
                    show(found.num_programs / count)
    finally:
        close_pools()
    duration_s = time.perf_counter() - began_s
    print(f"{found.num_programs} programs, {len(found.failures)} mismatches, {duration_s:.0f} s")
    if program is None and not quick:
        _save(found, duration_s, results_folder)
    if found.failures:
        sys.exit(1)


def _read(text: str) -> Program:
    try:
        return Program.from_json(text)
    except (ValueError, TypeError, KeyError) as error:
        raise typer.BadParameter(
            f"this is no program ({error}). Pass the line that a failure prints after --program."
        ) from error


def _save(found: Found, duration_s: float, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "first_seed": found.first_seed,
        "num_programs": found.num_programs,
        "duration_s": round(duration_s, 1),
        "kinds": dict(found.kinds.most_common()),
        "operations": dict(found.operations.most_common()),
        "failures": found.failures,
    }
    (folder / "fuzz.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    run_cli(main)
