"""Does a training lose or double a sample, hang, or end with other parameters, when ranks die at random? A search.

    paceline study survival --cases 200            # resumed where the stored report ends
    paceline study survival --cases 200 --first-seed 1000
    paceline study survival --case 17              # one, with what it printed
    paceline study survival --hosts --cases 50     # emulated hosts that are hit; as root
    paceline study survival --stall --cases 10     # where the time of a recovery goes, on one host; jobs of five deaths
    paceline study survival --beside torchrun,torchft --cases 3  # rounds; torchft has to be installed
    paceline study survival --cost                 # what a run without a loss costs, beside a plain loop

Each case is a job (`cases`): 3 to 8 ranks on this host, of which some are lost at moments of steps, in recoveries, two
at once, or from without at any time; or 3 to 8 ranks on emulated hosts. Afterwards nothing may have been lost: see
`job.problems`. On one host processes are forks of one that has torch loaded (tests/harness/warm.py), so that a case
takes seconds, and what is measured from a death includes that the fork's end is passed on.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from paceline_lab.bench.provenance import collect
from paceline_lab.checkout import in_repository
from paceline_lab.experiments.options import REPORT_FOLDER, Quick, ReportFolder
from paceline_lab.experiments.survival.beside import compare
from paceline_lab.experiments.survival.cases import random_hosts_job, random_job
from paceline_lab.experiments.survival.cost import measure
from paceline_lab.experiments.survival.hosts import run_on_hosts
from paceline_lab.experiments.survival.job import (
    Job,
    Outcome,
    faults_of,
    problems,
    run_job,
    standstills_s,
    trained,
)
from paceline_lab.experiments.survival.stall import measure_stalls
from paceline_lab.experiments.survival.training import parser_of
from paceline_lab.report.terminal import progress_bar

sys.path.insert(0, str(in_repository("tests", "a Python that starts at once (tests/harness)")))

from harness import warm  # found in the tests' folder

QUICK_CASES = 5
_ALL_LOST = "were lost, and with them what they had trained"


@dataclass
class Found:
    """What a search has come to.

    Attributes:
        first_seed: Of the cases, which have consecutive ones.
        on_hosts: Whether they are on emulated hosts.
        num_cases: That were run.
        happened: How often what happened when: "SIGKILL: forward", or what was done to a host.
        num_losses: Ranks that were lost within training.
        num_joins: Ranks that came in.
        num_hangs: Jobs that did not end.
        samples_lost: In all cases.
        samples_doubled: In all cases.
        again: For each case, how many steps were computed again.
        standstills_s: From a death, or a blow to a host, to the next completed step.
        steps_s: The median step of each case.
        loads: The machine's load average behind each case.
        all_lost: Seeds of cases in which all ranks died before a replacement was in: the launch ends, and says so.
        failures: Seeds, with what did not hold.
    """

    first_seed: int
    on_hosts: bool = False
    num_cases: int = 0
    happened: dict[str, int] = field(default_factory=dict)
    num_losses: int = 0
    num_joins: int = 0
    num_hangs: int = 0
    samples_lost: int = 0
    samples_doubled: int = 0
    again: list[int] = field(default_factory=list)
    standstills_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    all_lost: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def perform(self, seed: int) -> Outcome:
        """Run a case, and count what came out."""
        with tempfile.TemporaryDirectory() as folder:
            if self.on_hosts:
                on_hosts = random_hosts_job(seed)
                if not any("stopped" in blow.kind for blow in on_hosts.blows):  # who asks is not who computes
                    on_hosts = replace(
                        on_hosts, job=replace(on_hosts.job, python=str(warm.folder() / "python"))
                    )
                job, found = on_hosts.job, run_on_hosts(on_hosts, Path(folder))
                outcome, stills_s, events = (
                    found.outcome,
                    found.stalls_s,
                    [str(each) for each in on_hosts.blows],
                )
            else:
                job = replace(random_job(seed), python=str(warm.folder() / "python"))
                outcome = run_job(job, Path(folder))
                stills_s = standstills_s(outcome)
                events = [f"{note['how']}: {note['moment']}" for note in faults_of(outcome)]
                events += ["SIGKILL: from without"] * len(outcome.kills)
        self._count(seed, job, outcome, events)
        self.standstills_s += [round(each, 4) for each in stills_s if each < job.limit_s]
        return outcome

    def _count(self, seed: int, job: Job, outcome: Outcome, events: Sequence[str]) -> None:
        args = parser_of().parse_args(["/", *job.options])
        counts = trained(outcome, args.samples, args.epochs)
        histories: list[list[dict[str, Any]]] = [end["history"] for end in outcome.ends]
        history = max(histories, key=len, default=[])
        self.num_cases += 1
        self.happened = dict(sorted((Counter(self.happened) + Counter(events)).items()))
        self.num_losses += sum(len(change["lost"]) for change in history)
        self.num_joins += sum(change["num_new"] for change in history)
        self.num_hangs += outcome.has_hung
        self.loads.append(round(os.getloadavg()[0], 1))
        if _ALL_LOST in outcome.said and outcome.code == 1 and not outcome.num_left:
            self.all_lost.append(seed)
            return
        self.samples_lost += counts.num_lost
        self.samples_doubled += counts.num_doubled
        self.again.append(counts.num_tries - counts.num_steps)
        self.steps_s.append(round(_median_step_s(outcome), 4))
        if found := problems(job, outcome):
            self.failures.append(f"seed {seed}: {'; '.join(found)}")

    def words(self) -> str:
        """In some lines."""
        stills = sorted(self.standstills_s)
        times = "none"
        if stills:
            p50, p95 = (_quantile(stills, part) * 1e3 for part in (0.5, 0.95))
            times = f"p50 {p50:.0f} ms, p95 {p95:.0f} ms, max {stills[-1] * 1e3:.0f} ms"
        step_ms = statistics.median(self.steps_s) * 1e3 if self.steps_s else 0.0
        return (
            f"{self.num_cases} cases, {sum(self.happened.values())} faults: "
            f"{self.num_losses} ranks lost, {self.num_joins} came in, {self.num_hangs} hangs, "
            f"{self.samples_lost} samples lost, {self.samples_doubled} doubled, {len(self.failures)} failures; "
            f"all ranks lost at once: {len(self.all_lost)}\n"
            f"from a death to the next completed step: {times}; a step: {step_ms:.0f} ms; "
            f"load {statistics.median(self.loads or [0.0]):.0f} (median)"
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
    cases: Annotated[int, typer.Option(min=1, help="Number of cases, rounds or jobs.")] = 200,
    first_seed: Annotated[int, typer.Option(help="Random seed of the first case. The others follow.")] = 0,
    case: Annotated[int | None, typer.Option(help="A single case by its seed, with its output.")] = None,
    hosts: Annotated[bool, typer.Option("--hosts", help="On emulated hosts that are hit. As root.")] = False,
    stall: Annotated[
        bool, typer.Option("--stall", help="Instead: where the time of a recovery goes.")
    ] = False,
    beside: Annotated[
        str, typer.Option(help="Instead: the same training and kills under others: torchrun,torchft.")
    ] = "",
    cost: Annotated[bool, typer.Option(help="Instead: what a run without a loss costs.")] = False,
    quick: Quick = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Let ranks of small trainings die at random moments, and count what was lost."""
    torch.set_num_threads(1)  # of the small model that is trained for comparison
    path = report_folder / ("survival-hosts.json" if hosts else "survival.json")
    if cost:
        for name, deterministic in (("elastic", False), ("deterministic", True)):
            found_cost = measure(2, 3 if quick else 40, deterministic=deterministic)
            print(found_cost.words(name))
        return
    if stall:
        print(measure_stalls(1 if quick else cases).words())
        return
    if beside:
        stored_at = None if quick else report_folder / "survival-beside.json"
        sides = compare(["paceline", *beside.split(",")], 1 if quick else cases, stored_at)
        print("\n".join(side.words(name) for name, side in sides.items()))
        return
    if case is not None:
        found = Found(case, hosts)
        print(found.perform(case).said)
    else:
        found = Found(first_seed, hosts) if quick else stored(path, first_seed, hosts)
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
                words = f"{found.failures[-1]} ({time.monotonic() - began_s:.0f} s)"
                print(f"{words}\n{outcome.said}", file=sys.stderr, flush=True)
            show(found.num_cases / count)
            if path is not None:
                store(found, path)


def store(found: Found, path: Path) -> None:
    """Write what was found, for `stored`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"provenance": asdict(collect(6)), "summary": found.words()}
    path.write_text(json.dumps({**about, **vars(found)}, indent=2) + "\n")


def stored(path: Path, first_seed: int, on_hosts: bool = False) -> Found:
    """What the stored report has found; nothing, if it is of other seeds."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if record.get("first_seed") != first_seed:
        return Found(first_seed, on_hosts)
    for name in ("provenance", "summary"):
        record.pop(name)
    return Found(**record)
