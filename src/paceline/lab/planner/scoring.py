"""Scores kept predictions with traces of real runs, and shows how well each kind was predicted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from paceline.lab.report.terminal import table
from paceline.planning.predictions import Outcome, keep, scores
from paceline.planning.recorded_workload import measured_steps

PREDICTIONS = "predictions.jsonl"


def show_scores(folder: Path, traces: Sequence[Path], *, as_json: bool) -> None:
    """Add the outcomes of `traces` to the predictions kept in `folder`, and print the score of every kind.

    Raises:
        ConfigurationError: A trace cannot be read, or nothing was ever predicted.
    """
    kept = folder / PREDICTIONS
    scores(kept)  # refuses before anything is written
    runs = [measured_steps(trace) for trace in traces]
    keep(kept, [Outcome(run.name, run.num_ranks, median(run.steps_s)) for run in runs])
    found = scores(kept)
    if as_json:
        print(json.dumps([dataclasses.asdict(score) for score in found], indent=1))
        return
    if not found:
        print(
            f"No run of what was predicted has been scored yet. Record one with paceline.record_workload(FILE) on "
            f"rank 0 of a real job, then: paceline plan score FILE (predictions: {kept})."
        )
        return
    rows = [
        (
            score.kind,
            str(score.num),
            f"{score.median_error:.1%}",
            f"{score.worst_error:+.1%}",
            score.worst,
            f"{score.in_band:.0%}",
        )
        for score in found
    ]
    columns = ("kind", "runs", "median error", "worst", "which", "in the band of 80 %")
    Console().print(table("Predicted against measured steps", columns, rows))
