"""RoundRobin: a process group that uses several groups in turn, with a bound on how many collectives are in flight.

One connection, or one thread, may not saturate a link; several can. Every rank dispatches in the order of its calls,
so the i-th collective goes to group i mod k everywhere. With a bound of c, the end of collective n lets collective n
+ c start. So the same collectives are in flight on every rank. None waits for one that another rank has not started.

Source:
    Li et al., VLDB 2020, section 5.4 (round-robin process groups, since removed from torch); Goyal et al. 2017,
    section 4 (the bound).
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.errors import ConfigurationError

_Launch = Callable[[dist.ProcessGroup], dist.Work]


class RoundRobin(dist.ProcessGroup):
    """A process group that hands each collective to the next of several groups.

    Args:
        groups: Over the same ranks in the same order. At least one.
        max_in_flight: Number of collectives that may be under way at once; None for no bound.

    Contract:
        Collectives: every rank, same order. A collective is launched by the caller, or later by the end of an earlier
        one; it never blocks the caller.

    Raises:
        ConfigurationError: No group, groups of different ranks, or a bound below 1.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], max_in_flight: int | None = None) -> None:
        if not groups:
            raise ConfigurationError("RoundRobin needs at least one process group; it got none.")
        places = [(group.rank(), group.size()) for group in groups]
        if len(set(places)) > 1:
            raise ConfigurationError(
                f"RoundRobin needs groups over the same ranks; as (rank, size) they are {places}."
            )
        if max_in_flight is not None and max_in_flight < 1:
            raise ConfigurationError(
                f"max_in_flight is {max_in_flight}; at least 1 collective must be in flight."
            )
        super().__init__(*places[0])  # type: ignore[call-arg, arg-type]  # as a group in Python is made
        self.groups = tuple(groups)
        self.max_in_flight = max_in_flight
        self._lock = threading.Lock()
        self._num_dispatched = 0
        self._waiting: collections.deque[tuple[_Launch, _Dispatched]] = collections.deque()
        self._num_in_flight = 0
        self._is_launching = False

    def getBackendName(self) -> str:  # noqa: N802
        return "round_robin"

    def name(self) -> str:
        return "round_robin"

    def rank(self) -> int:
        return int(self.groups[0].rank())

    def size(self) -> int:
        return int(self.groups[0].size())

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False  # memory of one group is of no use to the next

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._dispatch(lambda group: group.allreduce(tensors, opts or dist.AllreduceOptions()))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._dispatch(lambda group: group.broadcast(tensors, opts))

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._dispatch(lambda group: group.reduce(tensors, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._dispatch(lambda group: group.allgather(outputs, inputs, *([opts] if opts else [])))

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        return self._dispatch(
            lambda group: group.reduce_scatter(outputs, inputs, opts or dist.ReduceScatterOptions())
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._dispatch(lambda group: group.barrier(opts or dist.BarrierOptions()))

    def _dispatch(self, launch: _Launch) -> dist.Work:
        work = _Dispatched()
        with self._lock:
            self._waiting.append((launch, work))
        self._launch_allowed()
        return work

    def _launch_allowed(self) -> None:
        """Launch waiting collectives in order, within the bound. One thread at a time does it for all."""
        with self._lock:
            if self._is_launching:
                return  # the launching thread looks again
            self._is_launching = True
        while (following := self._next_allowed()) is not None:
            launch, work, group = following
            work.start(launch, group, self._on_end)  # may end at once, and so call `_on_end`

    def _next_allowed(self) -> tuple[_Launch, _Dispatched, dist.ProcessGroup] | None:
        with self._lock:
            bound = self.max_in_flight
            if not self._waiting or (bound is not None and self._num_in_flight >= bound):
                self._is_launching = False
                return None
            group = self.groups[self._num_dispatched % len(self.groups)]
            self._num_dispatched += 1
            self._num_in_flight += 1
            return *self._waiting.popleft(), group

    def _on_end(self) -> None:
        with self._lock:
            self._num_in_flight -= 1
        self._launch_allowed()

    def shutdown(self) -> None:
        """Leave the groups alone: the caller that made them destroys them."""


class _Dispatched(dist.Work):
    """A collective that one of the groups performs, now or later."""

    def __init__(self) -> None:
        super().__init__()
        self._outcome: Future[None] = Future()
        self._future: Future[Any] = self._outcome.then(self._give)  # what it raises is an error for C++ too
        self._value: Any = None
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def start(self, launch: _Launch, group: dist.ProcessGroup, on_end: Callable[[], None]) -> None:
        try:
            inner = launch(group)
            inner.get_future().add_done_callback(lambda future: self._end(future, on_end))
        except RuntimeError as error:
            self._finish(None, error, on_end)

    def _end(self, inner: Future[Any], on_end: Callable[[], None]) -> None:
        try:
            value, error = inner.value(), None
            if isinstance(value, BaseException):  # of `Future.set_exception`
                value, error = None, value
        except RuntimeError as raised:
            value, error = None, raised
        self._finish(value, error, on_end)

    def _finish(self, value: Any, error: BaseException | None, on_end: Callable[[], None]) -> None:
        self._value, self._error = value, error
        self._ended.set()
        on_end()
        self._outcome.set_result(None)

    def _give(self, _: object) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds()
        if not self._ended.wait(limit_s if limit_s > 0 else None):
            raise RuntimeError(f"a collective was not done after {limit_s:g} s; it is still under way")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def get_future(self) -> Future[Any]:
        return self._future
