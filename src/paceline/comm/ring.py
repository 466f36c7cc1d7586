"""A reduce-scatter and an all-gather of a Gloo group's CPU tensors on a ring of its ranks, in chunks.

Rules
1. Each rank receives from its successor alone, and sends to its predecessor alone. So no switch has to queue what two
   ranks send to a third. In an all-to-all of four hosts behind 1 Gbit/s, 5 to 10 of 100 packets are lost there.
2. A rank passes a chunk on while it receives the next one. When it has nothing left to send of a collective, the next
   collective's first chunks leave.
3. A lane of the group's own performs the collectives in the order of their launch, which is the same on every rank.
   Other messages between two ranks of the group have tags below `_TAG`.
4. The sum for a rank begins with its predecessor's elements. Each rank before that adds its own, the rank itself last.
5. A rank whose collective fails closes its connections, and so do its neighbours then. Otherwise a rank waits for one
   that is alive and has given up, until the group's timeout. A thread that still waited so when the program ends would
   abort the process.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import C10dWork, all_gather, irecv, isend
from paceline.comm.gradient_group import gloo_of
from paceline.comm.lane import Lane, LaneWork
from paceline.host.exit import end_before_exit

_CHUNK_ELEMENTS = 256 * 1024
_TAG = 1 << 30
_CLOSES_S = 1.0  # for a thread whose connections are closed

_rings: WeakKeyDictionary[ProcessGroup, _Ring] = WeakKeyDictionary()


def has_ring(group: ProcessGroup, tensor: Tensor) -> bool:
    """Return whether these collectives carry such tensors over this group. Local; the same on every rank."""
    return group.size() > 1 and tensor.is_cpu and gloo_of(group) is not None


def reduce_scatter_on_ring(rows: Sequence[Sequence[Tensor]], group: ProcessGroup) -> C10dWork:
    """Replace this rank's row by the sum of all ranks' rows for it. A row is a list of pieces, 1-D.

    Contract:
        Collective: every rank, same order.  Blocks: no.  Mutates: this rank's row. The others are left unchanged until
        the work is done. A row is as long on every rank, but another row may be longer.

    Cost:
        P-1 rounds; each rank sends all rows but one. Memory of two collectives is kept.

    Source:
        Patarasuk & Yuan 2009, the first half.
    """
    chunks = [_chunks(row) for row in _from_here(rows, group)]
    return _launch("reduce-scatter", group, _Passing(group, chunks[0], [*chunks[1:]], adds=True))


def all_gather_on_ring(rows: Sequence[Tensor], row: Tensor, group: ProcessGroup) -> C10dWork:
    """Fill `rows` with every rank's `row`, which is this rank's own place among them. Collective; does not wait.

    Another group than Gloo's gathers them in its own way.
    """
    if not has_ring(group, row):
        return all_gather([*rows], row, group)
    *others, own = (_chunks([each]) for each in _from_here(rows, group))
    return _launch("all-gather", group, _Passing(group, own, others, adds=False))


def _from_here(rows: Sequence[Any], group: ProcessGroup) -> list[Any]:
    """Return the rows of this rank's successor, of that one's, and so on, its own last."""
    after = group.rank() + 1
    return [*rows[after:], *rows[:after]]


def _launch(what: str, group: ProcessGroup, passing: _Passing) -> C10dWork:
    if group not in _rings:
        _rings[group] = ring = _Ring(group)
        weakref.finalize(group, ring.close, _CLOSES_S)
    return C10dWork(_rings[group].launch(what, passing))


_Chunk = list[Tensor]


def _chunks(pieces: Sequence[Tensor]) -> list[_Chunk]:
    """Cut pieces into chunks of `_CHUNK_ELEMENTS`; the last one may be shorter."""
    chunks: list[_Chunk] = []
    left = 0  # elements of the last chunk that are missing
    for piece in pieces:
        start, stop = 0, piece.numel()
        while start < stop:
            if not left:
                chunks.append([])
                left = _CHUNK_ELEMENTS
            taken = min(left, stop - start)
            chunks[-1].append(piece[start : start + taken])
            start, left = start + taken, left - taken
    return chunks


class _Passing:
    """One collective: the chunks that this rank sends first, and those that arrive in each step.

    With `adds` they are added to what this rank has, and elsewhere they take its place.
    """

    def __init__(
        self, group: ProcessGroup, first: list[_Chunk], steps: list[list[_Chunk]], adds: bool
    ) -> None:
        self._gloo, rank = gloo_of(group), group.rank()
        self._successor, self._predecessor = (rank + 1) % group.size(), (rank - 1) % group.size()
        self._first, self.steps, self._adds = first, steps, adds
        self._arriving: list[list[tuple[dist.Work, Tensor]]] = []
        self._sending: list[dist.Work] = []

    def start(self, memory: _Memory) -> None:
        """Send what needs nothing of another rank."""
        lengths = [sum(map(Tensor.numel, chunk)) for step in (self._first, *self.steps) for chunk in step]
        like = next((chunk[0] for step in (self._first, *self.steps) for chunk in step), None)
        kept = iter(
            memory.take(sum(lengths), like.dtype).split(lengths) if self._adds and like is not None else ()
        )
        sent = [torch.cat(chunk, out=next(kept)) if self._adds else chunk[0] for chunk in self._first]
        for step in self.steps:
            places = [next(kept) if self._adds else chunk[0] for chunk in step]
            self._arriving.append(
                [(irecv(at, self._gloo, self._successor, _TAG | at.nbytes), at) for at in places]
            )
        for chunk in sent:
            self._send(chunk)

    def receive(self, step: int) -> None:
        """Receive what arrives in this step, and pass it on except in the last step."""
        is_last = step + 1 == len(self.steps)
        for (work, arrived), chunk in zip(self._arriving[step], self.steps[step], strict=True):
            work.wait()
            if self._adds:
                parts = list(arrived.split([piece.numel() for piece in chunk]))
                torch._foreach_add_(*((chunk, parts) if is_last else (parts, chunk)))
            if not is_last:
                self._send(arrived)

    def finish(self) -> None:
        """Wait until all that this rank sends has left."""
        for work in self._sending:
            work.wait()

    def _send(self, chunk: Tensor) -> None:
        self._sending.append(isend(chunk, self._gloo, self._predecessor, _TAG | chunk.nbytes))


class _Ring:
    """The collectives of one group."""

    def __init__(self, group: ProcessGroup) -> None:
        self._gloo, self._rank, self._num_ranks = gloo_of(group), group.rank(), group.size()
        self.lane = Lane(f"paceline ring of rank {self._rank}")
        end_before_exit(self, _Ring.close)  # before the lane's
        self._waiting: deque[_Passing] = deque()  # launched, and not started
        self._memories = itertools.cycle([_Memory(), _Memory()])  # two are under way at most
        self._broken: list[_Passing] = []  # Gloo may still write into the memory of those that failed

    def launch(self, what: str, passing: _Passing) -> LaneWork:
        def perform() -> None:
            try:
                self._perform(passing)
            except BaseException:
                self._broken.append(passing)
                self._disconnect()
                raise

        self._waiting.append(passing)
        outputs = [chunk[0] for chunk in passing.steps[-1][:1]]
        return self.lane.launch(LaneWork(perform, outputs, what), at_once=False)

    def _perform(self, passing: _Passing) -> None:
        if self._waiting and self._waiting[0] is passing:
            self._start_next()
        *steps, last = range(len(passing.steps))
        for step in steps:
            passing.receive(step)
        if self._waiting:
            self._start_next()
        passing.receive(last)
        passing.finish()

    def close(self, patience_s: float) -> None:
        """End the thread; if it still waits after so long, by closing this rank's connections."""
        if not self.lane.close(patience_s):
            self._disconnect()
            self.lane.close(_CLOSES_S)

    def _disconnect(self) -> None:
        """Close the connections of the group (rule 5): Gloo does so if the time for a message is over."""
        for peer in range(self._num_ranks):
            if peer != self._rank:
                with contextlib.suppress(RuntimeError):
                    irecv(torch.empty(1), self._gloo, peer, _TAG).wait(timedelta(milliseconds=1))

    def _start_next(self) -> None:
        self._waiting.popleft().start(next(self._memories))


class _Memory:
    """Memory that one collective after another uses; it grows when one needs more."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return memory for so many elements, uninitialized, shape (num_elements,)."""
        if (needed := num_elements * dtype.itemsize) > self._bytes.numel():
            self._bytes = torch.empty(needed, dtype=torch.uint8)
        return self._bytes[:needed].view(dtype)
