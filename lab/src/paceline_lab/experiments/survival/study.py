"""Search for trainings that lose or double a sample, hang, or end with other parameters, when ranks die at random.

    paceline study survival --cases 200            # seeds that the report has are left out
    paceline study survival --cases 200 --first-seed 1000      # adds to the same report, also at the same time
    paceline study survival --case 17              # one, with what it printed
    paceline study survival --hosts --cases 50     # emulated hosts that are hit; as root
    paceline study survival --guest --cases 50     # an engine starts the ranks; hosts need root
    paceline study survival --guest --engine slurm --cases 5     # only this engine; `make test-engines` installs it
    paceline study survival --stall --cases 10     # where the time of recoveries goes, on one host: 10 jobs a kind
    paceline study survival --beside torchrun,torchft --cases 3  # rounds; torchft has to be installed
    paceline study survival --cost                 # what a run without a loss costs, beside a plain loop

Each case is a job (`cases`): 3 to 8 ranks on this host or on emulated hosts. On this host, ranks are lost at moments of
steps, in recoveries, two at once, or from without at any time. Afterwards no sample may be lost: see `job.problems`. On
one host processes are forks of one that has torch loaded (tests/harness/warm.py), so that a case takes seconds. Times
from a death include that the fork's end is passed on.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from paceline_lab.checkout import in_repository
from paceline_lab.experiments.options import REPORT_FOLDER, Quick, ReportFolder
from paceline_lab.experiments.survival.beside import compare
from paceline_lab.experiments.survival.beside import draw as draw_sides
from paceline_lab.experiments.survival.cases import random_hosts_job, random_job
from paceline_lab.experiments.survival.cost import measure
from paceline_lab.experiments.survival.guests import (
    ENGINES,
    engine_of,
    guest_case,
    guest_words,
    missing,
    random_guest_job,
    run_guest_job,
)
from paceline_lab.experiments.survival.hosts import run_on_hosts
from paceline_lab.experiments.survival.job import Job, Outcome, problems, run_job, trained
from paceline_lab.experiments.survival.record import Case, Report, commit, words
from paceline_lab.experiments.survival.stall import measure_stalls
from paceline_lab.experiments.survival.standstills import standstills
from paceline_lab.experiments.survival.training import parser_of
from paceline_lab.report.terminal import progress_bar

sys.path.insert(0, str(in_repository("tests", "a Python that starts at once (tests/harness)")))

from harness import warm  # found in the tests' folder

QUICK_CASES = 5
_ALL_LOST = "were lost, and with them what they had trained"


@dataclass(frozen=True)
class Performed:
    """A case that was run: its settings and outcome, its events, and its standstills with their cause."""

    job: Job
    outcome: Outcome
    happened: Sequence[str]
    standstills: Sequence[tuple[str, float, float]]


def perform(seed: int, on_hosts: bool, folder: Path) -> Performed:
    """Run a case. Blocks."""
    python = str(warm.folder() / "python")
    if not on_hosts:
        job = replace(random_job(seed), python=python)
        outcome = run_job(job, folder)
        happened = [f"{note['how']}: {note['moment']}" for note in outcome.of("fault")]
        happened += ["SIGKILL: from without"] * len(outcome.kills)
        stills = [(each.kind, each.seconds, each.since_last_s) for each in standstills(outcome)]
        return Performed(job, outcome, happened, stills)
    on = random_hosts_job(seed)
    if not any("stopped" in blow.kind for blow in on.blows):  # who asks is not who computes
        on = replace(on, job=replace(on.job, python=python))
    found = run_on_hosts(on, folder)
    blows = [str(each) for each in on.blows]
    stills = [(blow, s, s) for blow, s in zip(blows, found.stalls_s, strict=False) if s < on.job.limit_s]
    return Performed(on.job, found.outcome, blows, stills)


def _perform_guest(seed: int, folder: Path) -> tuple[Case, str]:
    """Run a case whose ranks an engine starts, and return its record and output. Blocks."""
    job = random_guest_job(seed)
    job = replace(job, job=replace(job.job, python=str(warm.folder() / "python")))
    found = run_guest_job(job, folder)
    performed = Performed(job.job, found.outcome, [str(event) for _, event in found.struck], ())
    return guest_case(case_of(seed, performed, 0.0), job, found), found.outcome.said


def case_of(seed: int, performed: Performed, took_s: float) -> Case:
    """Return the counts of an outcome."""
    outcome = performed.outcome
    args = parser_of().parse_args(["/", *performed.job.options])
    counts = trained(outcome, args.samples, args.epochs)
    histories: list[list[dict[str, Any]]] = [end["history"] for end in outcome.ends]
    history = max(histories, key=len, default=[])
    common = Case(
        seed=seed,
        commit=commit(),
        load=round(os.getloadavg()[0], 1),
        took_s=round(took_s, 1),
        happened=performed.happened,
        num_losses=sum(len(change["lost"]) for change in history),
        num_joins=sum(change["num_new"] for change in history),
        has_hung=outcome.has_hung,
    )
    if _ALL_LOST in outcome.said and outcome.code == 1 and not outcome.num_left:
        return replace(common, all_lost=True)
    return replace(
        common,
        step_s=round(_median_step_s(outcome), 4),
        samples_lost=counts.num_lost,
        samples_doubled=counts.num_doubled,
        num_again=counts.num_tries - counts.num_steps,
        standstills=[(kind, round(s, 4), round(last_s, 4)) for kind, s, last_s in performed.standstills],
        problem="; ".join(problems(performed.job, outcome)),
    )


def _median_step_s(outcome: Outcome) -> float:
    took_s = [note["took_s"] for notes in outcome.notes for note in notes if note["what"] == "done"]
    return statistics.median(took_s) if took_s else 0.0


def main(
    cases: Annotated[int, typer.Option(min=1, help="Number of cases, rounds or jobs.")] = 200,
    first_seed: Annotated[int, typer.Option(help="Random seed of the first case. The others follow.")] = 0,
    case: Annotated[int | None, typer.Option(help="A single case by its seed, with its output.")] = None,
    hosts: Annotated[bool, typer.Option("--hosts", help="On emulated hosts that are hit. As root.")] = False,
    guest: Annotated[
        bool, typer.Option("--guest", help="An engine starts the ranks. Most of them as root.")
    ] = False,
    engine: Annotated[str, typer.Option(help="With --guest: only cases of this engine.")] = "",
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
    kind = "guest" if guest else "hosts" if hosts else ""
    path = report_folder / f"{'-'.join(filter(None, ('survival', kind)))}.json"
    if cost:
        for name, deterministic in (("elastic", False), ("deterministic", True)):
            found_cost = measure(2, 3 if quick else 40, deterministic=deterministic)
            print(found_cost.words(name))
        return
    if stall:
        for kind, stalls in measure_stalls(1 if quick else cases):
            print(stalls.words(kind), flush=True)
        return
    if beside:
        stored_at = None if quick else report_folder / "survival-beside.json"
        sides = compare(["paceline", *beside.split(",")], 1 if quick else cases, stored_at)
        print("\n".join(side.words(name) for name, side in sides.items()))
        if stored_at is not None:
            draw_sides(json.loads(stored_at.read_text()), stored_at.with_suffix(".png"))
        return
    if case is not None:
        found = [_run(case, kind, is_shown=True)]
    elif quick:
        found = [_run(first_seed + i, kind) for i in range(QUICK_CASES)]
    else:
        report, wanted = Report(path), list(range(first_seed, first_seed + cases))
        if guest:
            skipped = {name: why for name in ENGINES if (why := missing(name))}
            print("\n".join(f"{name} is skipped: {why}" for name, why in skipped.items()))
            fitting = (seed for seed in itertools.count(first_seed) if engine in ("", engine_of(seed)))
            wanted = [seed for seed in itertools.islice(fitting, cases) if engine_of(seed) not in skipped]
        _search(report, wanted, kind)
        found = [each for each in report.cases() if each.seed in wanted]
        print(f"{path}, all seeds: {words(report.cases())}\n")
    print(words(found))
    if guest:
        print(guest_words(found))
    failures = [each for each in found if each.problem]
    for each in failures:
        print(f"seed {each.seed}: {each.problem}")
    if failures:
        sys.exit(1)


def _search(report: Report, seeds: Sequence[int], kind: str) -> None:
    with progress_bar("random cases") as show:
        for number, seed in enumerate(seeds, start=1):
            if seed not in {
                each.seed for each in report.cases()
            }:  # another search may have stored it meanwhile
                report.add(_run(seed, kind))
            show(number / len(seeds))


def _run(seed: int, kind: str, is_shown: bool = False) -> Case:
    """Run one case; print its output if it failed, or `is_shown`."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if kind == "guest":
            found, said = _perform_guest(seed, Path(folder))
        else:
            performed = perform(seed, kind == "hosts", Path(folder))
            found, said = case_of(seed, performed, 0.0), performed.outcome.said
    found = replace(found, took_s=round(time.monotonic() - began_s, 1))
    if is_shown:
        print(said)
    elif found.problem:
        words_of_it = f"seed {seed}: {found.problem} ({found.took_s:.0f} s)"
        print(f"{words_of_it}\n{said}", file=sys.stderr, flush=True)
    return found
