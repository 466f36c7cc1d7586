"""Run what a plan is missing, keep each trial as soon as it is finished, and report what there is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from paceline.lab.bench.provenance import load_average
from paceline.lab.report.terminal import progress_bar
from paceline.lab.study.plan import Plan
from paceline.lab.study.report import draw, make_report, show
from paceline.lab.study.results import Results
from paceline.lab.study.store import Store
from paceline.lab.study.trial import run_trial


def study(
    plan: Plan, file: Path, data: Path | None, folder: Path, console: Console, *, only_show: bool = False
) -> dict[str, Any]:
    """Complete a plan, then print, draw and write what was found.

    Args:
        plan: What is asked for.
        file: Of finished trials; whatever stops this, they are kept there.
        data: Where the samples are; None: the usual places.
        folder: For the JSON and the figure.
        console: Gets tables and verdicts.
        only_show: Whether to compute nothing.

    Returns:
        What was written as JSON.

    Raises:
        ConfigurationError: The samples are not there, or `file` is something else. Nothing was computed.
    """
    store, load_before = Store(file), load_average()
    if not only_show:
        with progress_bar(f"large-batch, {plan.task.name}") as progress:
            complete(plan, store, data, progress)
    results = Results(plan, store)
    report = make_report(results, load_before, len(plan.next_trials(store)))
    path = folder / f"{report.name}.json"
    path.write_text(report.to_json() + "\n")
    draw(results, report, folder)
    show(results, report, console)
    console.print(f"trials: {file}; report: {path}", highlight=False, soft_wrap=True)
    record: dict[str, Any] = json.loads(report.to_json())
    return record


def complete(plan: Plan, store: Store, data: Path | None, progress: Callable[[float], None]) -> int:
    """Compute all trials of a plan that the store does not have; returns how many that were.

    Args:
        plan: What is asked for.
        store: Gets a line for each finished trial.
        data: Where the samples are; None: the usual places.
        progress: Told the share of the plan that is done, after each trial.
    """
    num_done = 0
    if not plan.next_trials(store):
        return 0
    samples = plan.task.load(data, plan.task.num_train)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small lose by more, and sums would depend on the number
    try:
        while missing := plan.next_trials(store):
            for trial in missing:
                store.add(trial, run_trial(trial, samples))
                num_done += 1
                progress(min(1.0, plan.num_there(store) / plan.num_trials()))
    finally:
        torch.set_num_threads(threads)
    return num_done
