"""A communicator: operations of a group's ranks, in one order, on one stream of the device.

NCCL's contract, as torch's process group keeps it:

1. An operation waits for what the caller's current stream has been given so far, on the communicator's stream; the
   caller goes on.
2. `Work.wait` makes the stream that is current then wait for the operation. The host does not wait, unless it gives a
   time limit.
3. The operation's tensors are kept until somebody has waited, or it is done.
4. An operation runs when the device comes to it. A rank whose device does says so, and the devices of the others go on
   as far as that, whatever their hosts are doing.
5. What fails, fails then. It is told to the next host that waits for the device, to `Work.exception`, to later waits
   and launches.
6. An abort fails nothing (`exchange.py`): the stream goes on over old bytes, and `Work.wait` says nothing. Launches are
   refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from device import late
from device.nccl import moments
from device.nccl.exchange import AbortedError, Exchange, Pause, meet
from device.nccl.faults import is_broken

_LONGEST_LOOK_S = 0.02  # between two looks whether another rank's device has come further


@dataclass(frozen=True)
class Operation:
    """What is done on the host's memory of some tensors, on all ranks of a communicator.

    Attributes:
        name: As NCCL names it.
        perform: Does it, given the communicator's exchange and the operation's number; may block.
        reads: Tensors of the device that it reads.
        writes: Those that it writes, perhaps after reading them.
    """

    name: str
    perform: Callable[[Exchange, str], None]
    reads: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.reads, *self.writes]


@dataclass
class _Outcome:
    """What became of an operation; its task knows this and not the work, which keeps tensors."""

    error: Exception | None = None


class LateWork(dist.Work):
    """The handle of an operation that was launched."""

    def __init__(self, operation: Operation, communicator: Communicator) -> None:
        super().__init__()
        self._name = operation.name
        self._results = list(operation.writes)
        self._communicator = communicator
        self._kept = [] if is_broken("stash") else operation.tensors
        self._end = torch.Event(device=communicator.device)
        self._future: Future[Any] = Future(devices=[communicator.device])
        self.outcome = _Outcome()
        self.place = 0  # of its task on the stream

    def launched(self, place: int) -> None:
        """The operation's task has been queued; the communicator's stream is current."""
        self.place = place
        self._end.record(self._communicator.stream)
        self._future.set_result(self._results)

    @property
    def is_done(self) -> bool:
        """Whether the device has come to its end, which the host then knows; makes no progress."""
        done: bool = late.start().is_done(late.index_of(self._communicator.stream), self.place)
        return done and self._end.query()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait; with a time limit, the host as well. Says nothing of an abort."""
        if not self._communicator.is_aborted:
            self._communicator.raise_failure()
        if not is_broken("output wait"):
            torch.accelerator.current_stream(self._communicator.device).wait_event(self._end)
        self._kept = []
        if timeout:
            self._wait_on_host(timeout)
        elif is_broken("host wait"):
            self._end.synchronize()
        return True

    def _wait_on_host(self, timeout: timedelta) -> None:
        waiting = threading.Thread(target=self._communicator.run_until, args=(self.place,), daemon=True)
        waiting.start()
        waiting.join(timeout.total_seconds())
        if waiting.is_alive():
            raise RuntimeError(f"{self._name} was not done after {timeout.total_seconds():g} s")
        self._end.synchronize()
        if not self._communicator.is_aborted:
            self._communicator.raise_failure()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.outcome.error is not None or self._end.query()

    def is_success(self) -> bool:
        return self.is_completed() and self.outcome.error is None

    def exception(self) -> Exception | None:
        return self.outcome.error

    def get_future(self) -> Future[Any]:
        return self._future

    def result(self) -> list[Tensor]:
        return self._results


class Communicator:
    """One stream of this rank's device, and the same operations in the same order on every rank's.

    Args:
        store: Of this communicator alone.
        rank: This one's number in it.
        size: How many.
        device: Of this rank.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)
        self._exchange = Exchange(meet(store), rank, size)
        self._works: list[LateWork] = []  # not known to be done
        self._places: list[int] = []  # of each operation, its task's number on the stream
        self._failure: Exception | None = None
        self._held: tuple[Operation, LateWork] | None = None  # while the order is broken
        self._more = threading.Condition()
        if size > 1:
            threading.Thread(target=self._watch, daemon=True).start()

    def launch(self, operation: Operation) -> LateWork:
        """Queue an operation after what the current stream has been given. The host does not wait."""
        self.raise_failure()
        if not is_broken("input wait"):
            begin = torch.Event(device=self.device)
            begin.record(torch.accelerator.current_stream(self.device))
            self.stream.wait_event(begin)
        work = LateWork(operation, self)
        if is_broken("order") and self._held is None:
            self._held = operation, work
            return work
        self._queue(operation, work)
        if self._held is not None:
            held, self._held = self._held, None
            self._queue(*held)
        return work

    def _queue(self, operation: Operation, work: LateWork) -> None:
        step, name, perform, outcome = len(self._places), operation.name, operation.perform, work.outcome
        with torch.no_grad(), self.stream:
            place = late.queue(  # a function that keeps no tensor
                lambda: self._perform(name, perform, step, outcome),
                f"nccl:{name}",
                self.stream,
                (operation.reads, operation.writes),
            )
            work.launched(place)
        with self._more:
            self._places.append(place)
            self._more.notify_all()
        self._works = [other for other in self._works if not other.is_done]
        if not is_broken("stash"):
            self._works.append(work)

    def run_until(self, place: int) -> None:
        """Let the device come to the end of an operation; its error is kept."""
        late.start().run_until(late.index_of(self.stream), place)

    def raise_failure(self) -> None:
        """Raise what an earlier operation failed with."""
        if self._failure is not None:
            raise dist.DistBackendError(f"an earlier collective of this group has failed: {self._failure}")

    def close(self) -> None:
        """Refuse what comes from now on."""
        self._failure = self._failure or AbortedError("it was shut down")
        self._exchange.aborted = self._exchange.aborted or is_broken("flush")

    def abort(self) -> None:
        """End what is under way, and refuse the rest."""
        self._failure = self._failure or AbortedError("it was aborted")
        self._exchange.aborted = True
        with self._more:
            self._more.notify_all()

    @property
    def is_aborted(self) -> bool:
        """Return whether this rank has aborted, and nothing has failed before."""
        return isinstance(self._failure, AbortedError)

    @property
    def num_launched(self) -> int:
        """The number of operations that this rank's host has launched."""
        return len(self._places)

    def _perform(
        self, name: str, perform: Callable[[Exchange, str], None], step: int, outcome: _Outcome
    ) -> None:
        try:
            self._begin(step)
            perform(self._exchange, str(step))
            moments.come(self._exchange.rank, str(step), "end")
        except Exception as error:
            outcome.error = error
            self._failure = self._failure or error
            raise

    def _begin(self, step: int) -> None:
        if is_broken("failure"):
            raise RuntimeError("broken on purpose")
        self._exchange.begin(step)
        moments.come(self._exchange.rank, str(step), "begin")

    def _watch(self) -> None:
        """Run an operation here to which another rank's device has come."""
        step, pause = 0, Pause(_LONGEST_LOOK_S)
        while not self._exchange.aborted:
            if not self._exchange.has_begun(step):
                pause.sleep()
                continue
            with self._more:
                self._more.wait_for(lambda: self.num_launched > step or self.is_aborted)  # noqa: B023
                if self.num_launched <= step:
                    return
                place = self._places[step]
            self.run_until(place)
            step, pause = step + 1, Pause(_LONGEST_LOOK_S)
