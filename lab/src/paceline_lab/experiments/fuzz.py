"""Search for random training programs with other gradients than one process on the whole batch. Nothing is timed.

    paceline study fuzz --programs 5000 --resume       # after an interruption, or in parts
    paceline study fuzz --programs 5000
    paceline study fuzz --kind sharded                 # programs of one kind; another report
    paceline study fuzz --program '{"seed": 7, ...}'   # as a failure prints it

The generator and the oracle are those of the tests; CI performs 200 programs of other seeds. A failure is shrunk and
printed with the command that repeats it; the exit status is then 1. The report is written after every 50 programs, so a
search may be interrupted. A changed generator draws other programs from the same seeds, so the search begins again.
"""

import hashlib
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline_lab.bench.provenance import collect
from paceline_lab.checkout import in_repository
from paceline_lab.experiments.options import REPORT_FOLDER, Quick, ReportFolder
from paceline_lab.report.terminal import progress_bar

_TESTS = in_repository("tests", "the generator of random programs (tests/harness)")
sys.path.insert(0, str(_TESTS))

from harness.program_oracle import NOT_REPEATED, explain, find_failures  # noqa: E402  # found in the tests' folder
from harness.random_programs import OPERATIONS, Program  # noqa: E402
from harness.random_programs import draw as draw_program  # noqa: E402
from harness.ranks import close_pools, pool  # noqa: E402

BATCH = 50  # programs of one launch
DEADLINE_S = 600.0  # of a launch; a busy machine took longer than the tests' 120 s
QUICK_PROGRAMS = 20
MAX_REPORTS = 5  # beyond them failures are counted, not shrunk


@dataclass
class Found:
    """The state of a search.

    Attributes:
        first_seed: Seed of the first program. Seeds are consecutive.
        num_programs: Number of programs that were performed.
        duration_s: Time of the search.
        kinds: Number of programs of each kind.
        options: Number of times that each option was given to the wrapper or the optimizer.
        operations: Number of times that each operation was performed.
        failures: Seeds that failed, and the report of the first one.
        not_repeated: Output of launches that failed, but passed when launched in two halves.
    """

    first_seed: int
    num_programs: int = 0
    duration_s: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    options: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    not_repeated: list[str] = field(default_factory=list)

    def perform(self, programs: list[Program]) -> None:
        """Perform programs and count them."""
        began_s = time.perf_counter()
        for num_ranks in (2, 3, 4):
            mine = [one for one in programs if one.num_ranks == num_ranks]
            failures = find_failures(mine, pool(num_ranks), DEADLINE_S) if mine else {}
            for program, words in failures.items():
                if words[0].startswith(NOT_REPEATED):
                    print(words[0], file=sys.stderr, flush=True)
                    self.not_repeated.append(f"seed {program.seed} or after it: {words[0][:6000]}")
                    continue
                is_shrunk = len(self.failures) < MAX_REPORTS
                report = explain(program, words, pool) if is_shrunk else f"seed {program.seed}: {words[0]}"
                print(report, file=sys.stderr, flush=True)
                self.failures.append(report)
        self.num_programs += len(programs)
        self.duration_s += time.perf_counter() - began_s
        self.kinds.update(one.kind for one in programs)
        self.options.update(_option(name, given) for one in programs for name, given in one.options.items())
        self.operations.update(name for one in programs for name, _ in one.operations)


def main(
    programs: Annotated[int, typer.Option(min=1, help="Number of programs.")] = 5000,
    first_seed: Annotated[
        int, typer.Option(help="Random seed of the first program. The others follow.")
    ] = 100_000,
    program: Annotated[str | None, typer.Option(help="A single program, as a failure prints it.")] = None,
    kind: Annotated[str | None, typer.Option(help="Draw programs of this kind alone.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue where the stored report ends.")] = False,
    quick: Quick = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Perform random programs on 2 to 4 ranks beside bare copies of the model and torch's class."""
    if kind is not None and kind not in OPERATIONS:
        raise typer.BadParameter(f"--kind {kind}: there are {', '.join(OPERATIONS)}.")
    path = report_folder / ("fuzz.json" if kind is None else f"fuzz-{kind.replace(' ', '-')}.json")
    found = stored(path, first_seed) if resume else Found(first_seed)
    try:
        if program is not None:
            found.perform([_read(program)])
        else:
            count = QUICK_PROGRAMS if quick else programs
            print(f"seeds {first_seed + found.num_programs} to {first_seed + count - 1}", flush=True)
            _search(found, count, None if quick else path, kind)
    finally:
        close_pools()
    print(
        f"{found.num_programs} programs, {len(found.failures)} mismatches, {found.duration_s:.0f} s; "
        f"{len(found.not_repeated)} launches failed once, and not again in halves"
    )
    if found.failures:
        sys.exit(1)


def _search(found: Found, count: int, path: Path | None, kind: str | None) -> None:
    with progress_bar("random programs") as show:
        while found.num_programs < count:
            start = found.first_seed + found.num_programs
            stop = min(start + BATCH, found.first_seed + count)
            found.perform([draw_program(seed, kind) for seed in range(start, stop)])
            show(found.num_programs / count)
            if path is not None:
                store(found, path)


def store(found: Found, path: Path) -> None:
    """Write what was found, for `stored`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"generator": _generator(), "provenance": asdict(collect(3))}
    path.write_text(json.dumps({**about, **vars(found)}, indent=2) + "\n")


def stored(path: Path, first_seed: int) -> Found:
    """Return the stored report's state; an empty one if it is of other seeds or of another generator."""
    record = json.loads(path.read_text()) if path.exists() else {}
    if record.pop("generator", None) != _generator() or record["first_seed"] != first_seed:
        return Found(first_seed)
    del record["provenance"]
    counts: dict[str, Any] = {name: Counter(record.pop(name)) for name in ("kinds", "options", "operations")}
    return Found(**record, **counts)


def _generator() -> str:
    return hashlib.sha256((_TESTS / "harness" / "random_programs.py").read_bytes()).hexdigest()[:12]


def _option(name: str, given: Any) -> str:
    return f"{name}={given}" if isinstance(given, str) else name


def _read(text: str) -> Program:
    try:
        return Program.from_json(text)
    except (ValueError, TypeError, KeyError) as error:
        raise typer.BadParameter(
            f"this is no program ({error}). Pass the line that a failure prints after --program."
        ) from error
