"""Writes run folders without a run: ranks with given step lengths, each on a separate clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.observe.run_folder import RankWriter, begin_run
from paceline.observe.run_records import (
    BucketTiming,
    HostFacts,
    Interval,
    Labels,
    LinkCounters,
    RankHeader,
    Sample,
    StepRecord,
)

FORWARD_S, BACKWARD_S, SENDS_S = 0.02, 0.04, 0.01


def rank_header(run_id: str, rank: int, num_ranks: int, **other: object) -> RankHeader:
    """Return a rank's header. Ranks are on one host unless `other` says otherwise."""
    fields = {
        "host": "a",
        "boot_id": "b",
        "pid": 10 + rank,
        "num_cpus": 2,
        "num_threads": 1,
        "wrapper": "paceline",
    }
    fields |= {"device": "cpu", "torch": "2.13", "began_s": 0.0, "began_unix_s": 1e9}
    return RankHeader(run_id, rank, num_ranks, **{**fields, **other})  # type: ignore[arg-type]


def write_run(
    folder: Path,
    num_ranks: int = 3,
    num_steps: int = 20,
    late_s: Callable[[int, int], float] | None = None,
    clocks_s: Mapping[int, float] | None = None,
    command: tuple[str, ...] = ("torchrun", "train.py"),
) -> None:
    """Write the run folder of a job of which all ranks leave every backward together.

    Args:
        folder: The run folder, made anew.
        num_ranks: Of the job.
        num_steps: Of each rank.
        late_s: By how much a rank's backward is longer in a step; None: not at all.
        clocks_s: What a rank's clock shows more than the first one's; such a rank is on another host.
        command: That was run.
    """
    run = begin_run(folder, command)
    clocks_s = clocks_s or {}
    late_s = late_s or (lambda *_: 0.0)
    own_s = [
        [FORWARD_S + BACKWARD_S + late_s(rank, step) for rank in range(num_ranks)]
        for step in range(num_steps)
    ]
    for rank in range(num_ranks):
        ahead_s = clocks_s.get(rank, 0.0)
        elsewhere = {"host": f"host{rank}", "boot_id": f"boot{rank}"} if rank in clocks_s else {}
        writer = RankWriter(folder, rank_header(run.run_id, rank, num_ranks, began_s=ahead_s, **elsewhere))
        writer.write(Labels(("layers.1", "layers.0")))
        at_s = 1.0 + ahead_s
        for number, works_s in enumerate(own_s):
            ended_s = at_s + max(works_s) + SENDS_S
            writer.write(_step(number + 1, at_s, at_s + works_s[rank], ended_s))
            if number % 10 == 0:
                writer.write(Sample(number + 1, ended_s, 1e9, _links(rank, num_ranks, number)))
            at_s = ended_s
        writer.close()


def _step(number: int, began_s: float, work_ended_s: float, ended_s: float) -> StepRecord:
    forward_s = began_s + FORWARD_S
    return StepRecord(
        number,
        began_s,
        work_ended_s,
        ended_s,
        (Interval("forward", began_s, forward_s), Interval("backward", forward_s, ended_s)),
        (
            BucketTiming(0, 4096, forward_s + 0.01, forward_s + 0.01, ended_s - 0.002, 0.0),
            BucketTiming(1, 512, work_ended_s, work_ended_s + 0.001, ended_s, ended_s - work_ended_s),
        ),
        ((0, forward_s + 0.01), (1, work_ended_s)),
        32,
        None,
        HostFacts(work_ended_s - began_s, 0.001),
    )


def _links(rank: int, num_ranks: int, number: int) -> tuple[LinkCounters, ...]:
    """Return the ends of the connections to the ranks before and behind it in the ring."""
    sent = 10**6 * (number + 1)
    peers = {(rank + 1) % num_ranks, (rank - 1) % num_ranks} - {rank}
    return tuple(
        LinkCounters(
            f"10.0.0.{rank}:{peer}", f"10.0.0.{peer}:{rank}", sent, sent, 1e-8 * sent, 0, 0.001, 0.0005
        )
        for peer in sorted(peers)
    )
