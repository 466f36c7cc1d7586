"""A lane: one thread that performs the collectives of a group one after another, in the order of their launch.

A collective whose caller waits for it need not go to another thread. A caller that launches and waits at once
performs it if the lane is idle. A caller that waits later performs what the lane's thread has not begun yet.

What a callback of a collective launches is performed before anything else that is queued. So it does not matter on
which rank the callback was registered before the collective ended, and on which after: the order is the same.
"""

from __future__ import annotations

import operator
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _profiler_enabled as _is_profiled
from torch.autograd.profiler import record_function
from torch.futures import Future

from paceline.comm import BACKEND_NAME
from paceline.comm.collectives import C10dWork, Work
from paceline.comm.device import SideStreams, StreamEvent, devices_of, keep_for_current_streams
from paceline.errors import PeerLostError, ProtocolError
from paceline.host.exit import end_before_exit


class LaneWork(dist.Work):
    """A collective that has been launched on a lane.

    It is performed without autograd. On accelerators it runs on streams of the lane, behind the work that the current
    streams were given before the launch. `wait` lets the current streams wait for it. The host waits until it has been
    performed, which is not when the device is done.

    Args:
        perform: Does the work, on the lane. May block.
        outputs: The tensors that it writes. They decide on which devices it is performed.
        what: Its name, for the profiler and errors.
    """

    _devices: Sequence[torch.device] = ()
    _launched: StreamEvent | None = None  # on accelerators: behind what it is performed
    _performed: StreamEvent | None = None  # on accelerators: where the lane's streams have done it
    _is_done = False
    _error: BaseException | None = None
    _ended: Future[Any] | None = None
    _future: Future[list[Tensor]] | None = None
    _recorded: Future[None] | None = None
    lane: Lane | None = None  # on which it was launched
    _lock = threading.Lock()  # of all: held for an instant, while a future is made or a work ends

    def __init__(self, perform: Callable[[], None], outputs: list[Tensor], what: str) -> None:
        super().__init__()
        self._perform = perform
        self._outputs = outputs
        self._what = what
        self._ending = threading.Lock()  # held until the end: cheaper than an Event, one a collective
        self._ending.acquire()
        if not all(map(_IS_CPU, outputs)):
            self._devices = devices_of(outputs)
        if _is_profiled():
            self._recorded = _record(what, outputs)

    def note_launch(self, lane: Lane) -> None:
        """Note that the work was launched, behind all that the current streams have been told."""
        self.lane = lane
        if self._devices:
            self._launched = StreamEvent(self._devices)

    def perform(self) -> None:
        """Perform the work on this thread; an error is kept for its waiters."""
        had_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # the switch itself, without an object of Python around it
        try:
            self._perform_on_streams(self._launched) if self._launched is not None else self._perform()
        except BaseException as error:  # noqa: BLE001  whatever it is, it is raised to the waiters
            # Without this frame, which refers to this object: else only the garbage collector would free it. A lost
            # peer, and that the group is broken, is told by words; functions of the frames refer to the group, which
            # could not end.
            frames = error.__traceback__
            if isinstance(error, (PeerLostError, ProtocolError)):
                frames = None
                if error.__cause__ is not None:  # what a backend said, which is among the words
                    error.__cause__.__traceback__ = None
            elif frames is not None:
                frames = frames.tb_next
            self._error = error.with_traceback(frames)
            del frames
        finally:
            torch._C._set_grad_enabled(had_grad)
        del self._perform  # and with it the references to inputs
        if self._recorded is not None:
            # Before anyone knows of the end, as the profiler may be stopped then.
            self._recorded.set_result(None)
        with self._lock:
            self._is_done = True
            self._ending.release()
            ended = self._ended
        if ended is not None:
            self._end(ended)

    def _perform_on_streams(self, launched: StreamEvent) -> None:
        assert self.lane is not None, "launched on a lane"
        with self.lane.streams.current(self._devices, after=launched):
            keep_for_current_streams(self._outputs)
            try:
                self._perform()
            finally:
                self._performed = StreamEvent(self._devices)

    def _end(self, ended: Future[Any]) -> None:
        """Complete the future; one of accelerators records the place in the current streams."""
        if self._performed is None or self.lane is None:
            ended.set_result(None)
            return
        with self.lane.streams.current(self._devices, after=self._performed):
            ended.set_result(self._outputs)

    def _value(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end, at most `timeout` (0: as long as the group allows). Raises what went wrong."""
        if not self._is_done:
            self._await(timeout.total_seconds())
        if self._error is not None:
            raise self._error
        if self._performed is not None:
            self._performed.order()
        return True

    def _await(self, limit_s: float) -> None:
        if limit_s <= 0 and self.lane is not None:
            self.lane.help_with(self)
        if not self._ending.acquire(timeout=limit_s if limit_s > 0 else -1):
            raise RuntimeError(f"{self._what} was not done after {limit_s:g} s; it is still under way")
        self._ending.release()

    def is_completed(self) -> bool:
        return self._is_done

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the outputs."""
        with self._lock:
            if self._future is None:
                self._ended = Future(devices=[*self._devices]) if self._devices else Future()
                # An error raised by a callback is one for C++ too, which `set_exception` is not.
                self._future = self._ended.then(self._value)
                if not self._is_done:
                    return self._future
            else:
                return self._future
        self._end(self._ended)
        return self._future

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()


_IS_CPU = operator.attrgetter("is_cpu")


def _record(what: str, tensors: list[Tensor]) -> Future[None]:
    """Begin a range in the profiler of this thread, which ends, on any thread, with the future's result.

    The range is named as torch's backends name theirs (`gloo:all_reduce`). A range that ends elsewhere cannot carry
    shapes. So a short range within it has them, named as the operator that calls torch's backends.
    """
    ended: Future[None] = Future()
    with record_function(f"{BACKEND_NAME}:{what.replace('-', '_')}") as record:
        if what in _OPERATORS:
            with torch._C._profiler._RecordFunctionFast(_OPERATORS[what], tensors, {}):
                pass
        record._call_end_callbacks_on_future(ended)
    return ended


_OPERATORS = {
    "all-reduce": "c10d::allreduce_",
    "all-gather": "c10d::allgather_",
    "broadcast": "c10d::broadcast_",
    "reduce": "c10d::reduce_",
    "reduce-scatter": "c10d::reduce_scatter_",
    "gather": "c10d::gather_",
    "scatter": "c10d::scatter_",
    "all-to-all": "c10d::alltoall_",
    "barrier": "c10d::barrier",
}
"""By the name of a collective of the backend, the operator of torch's that would perform it."""


class Lane:
    """A thread that performs works one after another; those of accelerators on streams of its own."""

    def __init__(self, name: str) -> None:
        self.streams = SideStreams()
        self._waiting: deque[LaneWork] = deque()
        # To the thread: True to look for work, False to end.
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by the thread that performs
        self._performer = 0  # the id of its thread
        self._closed = False

    def launch(self, work: LaneWork, at_once: bool) -> LaneWork:
        """Perform `work` after all earlier ones. `at_once`: the caller waits, so it may run on the calling thread."""
        work.note_launch(self)
        if self._performer == threading.get_ident():
            work.perform()  # launched by a callback of the collective that has just ended
            return work
        with self._lock:
            inline = at_once and not self._waiting and self._turn.acquire(blocking=False)
            if not inline:
                self._start()
                self._waiting.append(work)
                self._calls.put(True)
        if inline:
            try:
                self._perform(work)
            finally:
                self._turn.release()
        return work

    def is_here(self) -> bool:
        """Return whether the calling thread is the lane's own."""
        return threading.current_thread() is self._thread

    def help_with(self, work: LaneWork) -> None:
        """Run the queued works up to `work` on this thread, which waits for it, if the lane is idle."""
        while not work.is_completed() and self._turn.acquire(blocking=False):
            try:
                performed = self._perform_next()
            finally:
                self._turn.release()
            error = performed.exception() if performed is not None else None
            if error is not None and not isinstance(error, Exception):
                raise error

    def _perform_next(self) -> LaneWork | None:
        """Perform the work that has waited longest, and return it; None if none waits. The caller holds the turn."""
        with self._lock:
            work = self._waiting[0] if self._waiting else None
        if work is not None:
            try:
                self._perform(work)
            finally:
                with self._lock:
                    self._waiting.popleft()  # only now: what is launched meanwhile must not overtake it
        return work

    def _perform(self, work: LaneWork) -> None:
        self._performer = threading.get_ident()
        try:
            work.perform()
        finally:
            self._performer = 0

    def _start(self) -> None:
        if self._closed:
            raise ProtocolError(
                "this process group has been destroyed. Make a new one (dist.new_group, init_process_group), and wrap "
                "models again that used it."
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            end_before_exit(self, Lane.close)

    def _run(self) -> None:
        while self._calls.get():
            with self._turn:
                self._perform_next()

    def close(self, timeout_s: float) -> bool:
        """End the thread after what is queued; returns whether nothing is under way, on any thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._calls.put(False)
        if threading.get_ident() == self._performer or thread is threading.current_thread():
            return True  # called by a callback, which cannot wait for itself
        until_s = time.monotonic() + timeout_s
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        # Another thread may be performing what it waits for.
        is_idle = self._turn.acquire(timeout=max(until_s - time.monotonic(), 0.0))
        if is_idle:
            self._turn.release()
        return is_idle


class ContinuedWork(Work):
    """The handle of work that a lane begins, and that goes on elsewhere.

    `begin` runs on the lane, and may block. It returns the handle of the rest. `finish` is called once, by the first
    `wait` that sees the end of the rest.
    """

    def __init__(
        self,
        lane: Lane,
        begin: Callable[[], Work],
        outputs: list[Tensor],
        what: str,
        finish: Callable[[], None],
    ) -> None:
        self._rest: Work | None = None
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()

        def perform() -> None:
            self._rest = begin()

        self._begun = C10dWork(lane.launch(LaneWork(perform, outputs, what), at_once=False))

    def wait(self, timeout_s: float | None = None) -> bool:
        until_s = None if timeout_s is None else time.perf_counter() + timeout_s
        if not self._begun.wait(timeout_s):
            return False
        assert self._rest is not None, "the lane's work is done"
        left_s = None if until_s is None else max(1e-3, until_s - time.perf_counter())
        if not self._rest.wait(left_s):
            return False
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        def when_begun() -> None:
            if self._rest is not None:
                self._rest.on_done(callback)
            else:  # it has failed
                callback()

        self._begun.on_done(when_begun)

    def failure(self) -> Exception | None:
        return self._begun.failure() if self._rest is None else self._rest.failure()
