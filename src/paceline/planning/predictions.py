"""Keeps every prediction, and scores it when a run has measured what was predicted.

One JSON line each, in a file that only grows: a prediction when it is made, an outcome when a run is scored. A
prediction is scored by runs of the same workload on as many ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline.errors import ConfigurationError
from paceline.planning.hardware import Cluster


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
    """

    workload: str
    num_ranks: int
    kind: str
    step_s: float
    low_s: float
    high_s: float
    where: str


@dataclass(frozen=True)
class Outcome:
    """What a run measured: the median step of a workload on so many ranks."""

    workload: str
    num_ranks: int
    step_s: float


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


def keep(path: Path, records: Iterable[KeptPrediction | Outcome]) -> None:
    """Append to the file.

    Raises:
        ConfigurationError: It cannot be written.
    """
    lines = [json.dumps({"record": type(record).__name__, **asdict(record)}) for record in records]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise ConfigurationError(
            f"predictions cannot be kept in {path} ({error.strerror}). Pass another folder with --report."
        ) from error


def scores(path: Path) -> list[Score]:
    """Score every prediction that an outcome came after, by kind; a later prediction replaces an earlier one.

    Raises:
        ConfigurationError: There is no such file.
    """
    said: dict[tuple[str, int], KeptPrediction] = {}
    pairs: list[tuple[KeptPrediction, Outcome]] = []
    for record in _records(path):
        key = (record.workload, record.num_ranks)
        if isinstance(record, KeptPrediction):
            said[key] = record
        elif key in said:
            pairs.append((said[key], record))
    return [
        _score(kind, [x for x in pairs if x[0].kind == kind]) for kind in sorted({x.kind for x, _ in pairs})
    ]


def _score(kind: str, pairs: list[tuple[KeptPrediction, Outcome]]) -> Score:
    errors = [said.step_s / seen.step_s - 1 for said, seen in pairs]
    worst = max(range(len(pairs)), key=lambda i: abs(errors[i]))
    said, _ = pairs[worst]
    inside = [said.low_s <= seen.step_s <= said.high_s for said, seen in pairs]
    return Score(
        kind,
        len(pairs),
        median(map(abs, errors)),
        errors[worst],
        f"{said.workload} on {said.num_ranks} ranks",
        sum(inside) / len(inside),
    )


def _records(path: Path) -> Iterator[KeptPrediction | Outcome]:
    """All lines that can be read; one that was cut off while it was written is skipped."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"there are no predictions in {path} ({error.strerror}). `paceline plan SCRIPT` makes and keeps some."
        ) from error
    kinds: dict[str, Any] = {kind.__name__: kind for kind in (KeptPrediction, Outcome)}
    for line in lines:
        try:
            record = json.loads(line)
            found = kinds[record.pop("record")](**record)
            if found.step_s > 0:
                yield found
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
