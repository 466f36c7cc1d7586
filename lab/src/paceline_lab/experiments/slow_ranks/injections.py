"""Injections that make one rank of a training slow, so that the doctor can be graded: causes, strengths, right answers.

Computing is emulated by sleeps with 8 % jitter. Causes that need it have a few milliseconds of real arithmetic: a quota
does not slow down a sleep.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline_lab.emulation import owned_resources

_PERIOD, _ONSET = 10, 8  # steps


@dataclass(frozen=True)
class Cause:
    """Something that makes a rank slow.

    Attributes:
        strengths: Weak, middle, strong.
        unit: Unit of the strengths.
        phases: Phases in which the doctor may see it; empty: any.
        kinds: Kinds that the doctor may call it; empty: any.
        when: Pattern in time.
        arithmetic_s: Processor time of every rank's step.
        is_of_one: Whether one rank is to be named; else none is.
        may_hit_all: Whether it may delay all ranks of the host alike instead; see `grading`.
        wrapper: Library whose DDP trains.
        num_layers: Layers of the model; they share its computing.
        delay: One way, between emulated hosts, on which the ranks are then; empty: they are on this machine.
    """

    strengths: tuple[float, ...]
    unit: str = "ms"
    phases: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    when: frozenset[str] = frozenset({"always"})
    arithmetic_s: float = 0.0
    is_of_one: bool = True
    may_hit_all: bool = False
    wrapper: str = "torch"
    num_layers: int = 8
    delay: str = ""


_WAITS = frozenset({"waits"})
_COMPUTES = frozenset({"forward", "backward", "computation"})
CAUSES = {
    "forward": Cause((30, 100, 200), phases=frozenset({"forward"}), kinds=_WAITS),
    "backward of a layer": Cause((30, 100, 200), phases=frozenset({"backward"}), kinds=_WAITS),
    "loader": Cause((30, 100, 200), phases=frozenset({"loading"}), kinds=frozenset({"loader"})),
    "optimizer": Cause((30, 100, 200), phases=frozenset({"optimizer"}), kinds=_WAITS),
    "since a step": Cause(
        (30, 100, 200), phases=frozenset({"forward"}), kinds=_WAITS, when=frozenset({"since"})
    ),
    "moves from rank to rank": Cause(
        (30, 100, 200), phases=frozenset({"backward"}), kinds=_WAITS, when=frozenset({"moving"})
    ),
    "checkpoint every 10th step": Cause(
        (200, 400, 800),
        phases=frozenset({"checkpoint"}),
        kinds=frozenset({"checkpoint"}),
        when=frozenset({"periodic", "at times"}),
    ),
    "garbage collection": Cause(
        (3e4, 1e5, 2e5), "objects", frozenset({"garbage"}), frozenset({"garbage collection"})
    ),
    "more tokens": Cause((1.25, 1.5, 2.0), "times", _COMPUTES, frozenset({"more tokens"})),
    "cgroup quota": Cause((8, 6, 4), "% of a core", kinds=frozenset({"throttled"}), arithmetic_s=0.008),
    "process on its core": Cause(
        (1, 2, 4), "hogs", kinds=frozenset({"core shared"}), arithmetic_s=0.016, may_hit_all=True
    ),
    "too many threads": Cause(
        (2, 4, 8), "threads", kinds=frozenset({"too many threads"}), arithmetic_s=0.008, is_of_one=False
    ),
    "buckets too small": Cause(
        (0.1, 0.05, 0.03),
        "MiB",
        kinds=frozenset({"buckets too small"}),
        is_of_one=False,
        wrapper="paceline",
        num_layers=32,
        delay="1ms",
    ),
    "clean": Cause((0,), is_of_one=False),
}


@dataclass(frozen=True)
class Case:
    """One run: a cause, how strong, and the seed of whom it strikes and where."""

    cause: str
    strength: float
    seed: int

    @property
    def of(self) -> Cause:
        return CAUSES.get(self.cause, CAUSES["clean"])  # of a link: nothing happens on its ranks

    def culprit(self, num_ranks: int) -> int:
        return self._draw().randrange(num_ranks)

    def layer(self) -> int:
        draw = self._draw()
        draw.random()
        return draw.randrange(1, self.of.num_layers)

    def _draw(self) -> random.Random:
        return random.Random(f"{self.cause} {self.strength} {self.seed}")


@dataclass
class Injected:
    """The injections on this rank, step by step; `is_on` between `begin` and `end`."""

    case: Case
    rank: int
    num_ranks: int
    is_on: bool = False
    step: int = 0
    _trash: list[Any] = field(default_factory=list)
    _closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def extra_s(self, cause: str, layer: int | None = None) -> float:
        """Seconds to sleep now in this phase."""
        names = {"since a step": "forward", "moves from rank to rank": "backward of a layer"}
        mine = names.get(self.case.cause, self.case.cause)
        if not self.is_on or mine != cause or (layer is not None and layer != self.case.layer()):
            return 0.0
        culprit = self.case.culprit(self.num_ranks)
        if self.case.cause == "moves from rank to rank":
            culprit = (culprit + self.step // 3) % self.num_ranks
        if self.case.cause == "since a step" and self.step < _ONSET + 4:
            return 0.0
        return 1e-3 * self.case.strength if self.rank == culprit else 0.0

    @property
    def is_culprit(self) -> bool:
        return self.is_on and self.rank == self.case.culprit(self.num_ranks)

    @property
    def tokens_ratio(self) -> float:
        return self.case.strength if self.case.cause == "more tokens" and self.is_culprit else 1.0

    def begin(self) -> None:
        """Start the lasting injections before the first step."""
        self.is_on = True
        cause, strength = self.case.cause, self.case.strength
        if cause == "too many threads":
            torch.set_num_threads(int(strength))
            self._closing.callback(torch.set_num_threads, 1)
        if not self.is_culprit:
            return
        if cause == "garbage collection":
            self._trash = [[i] for i in range(int(strength))]
            gc.collect()
        elif cause == "cgroup quota":
            self._limit(strength / 100)
        elif cause == "process on its core":
            self._share_core(int(strength))

    def between_steps(self, folder: Path) -> None:
        """Inject before each step's batch is loaded."""
        if self.case.cause == "garbage collection" and self.is_culprit:
            gc.collect()
        if self.case.cause == "checkpoint every 10th step" and self.is_culprit and self.step % _PERIOD == 5:
            torch.save(_SlowToWrite(1e-3 * self.case.strength), folder / "checkpoint")

    def end(self) -> None:
        """The repair."""
        self.is_on = False
        self._trash.clear()
        self._closing.close()

    def _limit(self, cores: float) -> None:
        place = owned_resources.find_cgroup_place()
        if place is None:
            return
        owner = f"doctor-{uuid.uuid4().hex[:8]}"
        before = place.folder / "cgroup.procs"
        place.limit(owner, "rank", cores).write_text(str(os.getpid()))
        self._closing.callback(_remove, place.folder, owner)
        self._closing.callback(before.write_text, str(os.getpid()))

    def _share_core(self, num_hogs: int) -> None:
        core, before = min(os.sched_getaffinity(0)), os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        self._closing.callback(os.sched_setaffinity, 0, before)
        for _ in range(num_hogs):
            hog = subprocess.Popen([sys.executable, "-S", "-c", "while 1: pass"])
            self._closing.callback(hog.wait)
            self._closing.callback(hog.kill)


def _remove(folder: Path, owner: str) -> None:
    for group in sorted(folder.glob(f"*{owner}*/rank")):
        group.rmdir()
        group.parent.rmdir()


class _SlowToWrite:
    """Takes its time when it is pickled, as a large model on a slow disk does."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __reduce__(self) -> tuple[Any, tuple[float]]:
        time.sleep(self._seconds)
        return float, (self._seconds,)


class Busy:
    """Emulated computing of one rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self._draw = random.Random(100 * case.seed + rank)
        self._part_s = case.of.arithmetic_s / (2 * case.of.num_layers)
        self._matrix = torch.ones(192, 192)

    def __call__(self, base_s: float, extra_s: float = 0.0) -> None:
        until_s = time.thread_time() + self._part_s if self._part_s else -math.inf
        while time.thread_time() < until_s:
            torch.mm(self._matrix, self._matrix)
        time.sleep(base_s * max(0.3, self._draw.gauss(1, 0.08)) + extra_s)
