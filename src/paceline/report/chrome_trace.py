"""A run as a timeline in Chrome's trace event format, which Perfetto and chrome://tracing open: all ranks, one clock.

Each rank is a process. Its first track is its training: a slice per step, and within it loading, forward, backward,
waiting for others, optimizer. As many further tracks show buckets as are under way at once: first queued, then sent. An
arrow leads from the rank whose gradients were there last to the end of each other rank's wait. There is none if the
clocks may be off by more than that rank was late.

Source: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Slices are
complete events (X), which on one track lie within each other or apart; flows are s and f; tracks are named by M.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.observe.run_reading import ClockOffset, RankRun, Run, clock_offsets
from paceline.observe.run_records import BucketTiming, StepRecord

FORMAT, VERSION = "paceline timeline", 1
MOST_STEPS = 500
"""By default: more make a file that no viewer opens at ease."""
_TRAINING, _FIRST_LANE = 1, 10  # tracks of a rank
_MOST_MARKS = 24  # gradients of a step of torch's DDP that are shown
_INSIDE_US = 0.1  # an arrow begins and ends so far within a slice, not on its edge

Event = dict[str, Any]


@dataclass(frozen=True)
class Timeline:
    """The events of a run in the trace's format, and what they leave out."""

    events: list[Event]  # in the order of ranks and steps
    facts: dict[str, Any]  # about the whole: the run, its clocks, what could not be read
    num_steps: int  # shown of every rank, at most
    num_left_out: int  # steps before them

    @property
    def text(self) -> str:
        """Return the content of the file: JSON, an event per line."""
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in self.events)
        facts = json.dumps(self.facts)
        return f'{{"displayTimeUnit":"ms","otherData":{facts},"traceEvents":[\n{lines}\n]}}\n'

    def write(self, path: Path) -> None:
        """Write the file; what was there is replaced at once, so that it is whole at any time."""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.write_text(self.text)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def timeline_of(run: Run, most_steps: int = MOST_STEPS) -> Timeline:
    """Lay each rank's last `most_steps` steps out on the first rank's clock. Local and pure."""
    offsets = clock_offsets(run)
    last = max((rank.steps[-1].step for rank in run.ranks if rank.steps), default=0)
    first = min((rank.steps[0].step for rank in run.ranks if rank.steps), default=1)
    since = max(first, last - most_steps + 1)
    steps = {rank.header.rank: [step for step in rank.steps if step.step >= since] for rank in run.ranks}
    starts_s = [offsets[rank].aligned_s(own[0].began_s) for rank, own in steps.items() if own]
    clocks = {rank: _Clock(offset, min(starts_s, default=0.0)) for rank, offset in offsets.items()}
    events = [event for rank in run.ranks for event in _of_rank(rank, steps[rank.header.rank], clocks)]
    events += _arrows(run, steps, clocks)
    return Timeline(events, _facts(run, offsets), last - since + 1 if last else 0, since - first)


@dataclass(frozen=True)
class _Clock:
    """Turns a rank's times into microseconds of the timeline, which begins at `zero_s`."""

    offset: ClockOffset
    zero_s: float

    def us(self, time_s: float) -> float:
        return round(1e6 * (self.offset.aligned_s(time_s) - self.zero_s), 1)


def _facts(run: Run, offsets: dict[int, ClockOffset]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "run": run.header.run_id,
        "command": " ".join(run.header.command),
        "clocks": {f"rank {rank}": _words(offset) for rank, offset in offsets.items()},
        "notes": list(run.notes),
    }


def _words(offset: ClockOffset) -> str:
    if offset.source == "same clock":
        return "the first rank's own"
    if not math.isfinite(offset.error_s):
        return "unknown: nothing in common with the first rank's"
    return f"aligned by {offset.source}, off by {1e3 * offset.error_s:.2f} ms at most in nine of ten cases"


def _of_rank(rank: RankRun, steps: Sequence[StepRecord], clocks: dict[int, _Clock]) -> Iterator[Event]:
    number = rank.header.rank
    clock = clocks[number]
    yield _name("process_name", number, 0, f"rank {number} ({rank.header.host})")
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
    yield _name("thread_name", number, _TRAINING, "training")
    num_lanes = 0
    for step in steps:
        yield from _training(number, step, clock)
        yield from _marks(rank, step, clock)
        for lane, bucket in _lanes(step.buckets):
            num_lanes = max(num_lanes, lane + 1)
            yield from _bucket(number, _FIRST_LANE + lane, step, bucket, clock)
        if step.host is not None and step.host.cpu_s:
            facts = {"on a core": step.host.cpu_s, "waiting for one": step.host.queued_s}
            values = {name: round(1e3 * seconds, 2) for name, seconds in facts.items()}
            yield {
                "ph": "C",
                "name": "ms of the step",
                "pid": number,
                "ts": clock.us(step.ended_s),
                "args": values,
            }
    for lane in range(num_lanes):
        yield _name(
            "thread_name", number, _FIRST_LANE + lane, "buckets" if lane == 0 else f"buckets, {lane + 1}"
        )


def _training(rank: int, step: StepRecord, clock: _Clock) -> Iterator[Event]:
    """Yield the slice of the step and those of its phases, each cut to lie within the one around it."""
    about: dict[str, Any] = {"step": step.step, "waits for others, ms": round(1e3 * step.waited_s, 2)}
    if step.num_samples is not None:
        about["samples"] = step.num_samples
    if step.num_tokens is not None:
        about["tokens"] = step.num_tokens
    yield _slice(f"step {step.step}", rank, _TRAINING, clock.us(step.began_s), clock.us(step.ended_s), about)
    around = [clock.us(step.ended_s)]
    for name, start_s, end_s in step.spans():
        start_us, end_us = clock.us(max(start_s, step.began_s)), clock.us(end_s)
        while len(around) > 1 and start_us >= around[-1]:
            around.pop()
        end_us = min(end_us, around[-1])
        if end_us > start_us:
            around.append(end_us)
            yield _slice(name, rank, _TRAINING, start_us, end_us)


def _marks(rank: RankRun, step: StepRecord, clock: _Clock) -> Iterator[Event]:
    """Yield marks for the times at which gradients of torch's layers were ready: evenly chosen ones, and the last."""
    marks = step.gradients
    stride = max(1, math.ceil(len(marks) / _MOST_MARKS))
    for place, (label, at_s) in enumerate(marks):
        if (len(marks) - 1 - place) % stride == 0:
            name = rank.labels[label] if label < len(rank.labels) else f"layer {label}"
            yield {
                "ph": "i",
                "s": "t",
                "name": f"gradient of {name}",
                "pid": rank.header.rank,
                "tid": _TRAINING,
                "ts": clock.us(at_s),
            }


def _lanes(buckets: Iterable[BucketTiming]) -> Iterator[tuple[int, BucketTiming]]:
    free_s: list[float] = []
    for bucket in sorted(buckets, key=lambda bucket: bucket.ready_s):
        begin_s = min(bucket.ready_s, bucket.launched_s)
        lane = next((lane for lane, until_s in enumerate(free_s) if until_s <= begin_s), len(free_s))
        free_s[lane : lane + 1] = [bucket.done_s]
        yield lane, bucket


def _bucket(rank: int, track: int, step: StepRecord, bucket: BucketTiming, clock: _Clock) -> Iterator[Event]:
    ready_us, sent_us, done_us = (clock.us(x) for x in (bucket.ready_s, bucket.launched_s, bucket.done_s))
    about = {
        "step": step.step,
        "bytes": bucket.size_bytes,
        "backward waited, ms": round(1e3 * bucket.waited_s, 2),
    }
    if sent_us > ready_us:
        yield _slice(f"bucket {bucket.index} is ready", rank, track, ready_us, sent_us)
    if done_us > sent_us:
        yield _slice(f"bucket {bucket.index} is sent", rank, track, sent_us, done_us, about)


def _arrows(run: Run, steps: dict[int, list[StepRecord]], clocks: dict[int, _Clock]) -> Iterator[Event]:
    """Yield a flow from the rank that was last to the end of each other rank's wait."""
    if len(run.ranks) < 2:
        return
    error_s = sum(sorted(clock.offset.error_s for clock in clocks.values())[-2:])
    by_step: dict[int, dict[int, StepRecord]] = {}
    for rank, own in steps.items():
        for step in own:
            by_step.setdefault(step.step, {})[rank] = step
    number = 0
    for found in by_step.values():
        ends_s = {rank: clocks[rank].offset.aligned_s(step.work_ended_s) for rank, step in found.items()}
        *before, last = sorted(ends_s, key=lambda rank: ends_s[rank])
        if not before or ends_s[last] - ends_s[before[-1]] <= error_s:
            continue
        begin_us = clocks[last].us(found[last].work_ended_s) - _INSIDE_US
        for rank in before:
            if found[rank].waited_s <= 0:
                continue
            number += 1
            end_us = clocks[rank].us(found[rank].ended_s) - _INSIDE_US
            flow = {"cat": "last gradient", "name": "others waited for this", "id": number, "tid": _TRAINING}
            yield {"ph": "s", **flow, "pid": last, "ts": round(begin_us, 1)}
            yield {"ph": "f", "bp": "e", **flow, "pid": rank, "ts": round(end_us, 1)}


def _slice(
    name: str, rank: int, track: int, start_us: float, end_us: float, about: dict[str, Any] | None = None
) -> Event:
    event = {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": track,
        "ts": start_us,
        "dur": round(end_us - start_us, 1),
    }
    return event if about is None else {**event, "args": about}


def _name(kind: str, rank: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}
