"""The records of a run: a step of a rank, facts of its host, counters of its links. Plain numbers, no torch.

`run_folder` writes them, `run_reading` reads them. Times are seconds of the rank's own `time.perf_counter()`, which
never steps; fields named `_unix_s` are the host's clock, for people. `run_reading` brings the ranks' clocks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PHASES = ("loading", "forward", "backward", "optimizer", "checkpoint", "garbage", "recording", "waiting")
"""What an `Interval` may be; time of a step in none of them is Python between them. Waiting is for other ranks within a
forward: for buffers, or for gradients of the step before (forward overlap)."""
# What may lie within other phases, and what in turn within that: the innermost takes the time.
_WITHIN_INNER: dict[str, tuple[str, ...]] = {
    "garbage": (),
    "recording": ("garbage",),
    "checkpoint": ("garbage", "recording"),
    "waiting": ("garbage", "recording"),
}
"""Lie within others, out of which they are taken."""


@dataclass(frozen=True)
class BucketTiming:
    """The life of one bucket in one step.

    Attributes:
        index: Its place in the order in which backward fills buckets.
        size_bytes: Bytes of this rank's gradients in it; 0 if no rank needed them, so that nothing was sent.
        ready_s: When its last gradient was in.
        launched_s: When its reduction was started; later than `ready_s` when an earlier bucket was late.
        done_s: When its reduction had completed.
        waited_s: How long the end of backward waited for it: its share of the exposed communication.
    """

    index: int
    size_bytes: int
    ready_s: float
    launched_s: float
    done_s: float
    waited_s: float

    @property
    def communication_s(self) -> float:
        return self.done_s - self.launched_s


@dataclass(frozen=True)
class Interval:
    """A phase of a step, from start to end. A phase may lie within another one, as garbage collection does."""

    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class HostFacts:
    """The kernel's facts about the training thread during one step; 0 where it does not say."""

    cpu_s: float = 0.0  # time on a core
    queued_s: float = 0.0  # ready to run, and waiting for a core; contains `throttled_s`
    throttled_s: float = 0.0  # stopped by the quota of its cgroup
    major_faults: int = 0  # pages that came from a disk
    preemptions: int = 0  # times it was put off its core


@dataclass(frozen=True)
class StepRecord:
    """One rank's step: from the end of its backward before to the end of this one."""

    step: int  # counts synchronized backwards of this process, from 1
    began_s: float  # when the backward before was left; of the first step, when recording began
    work_ended_s: float  # when its own last gradient was there; after that it waits for others
    ended_s: float  # when this backward was left
    intervals: tuple[Interval, ...] = ()  # phases within, in order of their ends
    buckets: tuple[BucketTiming, ...] = ()  # of Paceline's reducer; torch's says nothing of its own
    # Of torch's DDP: pairs of an index into `RankRun.labels` and the time at which that layer's last gradient was
    # there, in order. Paceline's buckets say it by `ready_s`.
    gradients: tuple[tuple[int, float], ...] = ()
    # the first dimension of what forward was given; None: it was given no tensor
    num_samples: int | None = None
    num_tokens: int | None = None  # elements of it if it was whole numbers of two dimensions or more
    # Of the whole step; read every few steps where these are short, and then their average. None: the next step with
    # facts says it.
    host: HostFacts | None = HostFacts()

    @property
    def step_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def work_s(self) -> float:
        """Return the seconds of own work: from the end of the backward before to the last gradient, less waiting."""
        inner_s = sum(
            max(0.0, min(x.end_s, self.work_ended_s) - max(x.start_s, self.began_s))
            for x in self.intervals
            if x.phase == "waiting"
        )
        return self.work_ended_s - self.began_s - inner_s

    @property
    def waited_s(self) -> float:
        """Return the seconds in which this rank waited for other ranks."""
        return self.step_s - self.work_s

    @property
    def gradient_marks(self) -> tuple[tuple[int, float], ...]:
        """Return pairs in order of time: an index into `RankRun.labels`, and when those gradients were there."""
        marks = self.gradients or tuple((bucket.index, bucket.ready_s) for bucket in self.buckets)
        return tuple(sorted(marks, key=lambda mark: mark[1]))

    def spans(self) -> list[tuple[str, float, float]]:
        """Return phases, their starts and ends, outer ones first. Waiting begins at the last own gradient."""
        until_s = {"backward": self.work_ended_s}
        found = [(x.phase, x.start_s, min(x.end_s, until_s.get(x.phase, x.end_s))) for x in self.intervals]
        return sorted(
            [*found, ("waiting", self.work_ended_s, self.ended_s)], key=lambda span: (span[1], -span[2])
        )

    def phases_s(self) -> dict[str, float]:
        """Return where the step went: every phase, with all waiting in `waiting`, and `other`; they add up to it."""
        found = dict.fromkeys(PHASES, 0.0)
        for x in self.intervals:
            start_s, end_s = max(x.start_s, self.began_s), min(x.end_s, self.work_ended_s)
            inside = _WITHIN_INNER.get(x.phase, tuple(_WITHIN_INNER))
            within_s = _covered_s([y for y in self.intervals if y.phase in inside], start_s, end_s)
            found[x.phase] = found.get(x.phase, 0.0) + max(0.0, end_s - start_s - within_s)
        found["other"] = max(0.0, self.work_ended_s - self.began_s - sum(found.values()))
        found["waiting"] += self.ended_s - self.work_ended_s
        return found


def _covered_s(intervals: Sequence[Interval], start_s: float, end_s: float) -> float:
    """Return how much of a span lies in any of these intervals, which may overlap."""
    covered_s, at_s = 0.0, start_s
    for each in sorted(intervals, key=lambda x: x.start_s):
        from_s, until_s = max(each.start_s, at_s), min(each.end_s, end_s)
        if until_s > from_s:
            covered_s, at_s = covered_s + until_s - from_s, until_s
    return covered_s


@dataclass(frozen=True)
class LinkCounters:
    """One end of a connection, counted since it was made; `diagnosis.links` finds whose end the other one is."""

    local: str  # address and port here, "10.0.0.1:4000"
    remote: str  # address and port there
    sent_bytes: int  # acknowledged by the other end
    received_bytes: int  # arrived from there
    busy_s: float  # during which something sent was not yet acknowledged
    num_resent: int  # segments, or datagrams, that were sent again or lost
    rtt_s: float  # the last round trip, smoothed
    least_rtt_s: float  # the shortest one
    kind: str = "tcp"  # "tcp" or "udp"
    # at which data arrived from there, while some did by the millisecond; 0: not known
    arrival_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Neighbour:
    """Another process that ran on the training thread's core between two samples."""

    pid: int
    name: str
    cpu_s: float


@dataclass(frozen=True)
class Sample:
    """Facts that are dearer, taken between steps, a few times a second at most."""

    step: int  # the last one that was complete
    at_s: float  # when
    clock_unix_s: float  # the host's clock then; it may step
    links: tuple[LinkCounters, ...] = ()  # connections to other processes
    # those that ran on the same core most; None: not looked at this time
    neighbours: tuple[Neighbour, ...] | None = None
    swapped_in_pages: int = 0  # of the whole host, since it started
    num_threads: int = 0  # of this process
    queued_s: float = 0.0  # of all its threads, since they started
    disk_s: float = 0.0  # the training thread, waiting for a disk since it started
    stolen_s: float = 0.0  # from this machine by the one that hosts it, all cores together, since it started


@dataclass(frozen=True)
class Labels:
    """Names of what `StepRecord.gradient_marks` counts, from this line on: a layer, or the layers of a bucket."""

    names: tuple[str, ...]
    # Of torch's DDP: bytes of each layer's gradients, and how many a bucket takes before it is sent.
    sizes: tuple[int, ...] = ()
    bucket_bytes: int = 0


@dataclass(frozen=True)
class Health:
    """The fingerprints of a rank's numbers, and what is wrong with them."""

    step: int  # after which
    # of some parameters, the same ones on every rank; equal bits give equal ones. "": none taken
    fingerprint: str = ""
    buffers: str = ""  # the same, of the model's buffers
    not_finite: str = ""  # a parameter whose own gradient was not finite. "": none


@dataclass(frozen=True)
class RunHeader:
    """The run's command, ranks and times; `run_id` is in every rank's first line, too."""

    run_id: str
    command: tuple[str, ...]
    began_unix_s: float
    paceline: str


@dataclass(frozen=True)
class RankHeader:
    """One rank, as its recording began."""

    run_id: str  # the run's
    rank: int  # in the default group
    num_ranks: int  # of the job
    host: str  # its name
    boot_id: str  # equal on ranks whose `perf_counter` is one clock
    pid: int  # of the process
    num_cpus: int  # cores that it may run on
    num_threads: int  # that torch computes with
    wrapper: str  # "paceline" or "torch": whose DDP
    device: str  # type of the first parameter's device
    torch: str  # its version
    began_s: float  # when recording began
    began_unix_s: float  # the host's clock then


Record = StepRecord | Sample | Labels | Health | RankHeader
