"""Measure the parts of the time from a rank's death to the next completed step: on one host, in new interpreters.

Kinds: one rank dies; two at once; one dies, and another while the others recover. Parts, of the rank that took longest
from the first death to its next completed step:
    before     from the first death to the last one
    detect     until the rank hears of it from the agent, which looks at the kernel's flags
    wake       until its main thread has left what it was waiting in
    agree      until it has its rank assignment: all have said where they stand, the agent has decided
    group      until the next group is open, and all know how far all are
    meet       until the ranks know that they have the same model
    beside     until groups of Paceline's own are open
    move       until the model and the sampler go on in them
    redo       until the step is completed
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline_lab.experiments.survival.job import Job, Outcome, problems, run_job
from paceline_lab.experiments.survival.standstills import AGAIN, ONE, TWO
from paceline_lab.experiments.survival.training import Fault

PARTS = ("before", "detect", "wake", "agree", "group", "meet", "beside", "move", "redo")
_RANKS, _EVENTS = 4, 5
_APART = {ONE: 100, TWO: 220, AGAIN: 220}  # steps: replacements have come in meanwhile


@dataclass
class Stalls:
    """The measurements of one kind of standstill.

    Attributes:
        parts_ms: Parts of each standstill.
        steps_ms: Time of a step of each job.
        load: Load of the machine at the end of each job.
    """

    parts_ms: list[dict[str, float]] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)

    def words(self, kind: str) -> str:
        """A table."""
        rows = {name: sorted(each[name] for each in self.parts_ms) for name in PARTS}
        rows["all"] = sorted(sum(each.values()) for each in self.parts_ms)
        lines = [f"{kind}: {len(self.parts_ms)} standstills, ms", f"{'':8}{'p50':>8}{'p95':>8}{'max':>8}"]
        for name, values in rows.items():
            p95 = values[min(int(0.95 * len(values)), len(values) - 1)]
            lines.append(f"{name:8}{statistics.median(values):8.1f}{p95:8.1f}{values[-1]:8.1f}")
        step_ms, load = statistics.median(self.steps_ms), statistics.median(self.load)
        return "\n".join([*lines, f"a step {step_ms:.1f} ms; load {load:.1f}"])


def measure_stalls(num_jobs: int, backend: str = "gloo") -> Iterator[tuple[str, Stalls]]:
    """Yield the standstills of each kind, five in each of so many jobs of four ranks. Blocks."""
    for kind in _APART:
        found, dice = Stalls(), random.Random(0)
        for _ in range(num_jobs):
            _measure(_job(kind, dice, backend), found)
        yield kind, found


def _job(kind: str, dice: random.Random, backend: str) -> Job:
    apart = _APART[kind]
    epochs = str((_EVENTS + 1) * apart // 9)
    options = ("--epochs", epochs, "--pause-ms", "80", "--backend", backend, "--parts")
    faults = [each for i in range(_EVENTS) for each in _event(kind, dice, 10 + apart * i)]
    return Job(_RANKS, 1, options, tuple(faults), limit_s=600.0)


def _event(kind: str, dice: random.Random, step: int) -> list[Fault]:
    """Return faults of ranks other than the last one, which may not have rejoined yet."""
    rank, other = dice.sample(range(_RANKS - 1), 2)
    first = Fault(rank, step, dice.choice(["forward", "within bucket 1"]))
    if kind == TWO:
        return [first, replace(first, rank=other)]
    if kind == AGAIN:  # by its number among those that are left
        return [first, Fault(dice.randrange(_RANKS - 2), step, dice.choice(["recovery", "following"]))]
    return [first]


def _measure(job: Job, found: Stalls) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_job(job, Path(folder))
    if wrong := problems(job, outcome):
        raise RuntimeError(f"{'; '.join(wrong)}\n{outcome.said}")
    found.parts_ms += parts_of(outcome)
    gaps = [n["took_s"] for notes in outcome.notes for n in notes if n["what"] == "done"]
    found.steps_ms.append(statistics.median(gaps) * 1e3)
    found.load.append(os.getloadavg()[0])


def parts_of(outcome: Outcome) -> list[dict[str, float]]:
    """Return the parts of each standstill, from its first death to its end, with all deaths in it."""
    notes = [note for each in outcome.notes for note in each]
    deaths = sorted(note["at"] for note in notes if note["what"] == "fault")
    found = []
    while deaths:
        of_ranks = [_of_rank(each, deaths) for each in outcome.notes]
        whole = [each for each in of_ranks if each is not None]
        until = deaths[0] + max((sum(each.values()) / 1e3 for each in whole), default=0.0)
        found += [max(whole, key=lambda each: sum(each.values()))] if whole else []
        deaths = [each for each in deaths[1:] if each > until]
    return found


def _of_rank(notes: Sequence[dict[str, Any]], deaths: Sequence[float]) -> dict[str, float] | None:
    """Return one rank's parts after the first of these deaths; None if the rank missed one of them."""
    if not any(note["at"] < deaths[0] and note["what"] == "done" for note in notes):
        return None
    behind = [note for note in notes if note["at"] > deaths[0]]
    moved_at = next((note["at"] for note in behind if note["what"] == "moved"), float("inf"))
    done = next((n for n in behind if n["what"] == "done" and n["at"] > moved_at), None)
    if done is None:
        return None
    moved = next(n for n in reversed(behind) if n["what"] == "moved" and n["at"] < done["at"])
    times = [deaths[0], max(at for at in deaths if at < done["at"])]
    for at in (
        *(moved[name] for name in ("heard", "left", "assignment", "open", "met", "beside")),
        moved["at"],
    ):
        times.append(max(times[-1], at))  # one of two deaths may be heard of before the other happens
    times.append(done["at"])
    return {name: (b - a) * 1e3 for name, a, b in zip(PARTS, times[:-1], times[1:], strict=True)}
