"""How long the steps of a real run were, and where it ran: what scores a prediction."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mode
from typing import Any

from paceline.errors import ConfigurationError
from paceline.planning.recorded_workload import RECORD_AGAIN, TRACE_FORMAT, check_version, parsed

_PARTS = ("forward_s", "backward_s", "optimizer_s", "other_s")


@dataclass(frozen=True)
class MeasuredSteps:
    """What a trace says of a run, on however many ranks.

    Attributes:
        run: Which run it was: the same for a trace that is read again, also after it has grown.
        name: Of the workload.
        num_ranks: Of the job.
        ranks_of_host: How many ranks each host had; None if the trace does not say.
        num_micro_steps: Of a step.
        steps_s: One a step after the warm-up.
    """

    run: str
    name: str
    num_ranks: int
    ranks_of_host: tuple[int, ...] | None
    num_micro_steps: int
    steps_s: tuple[float, ...]

    def __post_init__(self) -> None:
        hosts = self.ranks_of_host
        if self.num_ranks < 1 or (hosts is not None and (sum(hosts) != self.num_ranks or min(hosts) < 1)):
            raise ValueError(f"{self.num_ranks} ranks, on hosts with {hosts}")
        if not all(0 < seconds < math.inf for seconds in self.steps_s):
            raise ValueError("a step without a duration, or without an end")


def measured_steps(path: Path) -> MeasuredSteps:
    """Read the whole steps of a trace, for a score.

    Raises:
        ConfigurationError: It is no trace of this version, is damaged, or holds no complete step.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the trace {path} cannot be read. {RECORD_AGAIN}") from error
    header = parsed(lines[0]) if lines else None
    if not isinstance(header, dict) or header.get("format") != TRACE_FORMAT:
        raise ConfigurationError(f"{path} is not a trace: only a trace of a real run scores. {RECORD_AGAIN}")
    check_version(header, path)
    every = [step for step in map(parsed, lines[1:]) if isinstance(step, dict)]
    steps = [step for step in every if not step.get("warm_up", True)]
    if not steps:
        raise ConfigurationError(f"the trace {path} holds no complete step after the warm-up. {RECORD_AGAIN}")
    try:
        num_micro_steps = mode(_num_micro_steps(step) for step in steps)
        num_ranks = int(header.get("num_ranks", 1))
        hosts = header.get("ranks_of_host", [1] if num_ranks == 1 else None)
        return MeasuredSteps(
            hashlib.sha256("\n".join(lines[:2]).encode()).hexdigest()[:16],  # the first step's nanoseconds
            str(header["name"]),
            num_ranks,
            None if hosts is None else tuple(map(int, hosts)),
            num_micro_steps,
            tuple(_length_s(step) for step in steps if _num_micro_steps(step) == num_micro_steps),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"the trace {path} is damaged ({type(error).__name__}: {error}). {RECORD_AGAIN}"
        ) from error


def _num_micro_steps(step: Mapping[str, Any]) -> int:
    return 1 + len(step.get("earlier_s", ()))


def _length_s(step: Mapping[str, Any]) -> float:
    return sum(float(step[part]) for part in _PARTS) + sum(map(float, step.get("earlier_s", ())))
