"""Runs as recorders would have left them, made from what each rank does in each step; no process, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.observe.run_reading import RankRun, Run
from paceline.observe.run_records import (
    HostFacts,
    Interval,
    LinkCounters,
    Neighbour,
    RankHeader,
    RunHeader,
    Sample,
    StepRecord,
)

LAYERS = ("embed", "body", "head")  # in order of registration: backward goes the other way
BASE_S = {
    "optimizer": 0.003,
    "loading": 0.003,
    "forward": 0.016,
    "head": 0.010,
    "body": 0.010,
    "embed": 0.012,
}
EXPOSED_S = 0.006
Extra = Callable[[int, int], Mapping[str, float]]  # of a rank and a step: seconds more by phase or layer


def nothing(_rank: int, _step: int) -> Mapping[str, float]:
    """Return no extra time, for runs where no rank is slow."""
    return {}


def always(culprit: int, phase: str, seconds: float) -> Extra:
    """Return the extra time of one rank in every step."""
    return lambda rank, _: {phase: seconds} if rank == culprit else {}


@dataclass(frozen=True)
class MadeRun:
    """The description of an artificial run.

    Attributes:
        extra: The extra time of a rank in a step, by phase.
        num_ranks: Number of ranks. All leave records.
        num_steps: Number of steps, counted from 1.
        jitter: Relative standard deviation of each phase.
        host: The kernel's counters for a rank and a step.
        tokens: The tokens of a rank.
        samples: The samples of a rank, in addition to the steps.
        headers: Fields of ranks' headers that differ from the usual ones.
        hosts: Names of the ranks' hosts.
    """

    extra: Extra = nothing
    num_ranks: int = 4
    num_steps: int = 40
    jitter: float = 0.05
    host: Callable[[int, int], HostFacts] = lambda _rank, _step: HostFacts()
    tokens: Callable[[int], int | None] = lambda _rank: 128
    samples: Callable[[int], list[Sample]] = lambda _rank: []
    headers: Mapping[str, Any] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    seed: int = 0

    def make(self) -> Run:
        """Make the run. The same description makes the same run every time."""
        draw = random.Random(self.seed)
        ranks = [
            RankRun(self._header(rank), labels=LAYERS, sizes=(4000, 2000, 3000), bucket_bytes=5000)
            for rank in range(self.num_ranks)
        ]
        at_s = [100.0 * rank for rank in range(self.num_ranks)]  # no two clocks agree
        for step in range(1, self.num_steps + 1):
            done = [self._work(rank, step, at_s[rank], draw) for rank in range(self.num_ranks)]
            longest_s = max((record.work_s for record in done), default=0.0) + EXPOSED_S
            for rank, record in enumerate(done):
                at_s[rank] = record.began_s + longest_s
                backward = replace(record.intervals[-1], end_s=at_s[rank])
                intervals = (*record.intervals[:-1], backward)
                ranks[rank].steps.append(replace(record, ended_s=at_s[rank], intervals=intervals))
        for number, made in enumerate(ranks):
            made.samples += self.samples(number)
        return Run(RunHeader("made", ("train.py",), 0.0, "0"), tuple(ranks))

    def _header(self, rank: int) -> RankHeader:
        host = self.hosts[rank] if self.hosts else "a"
        usual = RankHeader(
            "made", rank, self.num_ranks, host, "b", 10 + rank, 4, 1, "torch", "cpu", "2", 0.0, 0.0
        )
        return replace(usual, **self.headers)

    def _work(self, rank: int, step: int, began_s: float, draw: random.Random) -> StepRecord:
        extra = self.extra(rank, step)

        def takes_s(name: str) -> float:
            return BASE_S.get(name, 0.0) * max(0.3, draw.gauss(1, self.jitter)) + extra.get(name, 0.0)

        now_s, intervals, marks = began_s, [], []
        for phase in ("optimizer", "loading", "checkpoint", "garbage", "other", "forward"):
            start_s, now_s = now_s, now_s + takes_s(phase)
            if phase != "other" and now_s > start_s:
                intervals.append(Interval(phase, start_s, now_s))
        start_s = now_s
        for layer in reversed(range(len(LAYERS))):
            now_s += takes_s(LAYERS[layer])
            marks.append((layer, now_s))
        intervals.append(Interval("backward", start_s, now_s))
        host, tokens = self.host(rank, step), self.tokens(rank)
        return StepRecord(step, began_s, now_s, now_s, tuple(intervals), (), tuple(marks), 4, tokens, host)


def address(rank: int, peer: int) -> str:
    """Return a rank's end of its connection with a peer."""
    return f"10.0.0.{rank}:{4000 + peer}"


def link_samples(
    rank: int,
    num_ranks: int,
    rate: Callable[[int, int], float],
    lost: Callable[[int, int], int] = lambda *_: 0,
    peak: Callable[[int, int], float] = lambda *_: 0.0,
    rtt: Callable[[int, int], float] = lambda *_: 0.0005,
) -> list[Sample]:
    """Return two samples of a full mesh, 100 steps apart, with each direction busy for one second at its rate."""

    def counters(at: int) -> tuple[LinkCounters, ...]:
        return tuple(
            LinkCounters(
                address(rank, peer),
                address(peer, rank),
                int(at * rate(rank, peer)),
                int(at * rate(peer, rank)),
                float(at),
                at * lost(rank, peer),
                2 * rtt(rank, peer),
                rtt(rank, peer),
                arrival_bytes_per_s=peak(peer, rank),
            )
            for peer in range(num_ranks)
            if peer != rank
        )

    return [Sample(100 * at, float(at), 0.0, counters(at)) for at in (1, 2)]


def busy_core(pid: int, name: str, load: float) -> list[Sample]:
    """Return samples in which another process uses the rank's core."""
    return [Sample(at, float(at), 0.0, (), (Neighbour(pid, name, load),)) for at in range(4)]
