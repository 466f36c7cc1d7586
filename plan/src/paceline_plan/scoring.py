"""Scores kept predictions by traces of real runs, and shows how well each kind was predicted.

A prediction and a run that is scored are a line each in one file, which only grows. A run scores predictions of the
same workload, on as many ranks, equally placed on hosts, with as many micro-steps per step. A run counts once, with
the prediction that it scored first: one that is made afterwards knows more.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, mode
from typing import Any

from rich.console import Console

from paceline.errors import ConfigurationError
from paceline.given import parse_json
from paceline_plan.deployment import Cluster, HostLink
from paceline_plan.forecast import PREDICTIONS, KeptPrediction, keep, table
from paceline_plan.workload import RECORD_AGAIN, TRACE_FORMAT, TRACE_VERSION, check_version, parsed

_PARTS = ("forward_s", "backward_s", "optimizer_s", "other_s")


@dataclass(frozen=True)
class MeasuredRun:
    """A real run, as its trace says."""

    # which it was, so that it counts once: the same for a trace that is read again, also after it has grown
    run: str
    workload: str  # its name
    num_ranks: int  # of the job
    step_s: float  # the median
    ranks_of_host: Sequence[int] | None = None  # how many ranks each host had; None: the trace does not say
    num_micro_steps: int = 1  # of a step


@dataclass(frozen=True)
class Score:
    """The errors of predictions of one kind."""

    kind: str  # of prediction
    num: int  # how many were scored
    median_error: float  # median of |predicted / measured - 1|
    worst_error: float  # the largest, with its sign
    worst: str  # which it was
    in_band: float  # fraction of the measured steps that lay in the band


def show_scores(folder: Path, traces: Sequence[Path], *, as_json: bool) -> None:
    """Add runs to the predictions kept in `folder`, and print every kind's score. Raises ConfigurationError."""
    kept = folder / PREDICTIONS
    scores(kept)  # refuses before anything is written
    runs = [measured_run(trace) for trace in traces]
    keep(kept, runs)
    found = scores(kept)
    scored = {run.run for _, run in scored_pairs(kept)}
    for trace, run in zip(traces, runs, strict=True):
        if run.run not in scored:
            print(f"{trace} scores nothing: {_unscored(run)}", file=sys.stderr)
        elif run.ranks_of_host is None:
            print(f"{trace} does not say which ranks shared a host: taken as predicted", file=sys.stderr)
    if as_json:
        print(json.dumps([asdict(score) for score in found], indent=1))
        return
    if not found:
        print(
            f"No run of what was predicted has been scored yet. Record one with paceline_plan.record_workload(FILE) on "
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


def _unscored(run: MeasuredRun) -> str:
    """Say that a run was not predicted, and how to predict the next one."""
    words = f"{run.workload} on {run.num_ranks} rank{'s' * (run.num_ranks != 1)}"
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


def measured_run(path: Path) -> MeasuredRun:
    """Read how long the whole steps of a trace were. Raises ConfigurationError if it holds none."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the trace {path} cannot be read. {RECORD_AGAIN}") from error
    header = parsed(lines[0]) if lines else None
    if not isinstance(header, dict) or header.get("format") != TRACE_FORMAT:
        raise ConfigurationError(f"{path} is not a trace: only a trace of a real run scores. {RECORD_AGAIN}")
    check_version(header, TRACE_VERSION, path)
    every = [step for step in map(parsed, lines[1:]) if isinstance(step, dict)]
    steps = [step for step in every if not step.get("warm_up", True)]
    if not steps:
        raise ConfigurationError(f"the trace {path} holds no complete step after the warm-up. {RECORD_AGAIN}")
    try:
        num_micro_steps = mode(_num_micro_steps(step) for step in steps)
        num_ranks = int(header.get("num_ranks", 1))
        hosts = header.get("ranks_of_host", [1] if num_ranks == 1 else None)
        ranks_of_host = None if hosts is None else tuple(map(int, hosts))
        steps_s = [_length_s(step) for step in steps if _num_micro_steps(step) == num_micro_steps]
        _refuse_what_cannot_be(num_ranks, ranks_of_host, steps_s)
        run = hashlib.sha256("\n".join(lines[:2]).encode()).hexdigest()[:16]  # the first step's nanoseconds
        name = str(header["name"])
        return MeasuredRun(run, name, num_ranks, median(steps_s), ranks_of_host, num_micro_steps)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"the trace {path} is damaged ({type(error).__name__}: {error}). {RECORD_AGAIN}"
        ) from error


def _refuse_what_cannot_be(
    num_ranks: int, ranks_of_host: Sequence[int] | None, steps_s: Sequence[float]
) -> None:
    if ranks_of_host is not None and (sum(ranks_of_host) != num_ranks or min(ranks_of_host) < 1):
        raise ValueError(f"{num_ranks} ranks do not fit hosts with {ranks_of_host} ranks")
    if num_ranks < 1 or not all(0 < seconds < math.inf for seconds in steps_s):
        raise ValueError(f"{num_ranks} ranks, steps of {min(steps_s)} to {max(steps_s)} s")


def _num_micro_steps(step: Mapping[str, Any]) -> int:
    return 1 + len(step.get("earlier_s", ()))


def _length_s(step: Mapping[str, Any]) -> float:
    return sum(float(step[part]) for part in _PARTS) + sum(map(float, step.get("earlier_s", ())))


def scores(path: Path) -> list[Score]:
    """Score every prediction that a run came after, by kind. Raises ConfigurationError without a file."""
    pairs = scored_pairs(path)
    return [
        _score(kind, [x for x in pairs if x[0].kind == kind]) for kind in sorted({x.kind for x, _ in pairs})
    ]


def scored_pairs(path: Path) -> list[tuple[KeptPrediction, MeasuredRun]]:
    """Return each run's last measurement with its prediction. Raises ConfigurationError without a file."""
    said: list[KeptPrediction] = []
    pairs: dict[str, tuple[KeptPrediction, MeasuredRun]] = {}
    for record in _records(path):
        if isinstance(record, KeptPrediction):
            said.append(record)
            continue
        first = pairs[record.run][0] if record.run in pairs else None
        found = first or next((x for x in reversed(said) if _is_for(x, record)), None)
        if found is not None:
            pairs[record.run] = (found, record)
    return list(pairs.values())


def _is_for(said: KeptPrediction, run: MeasuredRun) -> bool:
    """Return whether that run is one of what was predicted, as far as its trace says."""
    predicted = (said.workload, said.num_ranks, said.num_micro_steps)
    if predicted != (run.workload, run.num_ranks, run.num_micro_steps):
        return False
    return run.ranks_of_host is None or sorted(said.ranks_of_host) == sorted(run.ranks_of_host)


def _score(kind: str, pairs: list[tuple[KeptPrediction, MeasuredRun]]) -> Score:
    errors = [said.step_s / seen.step_s - 1 for said, seen in pairs]
    worst = max(range(len(pairs)), key=lambda i: abs(errors[i]))
    said, _ = pairs[worst]
    inside = [said.low_s <= seen.step_s <= said.high_s for said, seen in pairs]
    return Score(
        kind,
        len(pairs),
        median(map(abs, errors)),
        errors[worst],
        f"{said.workload} on {said.num_ranks} rank{'s' * (said.num_ranks != 1)}",
        sum(inside) / len(inside),
    )


def _records(path: Path) -> Iterator[KeptPrediction | MeasuredRun]:
    """Yield all lines that can be read. A line that was cut off while it was written is skipped."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not text")
        raise ConfigurationError(
            f"there are no predictions in {path} ({reason}). `paceline plan SCRIPT` makes and keeps some."
        ) from error
    kinds: dict[str, Any] = {kind.__name__: kind for kind in (KeptPrediction, MeasuredRun)}
    for line in lines:
        try:
            record = parse_json(line)
            found = kinds[record.pop("record")](**record)
            if 0 < found.step_s < math.inf:
                yield found
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
