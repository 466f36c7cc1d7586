"""One rank's recorder: makes a `StepRecord` of every step, adds what the kernel says, and writes it to a run folder.

Rules
1. It never communicates: a rank that is not recorded would not take part.
2. It never ends a training: whatever goes wrong here, recording stops and says so once.
3. A step costs a few reads of kernel files, and one line if it is written: a tenth of a millisecond. What costs
   milliseconds is sampled, now and then. Where nothing is written, steps below 20 ms are not all kept.
4. While the folder holds a file named `detached`, it does nothing but count steps.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.utils.data import dataloader

from paceline.host.processes import threads_queued, whereabouts
from paceline.host.thread_times import (
    CoreNeighbours,
    ThreadClock,
    ThreadTimes,
    disk_s,
    stolen_s,
    swapped_in_pages,
)
from paceline.observe import spans
from paceline.observe.run_folder import DETACHED, VARIABLE, RankWriter, header_of
from paceline.observe.run_lines import to_line
from paceline.observe.run_records import (
    BucketTiming,
    Health,
    HostFacts,
    Labels,
    Neighbour,
    RankHeader,
    Record,
    Sample,
    StepRecord,
)
from paceline.observe.timings import StepTimes, watch_optimizers
from paceline.recording.model_facts import BatchCounts, fingerprint
from paceline.recording.peer_sockets import PeerSockets

_KEPT = 256  # records
_SHORT_S = 0.02  # steps that are shorter are not all kept: a record takes a tenth of a millisecond
_FACTS_S = 0.025  # between two readings of what the kernel says: 40 us in the middle of a training
_LINKS_S, _FOUND_S = 0.25, 5.0  # between two samples of links, and between two searches for them
# between two samples of what costs milliseconds: at least, and of what one took
_DEAR_S, _DEAR_RATIO = (1.0, 200)
_LOOKED_S = 0.5  # between two looks whether it is detached
_FINGERPRINT_STEPS = 64


@dataclass(frozen=True)
class Work:
    """A wrapper's facts about a step that has ended; fields as `StepRecord`'s."""

    work_ended_s: float
    ended_s: float
    buckets: tuple[BucketTiming, ...] = ()
    gradients: tuple[tuple[int, float], ...] = ()
    num_samples: int | None = None
    num_tokens: int | None = None


class Recorder:
    """Records one rank's steps: keeps the last ones, and writes all to a run folder if there is one."""

    def __init__(self, header: RankHeader, folder: Path | None = None) -> None:
        self.header = header
        self._folder = folder
        self._writer = None if folder is None else RankWriter(folder, header)
        self._kept: deque[Record] = deque(maxlen=_KEPT)
        self._labels = Labels(())
        self._clock: ThreadClock | None = None  # whose files are open while a recorder is there
        self._times: ThreadTimes | None = None  # as last read, and when, and how many steps have ended since
        self._times_at_s = 0.0
        self._num_unread = 0
        self._began_s = header.began_s
        self._num_steps = 0
        self._sockets, self._neighbours = PeerSockets(), CoreNeighbours()
        self._links_at_s = self._dear_at_s = self._found_at_s = self._looked_at_s = -math.inf
        self._dear_s = 0.0  # what the last dear look took
        self._is_detached = self._has_stopped = False
        _clocks.clear()  # the process may be in another cgroup by now

    def name(self, labels: Labels) -> None:
        """Set the names of gradients or buckets by index, from now on."""
        self._labels = labels
        if self._writer is not None:
            self._writer.write(self._labels)

    def look_at(self, module: Module) -> None:
        """Record fingerprints of a model before the next step, after some steps: the same ones on every rank."""
        steps = self._num_steps
        is_due = steps in {4, 16} or (steps > 0 and steps % _FINGERPRINT_STEPS == 0)
        if self._writer is not None and is_due:
            began_s = time.perf_counter()
            self.note_health(*fingerprint(module))
            spans.note("recording", began_s, time.perf_counter())

    def note_health(self, fingerprint: str = "", buffers: str = "", not_finite: str = "") -> None:
        """Record what this rank found of its own numbers after the last step."""
        self._add(Health(self._num_steps, fingerprint, buffers, not_finite))

    def lines(self) -> bytes:
        """Return the kept steps, as lines of a run folder."""
        return b"".join(map(to_line, (self.header, self._labels, *self._kept)))

    def end_step(self, work: Work) -> None:
        """Record the step of a synchronized backward that has ended. Never raises."""
        self._num_steps += 1
        began_s, self._began_s = self._began_s, work.ended_s
        if self._has_stopped or self._looks_detached(work.ended_s):
            self._times, self._num_unread = None, 0
            return
        if self._writer is None and self._num_steps % _every(work.ended_s - began_s):
            self._num_unread += 1
            return
        try:
            self._record(began_s, work)
        except Exception as error:  # noqa: BLE001  rule 2
            self._has_stopped = True
            sys.stderr.write(f"paceline: recording ended after step {self._num_steps}: {error!r}\n")

    def _record(self, began_s: float, work: Work) -> None:
        if self._times is None:  # the first step after it was attached: not known from its beginning
            self._times, self._times_at_s = self._read_clock(), work.ended_s
            return
        self._num_unread += 1
        host = self._host_facts(work.ended_s) if work.ended_s - self._times_at_s >= _FACTS_S else None
        record = StepRecord(
            self._num_steps,
            began_s,
            max(began_s, min(work.work_ended_s, work.ended_s)),
            work.ended_s,
            spans.between(began_s, work.ended_s),
            work.buckets,
            work.gradients,
            work.num_samples,
            work.num_tokens,
            host,
        )
        self._add(record)
        now_s = time.perf_counter()
        if now_s - self._links_at_s >= _LINKS_S:
            self._sample(now_s)
        spans.note("recording", work.ended_s, time.perf_counter())

    def _read_clock(self) -> ThreadTimes:
        here = os.getpid(), threading.get_ident()
        if (clock := _clocks.get(here)) is None:
            clock = _clocks[here] = ThreadClock()
        self._clock = clock
        return clock.read()

    def _host_facts(self, now_s: float) -> HostFacts:
        """Return the host's facts for a step: averages since the last reading."""
        before, now, steps = self._times, self._read_clock(), self._num_unread
        assert before is not None
        self._times, self._times_at_s, self._num_unread = now, now_s, 0
        return HostFacts(
            (now.cpu_s - before.cpu_s) / steps,
            (now.queued_s - before.queued_s) / steps,
            max(0.0, now.throttled_s - before.throttled_s) / steps,
            (now.major_faults - before.major_faults) // steps,
            (now.preemptions - before.preemptions) // steps,
        )

    def _add(self, record: Record) -> None:
        self._kept.append(record)
        if self._writer is not None:
            self._writer.write(record)

    def _sample(self, now_s: float) -> None:
        """Links; and, where a run is written down, what takes milliseconds, for half a percent of the time at most."""
        if now_s - self._found_at_s >= _FOUND_S:
            self._found_at_s = now_s
            self._sockets.find()
            if self._writer is not None:
                self._sockets.watch()
        dear: dict[str, Any] = {}
        if self._writer is not None and now_s - self._dear_at_s >= max(_DEAR_S, _DEAR_RATIO * self._dear_s):
            num_threads, queued_s = threads_queued()
            dear = {
                "neighbours": tuple(starmap(Neighbour, self._neighbours.look())),
                "swapped_in_pages": swapped_in_pages(),
                "num_threads": num_threads,
                "queued_s": queued_s,
                "disk_s": disk_s(),
                "stolen_s": stolen_s(),
            }
            self._dear_at_s = now_s
            self._dear_s = time.perf_counter() - now_s
        self._links_at_s = now_s
        self._add(Sample(self._num_steps, now_s, time.time(), self._sockets.counters(), **dear))

    def _looks_detached(self, now_s: float) -> bool:
        if self._folder is not None and now_s - self._looked_at_s >= _LOOKED_S:
            self._looked_at_s = now_s
            self._is_detached = os.path.exists(self._folder / DETACHED)  # noqa: PTH110  as fast as can be
        return self._is_detached


# By process and thread. Recorders that read a clock hold it: with the last, its files go.
_clocks: weakref.WeakValueDictionary[tuple[int, int], ThreadClock] = weakref.WeakValueDictionary()
_written_by = 0  # the process that writes to a run folder


def _every(step_s: float) -> int:
    """Return n if every n-th step is kept: a power of two, so that ranks have steps in common."""
    return 1 if step_s >= _SHORT_S else 2 ** min(6, math.ceil(math.log2(_SHORT_S / max(step_s, 1e-6))))


def folder_of_this_rank() -> Path | None:
    """Return the run folder that the environment names, unless another model of Paceline's writes there.

    Failures go to stderr.
    """
    global _written_by  # noqa: PLW0603  one a process
    words = os.environ.get(VARIABLE)
    if not words or _written_by == os.getpid():
        return None
    _written_by = os.getpid()
    try:
        header_of(Path(words))
    except Exception as error:  # noqa: BLE001  a training goes on without being recorded
        sys.stderr.write(f"paceline: this rank is not recorded: {error}\n")
        return None
    return Path(words)


def header_of_rank(folder: Path | None, wrapper: str, device: str, rank: int, num_ranks: int) -> RankHeader:
    """Return the identity of this process, as its recording begins."""
    try:
        boot_id = whereabouts("time")
    except OSError:
        boot_id = ""
    return RankHeader(
        "" if folder is None else header_of(folder).run_id,
        rank,
        num_ranks,
        socket.gethostname(),
        boot_id,
        os.getpid(),
        len(os.sched_getaffinity(0)),
        torch.get_num_threads(),
        wrapper,
        device,
        torch.__version__,
        time.perf_counter(),
        time.time(),
    )


_LEAST_GARBAGE_S = 1e-4  # collections of the youngest objects are not worth a line

_is_watching = False


def watch_phases() -> None:
    """Note the phases of this process from now on. May be called often."""
    global _is_watching  # noqa: PLW0603  once a process
    if _is_watching:
        return
    _is_watching = True
    loader: Any = dataloader._BaseDataLoaderIter
    loader.__next__ = timed("loading", loader.__next__)
    torch.save = timed("checkpoint", torch.save)
    gc.callbacks.append(_Garbage().on_collection)
    watch_optimizers()


def timed(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its calls are noted as a phase."""

    @functools.wraps(call)
    def noting(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spans.note(phase, began_s, time.perf_counter())

    return noting


class _Garbage:
    def __init__(self) -> None:
        self._began_s = 0.0

    def on_collection(self, stage: str, _: dict[str, int]) -> None:
        now_s = time.perf_counter()
        if stage == "start":
            self._began_s = now_s
        elif now_s - self._began_s > _LEAST_GARBAGE_S:
            spans.note("garbage", self._began_s, now_s)


class OurSteps:
    """One wrapped model's records on this rank."""

    def __init__(self, device: str, rank: int, num_ranks: int) -> None:
        if dist.is_initialized():  # the whole job's, whatever group the model is on
            rank, num_ranks = dist.get_rank(), dist.get_world_size()
        folder = folder_of_this_rank()
        self.recorder = Recorder(header_of_rank(folder, "paceline", device, rank, num_ranks), folder)
        self._named: object = None
        if folder is not None:
            watch_phases()

    def record_by(self, recorder: Recorder) -> None:
        """Use another recorder from the next step on, such as one with a run folder."""
        self.recorder, self._named = recorder, None
        watch_phases()

    def name_buckets(self, buckets: object, labels: Callable[[], list[str]]) -> None:
        """Take the names of the buckets' content. Ask for them only if `buckets` is another object than before."""
        if buckets is not self._named:
            self._named = buckets
            self.recorder.name(Labels(tuple(labels())))

    def begin_forward(
        self, batch: BatchCounts, module: Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Add the batch of a forward that may be differentiated to the step's counts. Called before the forward."""
        begins_step = not batch.has_begun
        batch.add(inputs, kwargs)
        if begins_step:
            self.recorder.look_at(module)

    def end_step(self, times: StepTimes, batch: BatchCounts) -> None:
        """Record a step whose synchronized backward has ended well; without buckets if it was deferred."""
        left_s = time.perf_counter()
        spans.note("backward", times.started_s, left_s)
        buckets = () if times.timing is None else times.timing.buckets
        self.recorder.end_step(Work(times.last_gradient_s, left_s, buckets, (), batch.samples, batch.tokens))
