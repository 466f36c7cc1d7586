"""Does a training lose or double a sample, hang, or end with other parameters, when ranks die at random? A search.

    paceline study survival --cases 200            # resumed where the stored report ends
    paceline study survival --cases 200 --first-seed 1000
    paceline study survival --case 17              # one, with what it printed
    paceline study survival --cost                 # what a run without a loss costs, beside a plain loop

Each case is a job of 3 to 6 ranks on this host, some of which are lost: at a moment of a step, in a recovery, two at
once, or from without at any time. Afterwards nothing may have been lost: see `job.problems`. Processes are forks of one
that has torch loaded (tests/harness/warm.py), so that a case takes seconds.
"""

import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline_lab.bench.provenance import collect
from paceline_lab.checkout import in_repository
from paceline_lab.experiments.options import REPORT_FOLDER, Quick, ReportFolder
from paceline_lab.experiments.survival.cost import measure
from paceline_lab.experiments.survival.job import Job, Outcome, problems, run_job, standstills_s, trained
from paceline_lab.experiments.survival.training import MOMENTS, Fault, parser_of
from paceline_lab.report.terminal import progress_bar

sys.path.insert(0, str(in_repository("tests", "a Python that starts at once (tests/harness)")))

from harness import warm  # found in the tests' folder

QUICK_CASES = 5
_EPOCHS, _STEPS = 4, 36
_ALL_LOST = "were lost, and with them what they had trained"
_WITHIN = [moment for moment in MOMENTS if moment not in ("constructing", "recovery", "following")]


def random_job(seed: int) -> Job:
    """The case of a seed."""
    dice = random.Random(seed)
    num_ranks = dice.randint(3, 6)
    options = ["--epochs", str(_EPOCHS), "--optimizer", dice.choice(["sgd", "adamw"])]
    options += [
        "--backend",
        dice.choice(["gloo", "gloo", "paceline"]),
        "--pause-ms",
        dice.choice(["0", "20"]),
    ]
    if dice.random() < 0.25:
        options += ["--workers", "1"]
    job = Job(num_ranks, 2, tuple(options), seed=seed, python=str(warm.folder() / "python"))
    if dice.random() < 0.4:
        return Job(**{**vars(job), "kills_every_s": dice.choice([0.3, 0.6]), "num_kills": dice.randint(1, 4)})
    faults = []
    for _ in range(dice.randint(1, 3)):
        step, rank = dice.randrange(_STEPS), dice.randrange(num_ranks)
        how = dice.choice(["SIGKILL", "SIGKILL", "exit", "error"])
        faults.append(Fault(rank, step, dice.choice(_WITHIN), how))
        if dice.random() < 0.3:  # at once, or while the others recover
            moment = dice.choice([*_WITHIN, "recovery", "recovery", "following"])
            faults.append(Fault(dice.randrange(num_ranks - 1), step, moment, "SIGKILL"))
    return Job(**{**vars(job), "faults": tuple(faults)})


@dataclass
class Found:
    """What a search has come to.

    Attributes:
        first_seed: Of the cases, which have consecutive ones.
        num_cases: That were run.
        num_losses: Ranks that were lost within training.
        num_joins: Ranks that came in.
        num_hangs: Jobs that did not end.
        samples_lost: In all cases.
        samples_doubled: In all cases.
        again: For each change without a rank, how many steps were computed again.
        standstills_s: From a death to the next completed step.
        steps_s: The median step of each case.
        all_lost: Seeds of cases in which all ranks died before a replacement was in: the launch ends, and says so.
        failures: Seeds, with what did not hold.
    """

    first_seed: int
    num_cases: int = 0
    num_losses: int = 0
    num_joins: int = 0
    num_hangs: int = 0
    samples_lost: int = 0
    samples_doubled: int = 0
    again: list[int] = field(default_factory=list)
    standstills_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    all_lost: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def perform(self, seed: int) -> Outcome:
        """Run a case, and count what came out."""
        job = random_job(seed)
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_job(job, Path(folder))
        args = parser_of().parse_args(["/", *job.options])
        counts = trained(outcome, args.samples, args.epochs)
        histories: list[list[dict[str, Any]]] = [end["history"] for end in outcome.ends]
        history = max(histories, key=len, default=[])
        self.num_cases += 1
        self.num_losses += sum(len(change["lost"]) for change in history)
        self.num_joins += sum(change["num_new"] for change in history)
        self.num_hangs += outcome.code is None
        if _ALL_LOST in outcome.said and outcome.code == 1 and not outcome.num_left:
            self.all_lost.append(seed)
            return outcome
        self.samples_lost += counts.num_lost
        self.samples_doubled += counts.num_doubled
        self.again.append(counts.num_tries - counts.num_steps)
        self.standstills_s += [round(each, 4) for each in standstills_s(outcome)]
        self.steps_s.append(round(_median_step_s(outcome), 4))
        if found := problems(job, outcome):
            self.failures.append(f"seed {seed}: {'; '.join(found)}")
        return outcome

    def words(self) -> str:
        """In some lines."""
        stills = sorted(self.standstills_s)
        times = "none"
        if stills:
            p50, p95 = (_quantile(stills, part) * 1e3 for part in (0.5, 0.95))
            times = f"p50 {p50:.0f} ms, p95 {p95:.0f} ms, max {stills[-1] * 1e3:.0f} ms"
        step_ms = statistics.median(self.steps_s) * 1e3 if self.steps_s else 0.0
        return (
            f"{self.num_cases} cases: {self.num_losses} ranks lost, {self.num_joins} came in, {self.num_hangs} hangs, "
            f"{self.samples_lost} samples lost, {self.samples_doubled} doubled, {len(self.failures)} failures; "
            f"all ranks lost at once: {len(self.all_lost)}\n"
            f"from a death to the next completed step: {times}; a step: {step_ms:.0f} ms"
        )


def _median_step_s(outcome: Outcome) -> float:
    gaps = []
    for notes in outcome.notes:
        times = [note["at"] for note in notes if note["what"] == "done"]
        gaps += [later - sooner for sooner, later in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def main(
    cases: Annotated[int, typer.Option(min=1, help="Number of cases.")] = 200,
    first_seed: Annotated[int, typer.Option(help="Random seed of the first case. The others follow.")] = 0,
    case: Annotated[int | None, typer.Option(help="A single case by its seed, with its output.")] = None,
    cost: Annotated[bool, typer.Option(help="Instead: what a run without a loss costs.")] = False,
    quick: Quick = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Let ranks of small trainings die at random moments, and count what was lost."""
    path = report_folder / "survival.json"
    if cost:
        for name, deterministic in (("elastic", False), ("deterministic", True)):
            found_cost = measure(2, 3 if quick else 40, deterministic=deterministic)
            print(found_cost.words(name))
        return
    if case is not None:
        found = Found(case)
        print(found.perform(case).said)
    else:
        found = Found(first_seed) if quick else stored(path, first_seed)
        _search(found, QUICK_CASES if quick else cases, None if quick else path)
    print(found.words())
    for failure in found.failures:
        print(failure)
    if found.failures:
        sys.exit(1)


def _search(found: Found, count: int, path: Path | None) -> None:
    """Run cases until there were `count`, and store what was found after each."""
    with progress_bar("random cases") as show:
        while found.num_cases < count:
            began_s = time.monotonic()
            outcome = found.perform(found.first_seed + found.num_cases)
            if found.failures and found.failures[-1].startswith(
                f"seed {found.first_seed + found.num_cases - 1}:"
            ):
                print(
                    f"{found.failures[-1]} ({time.monotonic() - began_s:.0f} s)\n{outcome.said}",
                    file=sys.stderr,
                )
            show(found.num_cases / count)
            if path is not None:
                store(found, path)


def store(found: Found, path: Path) -> None:
    """Write what was found, for `stored`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"provenance": asdict(collect(6)), "summary": found.words()}
    path.write_text(json.dumps({**about, **vars(found)}, indent=2) + "\n")


def stored(path: Path, first_seed: int) -> Found:
    """What the stored report has found; nothing, if it is of other seeds."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if record.get("first_seed") != first_seed:
        return Found(first_seed)
    for name in ("provenance", "summary"):
        record.pop(name)
    return Found(**record)
