"""The collectives and messages of a process group, and the handles of what was launched (`Work`).

Only here, and in `process_group`, are a process group's methods called.

They work on any c10d group, registered by name or handed over as an object. `at_once` says that the caller waits for
the collective anyway: a backend may then perform it on the caller's thread.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ProcessGroup

_DEFAULT_TIMEOUT = timedelta(minutes=30)

# torch 2.8 knows it by its former name only.
_ALL_TO_ALL = "all_to_all_single" if hasattr(ProcessGroup, "all_to_all_single") else "alltoall_base"


# ---- collectives and messages


def all_reduce(tensor: Tensor, group: ProcessGroup, at_once: bool = False) -> C10dWork:
    """Replace `tensor` by the sum of all ranks' tensors. Collective; does not wait, unless `at_once`."""
    return C10dWork(group.allreduce([tensor], _sum_options(at_once)))


@functools.cache
def _sum_options(at_once: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.asyncOp = not at_once
    return options


def sum_in_place(tensor: Tensor, group: ProcessGroup) -> None:
    """Replace `tensor` by the sum of all ranks' tensors. Collective; blocks. For layers: torch.compile can trace it."""
    dist.all_reduce(tensor, group=group)


def all_reduce_mean(tensor: Tensor, group: ProcessGroup) -> C10dWork:
    """Replace `tensor` by the mean over ranks. Not all backends can. Collective; does not wait."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
    return C10dWork(group.allreduce([tensor], options))


def all_reduce_max(tensor: Tensor, group: ProcessGroup) -> C10dWork:
    """Replace `tensor` by the elementwise maximum over the ranks. Collective; does not wait."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
    return C10dWork(group.allreduce([tensor], options))


def broadcast(tensor: Tensor, group: ProcessGroup, source: int, at_once: bool = False) -> C10dWork:
    """Replace `tensor` by that of rank `source` of the group. Collective; does not wait, unless `at_once`."""
    options = dist.BroadcastOptions()
    options.asyncOp = not at_once
    options.rootRank, options.rootTensor = source, 0
    return C10dWork(group.broadcast([tensor], options))


def all_gather(rows: list[Tensor], row: Tensor, group: ProcessGroup, at_once: bool = False) -> C10dWork:
    """Fill `rows` with every rank's `row`. Collective; does not wait, unless `at_once`."""
    options = AllgatherOptions()
    options.asyncOp = not at_once
    return C10dWork(group.allgather([rows], [row], options))


def all_gather_pieces(rows: list[list[Tensor]], group: Any) -> C10dWork:
    """Fill the other ranks' rows, over a group that `shares_memory`. Collective; does not wait."""
    return C10dWork(group.all_gather_pieces(rows))


def reduce_scatter(result: Tensor, rows: list[Tensor], group: ProcessGroup) -> C10dWork:
    """Fill `result` with the sum of every rank's row for this one. Collective; does not wait."""
    return C10dWork(group.reduce_scatter([result], [rows], dist.ReduceScatterOptions()))


def all_to_all(
    received: Tensor,
    sent: Tensor,
    group: ProcessGroup,
    received_sizes: Sequence[int] = (),
    sent_sizes: Sequence[int] = (),
) -> C10dWork:
    """Send part i of `sent` to rank i; receive one from each. Collective, without waiting. See `can_all_to_all`.

    Parts have these lengths, by rank. Without any they are equally long.
    """
    exchange = getattr(group, _ALL_TO_ALL)
    return C10dWork(exchange(received, sent, list(received_sizes), list(sent_sizes), dist.AllToAllOptions()))


def can_all_to_all(group: ProcessGroup) -> bool:
    """Return whether the group has `all_to_all`; one written in Python may not (`RoundRobin`)."""
    kind = type(group)
    return kind is ProcessGroup or getattr(kind, _ALL_TO_ALL) is not getattr(ProcessGroup, _ALL_TO_ALL)


def isend(tensor: Tensor, group: Any, peer: int, tag: int) -> dist.Work:
    """Send `tensor` to a rank of the group, which receives it with this tag. Does not wait; leave it unchanged."""
    work: dist.Work = group.send([tensor], peer, tag)
    return work


def irecv(tensor: Tensor, group: Any, peer: int, tag: int) -> dist.Work:
    """Fill `tensor` with what a rank sends with the same tag. Does not wait; arguments as of `isend`."""
    work: dist.Work = group.recv([tensor], peer, tag)
    return work


def pass_on(tensor: Tensor, group: Any, order: Sequence[int]) -> None:
    """Replace `tensor` by that of the first of these ranks, which send it to each other. No other rank takes part.

    They form a binomial tree: in each round every rank that has it sends it to one more. Collective over `order`;
    blocks.
    """
    place, reach = order.index(group.rank()), 1
    while reach < len(order):
        if place < reach and place + reach < len(order):
            C10dWork(isend(tensor, group, order[place + reach], 0)).wait()
        elif reach <= place < 2 * reach:
            C10dWork(irecv(tensor, group, order[place - reach], 0)).wait()
        reach *= 2


def allocate_zeros(
    group: ProcessGroup, num_elements: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return zeros, 1-D; in memory that the group communicates from without a copy, if it has any. Local."""
    ours: Any = group
    if getattr(group, "supports_tensor_alloc", None) is not None and ours.supports_tensor_alloc(device):
        tensor: Tensor = ours.allocate_tensor(num_elements, dtype=dtype, device=device)
        return tensor
    return torch.zeros(num_elements, dtype=dtype, device=device)


def backend_of(group: ProcessGroup) -> str:
    """Return the group's backend, in lower case. Of a group that is not registered, return its own name."""
    try:
        return dist.get_backend(group)
    except (KeyError, ValueError, RuntimeError):
        return str(group.name()).lower()


def shares_memory(group: ProcessGroup) -> bool:
    """Return whether the group is of our backend and its ranks share memory. Local; the same on every rank."""
    return bool(getattr(group, "shares_memory", False))


def joins_hosts(group: ProcessGroup) -> bool:
    """Return whether the group is of our backend and sends a sum once for each host. Local; the same on every rank."""
    return bool(getattr(group, "joins_hosts", False))


def carries(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether the group carries tensors of this device; one written in Python need not say for which."""
    known = _device_types(group)
    return not known or device.type in known


def device_for_metadata(group: ProcessGroup, device: torch.device) -> torch.device:
    """Return where counts, shapes and settings that ranks exchange should lie.

    That is the host, if the group reaches it; otherwise `device`, or one that the group does reach.
    """
    known = _device_types(group)
    if "cpu" in known:
        return torch.device("cpu")
    return device if not known or device.type in known else torch.device(known[0])


def _device_types(group: ProcessGroup) -> list[str]:
    try:
        return [device.type for device in group._device_types]
    except (AttributeError, RuntimeError):  # a process group written in Python
        return []


def launch_session_name(process_group: ProcessGroup, device: torch.device) -> Callable[[], str]:
    """Let rank 0 draw a name for new connections. Return a function that waits for it. Collective; does not wait."""
    number = torch.tensor([secrets.randbits(62)], device=device_for_metadata(process_group, device))
    sent = broadcast(number, process_group, source=0)

    def name() -> str:
        sent.wait()
        return f"{int(number.item()):x}"

    return name


# ---- handles: wait, with a timeout so as to poll for failures, or be called back


class Work(Protocol):
    """The handle of something that has been launched."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, or for `timeout_s` seconds; returns whether it is done. Raises what went wrong."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it is done, on whichever thread notices; not at all where that cannot be known."""

    def is_done(self) -> bool:
        """Return whether it is done, as far as that is known without waiting."""
        return False

    def failure(self) -> Exception | None:
        """Return what went wrong, if that is known without waiting; within a callback of `on_done`, too."""
        return None


# c10d's word for no time limit but the group's. Always given: a work written in Python need not have a default.
_AS_LONG_AS_IT_TAKES = timedelta(0)


class C10dWork(Work):
    """The handle of a c10d `Work`."""

    def __init__(self, work: dist.Work) -> None:
        _outlive_works()
        self._work = work

    def wait(self, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            self._work.wait(_AS_LONG_AS_IT_TAKES)
            return True
        # c10d cuts a time limit to whole milliseconds. 1.9 ms cut to 1 would seem to be an error that came early.
        began_s = time.perf_counter()
        try:
            return self._work.wait(timedelta(milliseconds=math.ceil(timeout_s * 1e3))) is not False
        except (RuntimeError, TimeoutError):
            if self._work.is_completed():  # just after the time limit: this says how
                self._work.wait(_AS_LONG_AS_IT_TAKES)
            elif time.perf_counter() - began_s < 0.9 * timeout_s:  # not the limit but an error
                raise
            else:
                return False
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call back as `Work.on_done`, but never where a process group written in Python cannot say when it is done."""
        with contextlib.suppress(RuntimeError, NotImplementedError):  # torchft's future takes no callbacks
            self._work.get_future().add_done_callback(lambda _: callback())

    def is_done(self) -> bool:
        return self._work.is_completed()

    def failure(self) -> Exception | None:
        try:
            self._work.get_future().value()
        except RuntimeError as error:
            return error
        return None

    def future(self) -> torch.futures.Future[Any]:
        """Return the work's future, as torch's communication hooks hand it on; its value depends on the backend."""
        return self._work.get_future()


class MessageWork(C10dWork):
    """The handle of `isend` or `irecv`. Gloo closes the connection if a wait's time ends first, so none has an end."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait as `Work.wait`, but at most for the process group's timeout, whatever `timeout_s` is."""
        return super().wait()


@functools.cache
def _outlive_works() -> None:
    """Let the backend's threads drop their last callbacks and tensors before the interpreter ends.

    A thread that wants Python's lock after that aborts the process (before Python 3.14).
    """
    atexit.register(time.sleep, 0.05)


class Completion(Work):
    """The handle of work that another thread ends, by `complete`."""

    def __init__(self) -> None:
        self._has_ended = threading.Event()
        self.error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def has_ended(self) -> bool:
        return self._has_ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        if not self._has_ended.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.has_ended:
                self._callbacks.append(callback)
                return
        callback()

    def is_done(self) -> bool:
        return self.has_ended

    def failure(self) -> Exception | None:
        return self.error  # set before callbacks are called

    def complete(self, error: Exception | None = None) -> None:
        """Wake up all waiters. A second call changes nothing."""
        with self._lock:
            if self.has_ended:
                return
            self.error = error
            self._has_ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Chain(Work):
    """The handle of collectives that follow each other, with local work between and after them.

    The generator `stages` yields the handle of each, and continues, in `wait`, once that is done. So it may decide what
    to launch next by earlier results. Every rank has to launch the same. `on_done` reports when the last of
    `num_stages` is done; if the number is not known, when `wait` has come to the end. A chain without stages is done.
    What a stage raises, each `wait` raises.
    """

    def __init__(self, stages: Iterable[Work] = (), num_stages: int | None = None) -> None:
        self._stages = iter(stages)
        self._num_left = num_stages
        self._callbacks: list[Callable[[], None]] = []
        self._current: Work | None = None
        self._error: Exception | None = None
        self._advance()

    def _advance(self) -> None:
        try:
            self._current = next(self._stages, None)
        except Exception as error:
            self._error = error
            raise
        if self._current is not None and self._num_left is not None:
            self._num_left -= 1
        if self._current is None or self._num_left == 0:
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                self.on_done(callback)

    def wait(self, timeout_s: float | None = None) -> bool:
        deadline_s = None if timeout_s is None else time.perf_counter() + timeout_s
        if self._error is not None:
            raise self._error
        while self._current is not None:
            left_s = None if deadline_s is None else max(deadline_s - time.perf_counter(), 1e-3)
            if not self._current.wait(left_s):
                return False
            self._advance()
        return True

    def failure(self) -> Exception | None:
        return self._error

    def is_done(self) -> bool:
        return self._current is None or (self._num_left == 0 and self._current.is_done())

    def on_done(self, callback: Callable[[], None]) -> None:
        if self._current is None:
            callback()
        elif self._num_left == 0:
            self._current.on_done(callback)
        else:
            self._callbacks.append(callback)


def timeout_of(process_group: ProcessGroup) -> timedelta:
    """Return the timeout of the group's collectives, or 30 minutes if it cannot be found."""
    ours: Any = process_group
    found = getattr(ours, "_timeout", None)
    if not isinstance(found, timedelta):
        try:
            found = ours._get_backend(ours._device_types[0]).options._timeout
        except (AttributeError, IndexError, RuntimeError):
            found = None
    return found if isinstance(found, timedelta) else _DEFAULT_TIMEOUT
