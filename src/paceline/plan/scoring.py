"""Scores kept predictions with traces of real runs, and shows how well each kind was predicted."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from paceline.planning import Cluster, HostLink
from paceline.planning.measured_steps import MeasuredSteps, measured_steps
from paceline.planning.predictions import Outcome, keep, scored_pairs, scores
from paceline_lab.report.terminal import table

PREDICTIONS = "predictions.jsonl"


def show_scores(folder: Path, traces: Sequence[Path], *, as_json: bool) -> None:
    """Add the outcomes of `traces` to the predictions kept in `folder`, and print the score of every kind.

    Raises:
        ConfigurationError: A trace cannot be read, or nothing was ever predicted.
    """
    kept = folder / PREDICTIONS
    scores(kept)  # refuses before anything is written
    runs = [measured_steps(trace) for trace in traces]
    keep(kept, map(_outcome, runs))
    found = scores(kept)
    scored = {outcome.run for _, outcome in scored_pairs(kept)}
    for trace, run in zip(traces, runs, strict=True):
        if run.run not in scored:
            print(f"{trace} scores nothing: {_unscored(run)}", file=sys.stderr)
        elif run.ranks_of_host is None:
            print(f"{trace} does not say which ranks shared a host: taken as predicted", file=sys.stderr)
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


def _outcome(run: MeasuredSteps) -> Outcome:
    return Outcome(
        run.name, run.num_ranks, median(run.steps_s), run.ranks_of_host, run.num_micro_steps, run.run
    )


def _unscored(run: MeasuredSteps) -> str:
    """What was not predicted, and how it would be, for the next run."""
    words = f"{run.name} on {run.num_ranks} rank{'s' * (run.num_ranks != 1)}"
    option = ""
    if run.ranks_of_host is not None and run.num_ranks > 1:
        words += f", {', '.join(map(str, run.ranks_of_host))} a host,"
        most = max(run.ranks_of_host)
        option = f" --ranks-per-host {most}"
        like_it = Cluster.of_equal_hosts(run.num_ranks, HostLink(1.0), most).ranks_of_host
        if sorted(like_it) != sorted(run.ranks_of_host):
            return (
                f"{words} was not predicted before: --ranks-per-host asks about full hosts, but for the last"
            )
    if run.num_micro_steps > 1:
        words += f" in steps of {run.num_micro_steps} micro-steps"
        option += f" --sync-every {run.num_micro_steps}"
    return f"{words} was not predicted before. Predict the next one: paceline plan ... --to {run.num_ranks}{option}"
