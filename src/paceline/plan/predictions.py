"""Keeps every prediction, and scores it when a run has measured what was predicted.

One JSON line each, in a file that only grows: a prediction when it is made, a measured run when it is scored. A
prediction is scored by runs of the same workload on as many ranks, which lay on hosts as predicted, in steps of as
many micro-steps. A run counts once, with the prediction that it scored first: one that is made afterwards knows more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from paceline.errors import ConfigurationError
from paceline.plan.deployment import Cluster

FILE = "predictions.jsonl"


@dataclass(frozen=True)
class KeptPrediction:
    """What was said.

    Attributes:
        workload: Its name.
        num_ranks: Of the cluster.
        kind: Of prediction, for the score: see `kind_of`.
        step_s: Predicted.
        low_s: Of the band.
        high_s: Of the band.
        where: The cluster and the plan, in words.
        ranks_of_host: How many ranks each host has.
        num_micro_steps: Of a step.
    """

    workload: str
    num_ranks: int
    kind: str
    step_s: float
    low_s: float
    high_s: float
    where: str
    ranks_of_host: Sequence[int]
    num_micro_steps: int = 1

    def is_for(self, run: MeasuredRun) -> bool:
        """Whether that run is one of what was predicted, as far as its trace says."""
        mine = (self.workload, self.num_ranks, self.num_micro_steps)
        if mine != (run.workload, run.num_ranks, run.num_micro_steps):
            return False
        return run.ranks_of_host is None or sorted(self.ranks_of_host) == sorted(run.ranks_of_host)


@dataclass(frozen=True)
class MeasuredRun:
    """What a real run was like, as its trace says.

    Attributes:
        run: Which it was, so that it counts once: the same for a trace that is read again, also after it has grown.
        workload: Its name.
        num_ranks: Of the job.
        step_s: The median.
        ranks_of_host: How many ranks each host had; None: the trace does not say.
        num_micro_steps: Of a step.
    """

    run: str
    workload: str
    num_ranks: int
    step_s: float
    ranks_of_host: Sequence[int] | None = None
    num_micro_steps: int = 1


@dataclass(frozen=True)
class Score:
    """How well one kind was predicted.

    Attributes:
        kind: Of prediction.
        num: How many were scored.
        median_error: Median of |predicted / measured - 1|.
        worst_error: The largest, with its sign.
        worst: Which it was.
        in_band: Fraction of the measured steps that lay in the band.
    """

    kind: str
    num: int
    median_error: float
    worst_error: float
    worst: str
    in_band: float


def kind_of(cluster: Cluster) -> str:
    """What sort of cluster it was for."""
    if cluster.num_ranks == 1:
        return "one rank"
    return "one host" if cluster.num_hosts == 1 else "several hosts"


def keep(path: Path, records: Iterable[KeptPrediction | MeasuredRun]) -> None:
    """Append to the file, on a line of its own if its last one was cut off.

    Raises:
        ConfigurationError: It cannot be written.
    """
    lines = [json.dumps({"record": type(record).__name__, **asdict(record)}) for record in records]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            text = "".join(f"{line}\n" for line in lines)
            if file.tell() and not _ends_a_line(file):
                text = f"\n{text}"
            file.write(text.encode())
    except OSError as error:
        raise ConfigurationError(
            f"predictions cannot be kept in {path} ({error.strerror}). Pass another folder with --report."
        ) from error


def scores(path: Path) -> list[Score]:
    """Score every prediction that a run came after, by kind.

    Raises:
        ConfigurationError: There is no such file.
    """
    pairs = scored_pairs(path)
    return [
        _score(kind, [x for x in pairs if x[0].kind == kind]) for kind in sorted({x.kind for x, _ in pairs})
    ]


def scored_pairs(path: Path) -> list[tuple[KeptPrediction, MeasuredRun]]:
    """Every run that something was predicted for, with the prediction; the last that was measured of each run.

    Raises:
        ConfigurationError: There is no such file.
    """
    said: list[KeptPrediction] = []
    pairs: dict[str, tuple[KeptPrediction, MeasuredRun]] = {}
    for record in _records(path):
        if isinstance(record, KeptPrediction):
            said.append(record)
            continue
        first = pairs[record.run][0] if record.run in pairs else None
        found = first or next((x for x in reversed(said) if x.is_for(record)), None)
        if found is not None:
            pairs[record.run] = (found, record)
    return list(pairs.values())


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
    """All lines that can be read; one that was cut off while it was written is skipped."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"there are no predictions in {path} ({error.strerror}). `paceline plan SCRIPT` makes and keeps some."
        ) from error
    kinds: dict[str, Any] = {kind.__name__: kind for kind in (KeptPrediction, MeasuredRun)}
    for line in lines:
        try:
            record = json.loads(line)
            found = kinds[record.pop("record")](**record)
            if 0 < found.step_s < math.inf:
                yield found
        except (ValueError, TypeError, KeyError, AttributeError):
            continue


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
