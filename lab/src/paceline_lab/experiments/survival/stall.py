"""Where the time goes from a rank's death to the next completed step: on one host, in interpreters of their own.

Parts, of the rank that took longest from the death to its next completed step:
    detect     from the death until the rank hears of it from the agent, which looks at the kernel's flags
    wake       until its main thread has left what it was waiting in
    agree      until it has its seat: all have said where they stand, the agent has decided
    group      until the next group is open, and all know how far all are
    move       until the model and the sampler go on in it
    redo       until the step is completed
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline_lab.experiments.survival.job import Job, Outcome, problems, run_job
from paceline_lab.experiments.survival.training import Fault

PARTS = ("detect", "wake", "agree", "group", "move", "redo")
_RANKS, _KILLS, _APART = 4, 5, 70  # steps: a replacement has come in meanwhile


@dataclass
class Stalls:
    """What was measured.

    Attributes:
        parts_ms: For each death, the parts.
        steps_ms: The time of a step of each job.
        load: Of the machine, behind each job.
    """

    parts_ms: list[dict[str, float]] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)

    def words(self) -> str:
        """A table."""
        rows = {name: sorted(each[name] for each in self.parts_ms) for name in PARTS}
        rows["all"] = sorted(sum(each.values()) for each in self.parts_ms)
        lines = [f"{'':8}{'p50':>8}{'p95':>8}{'max':>8}  ms, {len(self.parts_ms)} deaths"]
        for name, values in rows.items():
            p95 = values[min(int(0.95 * len(values)), len(values) - 1)]
            lines.append(f"{name:8}{statistics.median(values):8.1f}{p95:8.1f}{values[-1]:8.1f}")
        step_ms, load = statistics.median(self.steps_ms), statistics.median(self.load)
        return "\n".join([*lines, f"a step {step_ms:.1f} ms; load {load:.1f}"])


def measure_stalls(num_jobs: int, backend: str = "gloo") -> Stalls:
    """Let a rank of four die five times in each of so many jobs. Blocks."""
    found = Stalls()
    dice = random.Random(0)
    for _ in range(num_jobs):
        options = (
            "--epochs",
            str((_KILLS + 1) * _APART // 9),
            "--pause-ms",
            "50",
            "--backend",
            backend,
            "--parts",
        )
        faults = tuple(
            Fault(dice.randrange(_RANKS - 1), 10 + _APART * i, dice.choice(["forward", "within bucket 1"]))
            for i in range(_KILLS)
        )
        job = Job(_RANKS, 1, options, faults, limit_s=600.0)
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_job(job, Path(folder))
        if wrong := problems(job, outcome):
            raise RuntimeError(f"{'; '.join(wrong)}\n{outcome.said}")
        found.parts_ms += parts_of(outcome)
        gaps = [n["took_s"] for notes in outcome.notes for n in notes if n["what"] == "done"]
        found.steps_ms.append(statistics.median(gaps) * 1e3)
        found.load.append(os.getloadavg()[0])
    return found


def parts_of(outcome: Outcome) -> list[dict[str, float]]:
    """Of each death whose recovery was not disturbed by another one."""
    notes = [note for each in outcome.notes for note in each]
    deaths = sorted(note["at"] for note in notes if note["what"] == "fault")
    found = []
    for death, until in zip(deaths, [*deaths[1:], float("inf")], strict=True):
        of_ranks = [_of_rank(each, death, until) for each in outcome.notes]
        whole = [each for each in of_ranks if each is not None]
        if whole:
            found.append(max(whole, key=lambda each: sum(each.values())))
    return found


def _of_rank(notes: Sequence[dict[str, Any]], death: float, until: float) -> dict[str, float] | None:
    """One rank's; None: it was not there, or did not go through all of it."""
    behind = [note for note in notes if death < note["at"] < until]
    if not any(note["at"] < death and note["what"] == "done" for note in notes):
        return None
    moved = next((note for note in behind if note["what"] == "moved"), None)
    done = next((n for n in behind if n["what"] == "done" and moved and n["at"] > moved["at"]), None)
    if moved is None or done is None:
        return None
    times = [death, *(moved[name] for name in ("heard", "left", "seat", "open")), moved["at"], done["at"]]
    return {name: (b - a) * 1e3 for name, a, b in zip(PARTS, times[:-1], times[1:], strict=True)}
