"""Run what a plan is missing, and keep each trial as soon as it is finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from paceline.study.plan import Plan
from paceline.study.store import Store, Trial
from paceline.study.trial import run_trial


def run_plan(plan: Plan, store: Store, data: Path | None, note: Callable[[Trial, int], None]) -> int:
    """Compute all trials of a plan that the store does not have; returns how many that were.

    Args:
        plan: What is asked for.
        store: Gets a line for each finished trial; whatever stops this, they are kept.
        data: Where the samples are; None: the usual places.
        note: Called before each trial with it and the number of those finished now.

    Raises:
        ConfigurationError: The samples are not there. Nothing was computed.
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
                note(trial, num_done)
                store.add(trial, run_trial(trial, samples))
                num_done += 1
    finally:
        torch.set_num_threads(threads)
    return num_done
