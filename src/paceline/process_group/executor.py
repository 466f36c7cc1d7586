"""The executor performs a schedule (a collective as data) on a tensor over a transport.

Rules
1. In place: blocks that overwrite are received into the tensor itself. What is folded arrives in scratch memory that is
   kept for the next call. It is as large as what a rank receives in one round: (P-1)/P of the message for `direct`,
   about half of it for `halving_doubling`, a P-th for `ring`. For 16-bit sums there is a float32 copy of the message.
2. A message to be folded is cut into pieces: one is folded while the next ones are under way.
3. 16-bit sums are accumulated in float32. A partial result travels as float32; what has not been folded yet, and what
   is complete, travels as 16 bits. So there is one rounding. It costs the additional bytes of partial results: none
   for `direct`, up to 1/4 more for `halving_doubling`, up to 1/2 more for `ring`.
4. A rank's first messages, in and out, come with a header (`Descriptor`), which tells a peer in another collective.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import CollectiveMismatchError, ConfigurationError, PeerLostError
from paceline.process_group.descriptor import Descriptor, dtype_name
from paceline.process_group.folds import Fold, fold_of, op_name
from paceline.schedules.schedule import HEADER_BYTES, Round, Schedule, cut
from paceline.transports import Message, Transport

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BlockMessage:
    """Blocks `first` to `last` (excluded) that this rank sends to `peer`, or receives from it, in one round."""

    peer: int
    first: int
    last: int
    fold: bool
    partial: bool  # it carries a partial result (see `Schedule.partial`)
    introduces: bool  # a header is sent with it (see `Schedule.introduces`)


@dataclass(frozen=True, slots=True)
class RankRound:
    """One rank's part of one round."""

    # Blocks whose reduction this rank has completed and now sends out: to be averaged and rounded before
    finalize: tuple[Range, ...]
    sends: tuple[BlockMessage, ...]
    receives: tuple[BlockMessage, ...]
    # Whether blocks that this rank sends in this round are folded into, which waits until they have left
    fold_later: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of all rounds."""

    rounds: tuple[RankRound, ...]
    # Blocks that this rank has completed and not sent out: averaged and rounded last
    finalize: tuple[Range, ...]
    accumulates: tuple[Range, ...]  # blocks that something is folded into, or that leave as partial results


@lru_cache(maxsize=64)
def part_of(schedule: Schedule, rank: int) -> Part:
    """Return the part of `rank` in `schedule`."""
    live: set[int] = set()  # folded here, not finalized yet, and not sent to another rank to be folded there
    accumulates: set[int] = set()
    rounds = []
    for number, transfers in enumerate(schedule.rounds):
        sends, receives = _messages(schedule, number, transfers, rank)
        if not sends and not receives:
            continue
        given = {block for m in sends if m.fold for block in range(m.first, m.last)}
        out = {block for m in sends if not m.fold for block in range(m.first, m.last)}
        folded = {block for m in receives if m.fold for block in range(m.first, m.last)}
        copied = {block for m in receives if not m.fold for block in range(m.first, m.last)}
        rounds.append(RankRound(_ranges(out & live), sends, receives, bool(folded & (given | out))))
        accumulates |= folded | {b for m in sends if m.partial for b in range(m.first, m.last)}
        live = (live - out - given - copied) | folded
    return Part(tuple(rounds), _ranges(live), _ranges(accumulates))


def _messages(
    schedule: Schedule, number: int, transfers: Round, rank: int
) -> tuple[tuple[BlockMessage, ...], tuple[BlockMessage, ...]]:
    sends, receives = [], []
    marks = zip(transfers, schedule.partial[number], schedule.introduces[number], strict=True)
    for t, is_partial, introduces in marks:
        if rank == t.source:
            sends.append(BlockMessage(t.target, t.first, t.last, t.fold, is_partial, introduces))
        elif rank == t.target:
            receives.append(BlockMessage(t.source, t.first, t.last, t.fold, is_partial, introduces))
    return tuple(sends), tuple(receives)


def _ranges(blocks: Iterable[int]) -> tuple[Range, ...]:
    ranges: list[Range] = []
    for block in sorted(blocks):
        if ranges and ranges[-1][1] == block:
            ranges[-1] = (ranges[-1][0], block + 1)
        else:
            ranges.append((block, block + 1))
    return tuple(ranges)


PIECE_BYTES = 1 << 20
_ALIGNMENT = 64
_NOTHING = torch.empty(0, dtype=torch.uint8)
LOOKS_AFTER = 64  # calls: some steps of a model with a handful of buckets

_Reaction = Callable[[], None]


class Executor:
    """The performer of collectives over one transport, one after another. Nothing else may use that transport."""

    def __init__(self, transport: Transport, *, piece_bytes: int = PIECE_BYTES) -> None:
        self.transport = transport
        self.piece_bytes = piece_bytes
        self.num_collectives = 0
        self._scratch = _Scratch()

    def run(
        self,
        schedule: Schedule,  # for as many ranks as the transport has; equal on every rank
        flat: Tensor,  # this rank's message, shape (N,), contiguous, on the CPU, N and dtype as on every rank
        op: dist.ReduceOp | dist.ReduceOp.RedOpType | None,  # how to fold; None where nothing is folded
        timeout_s: float,  # for the whole collective
        *,
        operation: str = "all_reduce",  # what the user called, for messages
    ) -> None:
        """Perform `schedule` on `flat`. Collective: every rank, same order; blocks. An all-reduce is bitwise equal.

        Raises CollectiveMismatchError if a peer is in another collective, PeerLostError if one died or was late. After
        these `flat` is undefined, and the transport can't be used any more. ConfigurationError: nothing was sent.
        """
        _check(schedule, flat, self.transport)
        fold = fold_of(op_name(op), flat.dtype) if schedule.folds else None
        dtype = dtype_name(flat.dtype)
        descriptor = Descriptor(
            self.num_collectives, operation, dtype, flat.numel(), op_name(op), schedule=schedule.name
        )
        self.num_collectives += 1
        part = part_of(schedule, self.transport.rank)
        call = _Call(self, part, cut(flat.numel(), schedule.num_blocks), flat, fold, descriptor, timeout_s)
        try:
            call.perform()
        except PeerLostError as error:
            why = str(error).rstrip(".")
            raise PeerLostError(
                f"{descriptor} failed: {why}. Its tensor is undefined.", error.peer
            ) from error


class _Call:
    """One collective under way."""

    def __init__(
        self,
        executor: Executor,
        part: Part,
        cuts: tuple[int, ...],
        flat: Tensor,
        fold: Fold | None,
        descriptor: Descriptor,
        timeout_s: float,
    ) -> None:
        self.transport = executor.transport
        self.piece_bytes = executor.piece_bytes
        self.scratch = executor._scratch
        self.part, self.cuts, self.fold, self.descriptor = part, cuts, fold, descriptor
        self.deadline = time.monotonic() + timeout_s
        self.flat = flat if fold is None else flat.view(fold.view_as)  # shape (N,)
        self.accumulated = self.flat  # shape (N,); the same memory unless the fold widens
        self.header = descriptor.to_header()

    def perform(self) -> None:
        self.scratch.restart()
        if self.fold is not None and self.fold.widens:
            self.accumulated = self.scratch.take(self.flat.numel(), self.fold.accumulate_in)
            for first, last in self.part.accumulates:
                self._of(self.accumulated, first, last).copy_(self._of(self.flat, first, last))
        held = self.scratch.mark()
        for round_ in self.part.rounds:
            self.scratch.restart(held)
            self._perform(round_)
        for blocks in self.part.finalize:
            self._finalize(blocks)

    def _perform(self, round_: RankRound) -> None:
        for blocks in round_.finalize:
            self._finalize(blocks)
        sends: list[Message] = [(m.peer, self.header) for m in round_.sends if m.introduces]
        for m in round_.sends:
            # A partial result leaves as accumulated, everything else as the user stores it.
            outgoing = self._of(self.accumulated if m.partial else self.flat, m.first, m.last)
            sends += [(m.peer, piece) for piece in self._pieces(outgoing, m.fold)]
        receives: list[Message] = []
        reactions: list[_Reaction | None] = []
        for m in round_.receives:
            if m.introduces:
                header = self.scratch.take(HEADER_BYTES, torch.uint8)
                receives.append((m.peer, header))
                reactions.append(partial(self._compare, m.peer, header))
        later: list[_Reaction] = []
        for m in round_.receives:
            for tensor, reaction in self._incoming(m):
                receives.append((m.peer, tensor))
                if reaction is not None and round_.fold_later:
                    later.append(reaction)
                    reactions.append(None)
                else:
                    reactions.append(reaction)
        if not sends and not receives:
            return  # empty blocks

        def react(index: int) -> None:
            reaction = reactions[index]
            if reaction is not None:
                reaction()

        self.transport.exchange(sends, receives, max(self.deadline - time.monotonic(), 0.0), react)
        for reaction in later:
            reaction()

    def _incoming(self, m: BlockMessage) -> Iterator[tuple[Tensor, _Reaction | None]]:
        """Yield the memory to receive into, and what to do with it then."""
        if not m.fold:
            yield from ((piece, None) for piece in self._pieces(self._of(self.flat, m.first, m.last), m.fold))
            return
        assert self.fold is not None
        mine = self._of(self.accumulated, m.first, m.last)
        dtype = self.accumulated.dtype if m.partial else self.flat.dtype
        staged = self.scratch.take(mine.numel(), dtype)
        first = 0
        for piece in self._pieces(staged, m.fold):
            accumulated = mine[first : first + piece.numel()]
            first += piece.numel()
            yield piece, partial(self.fold.into, accumulated, piece, m.peer < self.transport.rank)

    def _pieces(self, tensor: Tensor, fold: bool) -> tuple[Tensor, ...]:
        """Cut what is to be folded into pieces (rule 2); nothing is sent for an empty block."""
        if not tensor.numel():
            return ()
        if not fold or tensor.nbytes <= self.piece_bytes:
            return (tensor,)
        pieces: tuple[Tensor, ...] = tensor.split(max(self.piece_bytes // tensor.itemsize, 1))
        return pieces

    def _finalize(self, blocks: Range) -> None:
        fold = self.fold
        if fold is None:
            return
        completed = self._of(self.accumulated, *blocks)
        if fold.averages:
            fold.average(completed, self.transport.num_ranks)
        if fold.widens:
            self._of(self.flat, *blocks).copy_(completed)

    def _compare(self, peer: int, header: Tensor) -> None:
        if torch.equal(header, self.header):
            return
        theirs = Descriptor.from_header(header)
        raise CollectiveMismatchError(
            f"rank {self.transport.names[self.transport.rank]} is in {self.descriptor} while rank "
            f"{self.transport.names[peer]} is in "
            f"{theirs or 'something that is not a collective of this version'}. Every rank calls the same "
            "collectives in the same order, with tensors of the same size and dtype. The tensors of both are "
            "undefined. `paceline explain collective mismatch` says more."
        )

    def _of(self, tensor: Tensor, first: int, last: int) -> Tensor:
        return tensor[self.cuts[first] : self.cuts[last]]


class _Scratch:
    """Memory that is kept from call to call; taken piece by piece, given back all at once."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def restart(self, used: int = 0) -> None:
        """Release the memory that was taken after `used`."""
        self._used = used

    def mark(self) -> int:
        return self._used

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory, shape (num_elements,)."""
        num_bytes = num_elements * dtype.itemsize
        last = self._used + num_bytes
        if last > self._memory.numel():
            # What was taken before keeps its own memory alive; it is given back with the rest.
            self._memory = torch.empty(max(last, 2 * self._memory.numel()), dtype=torch.uint8)
        taken = self._memory[self._used : last].view(dtype)
        self._used = -(-last // _ALIGNMENT) * _ALIGNMENT
        return taken


def _check(schedule: Schedule, flat: Tensor, transport: Transport) -> None:
    if schedule.num_ranks != transport.num_ranks:
        raise ConfigurationError(
            f"{schedule.name} is for {schedule.num_ranks} ranks, the transport has {transport.num_ranks}"
        )
    if flat.dim() != 1 or not flat.is_contiguous() or flat.device.type != "cpu":
        raise ConfigurationError(
            f"a collective works on a contiguous CPU tensor of one dimension, not on one of shape {tuple(flat.shape)}, "
            f"strides {flat.stride()}, on {flat.device}"
        )


class KeptMemory:
    """One piece of memory, used by one call after another.

    Grows when a call needs more, and shrinks to what the last `LOOKS_AFTER` calls have used, if that is less than half.
    `allocate` returns so many uninitialized bytes.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._memory = _NOTHING
        self._lately: deque[int] = deque(maxlen=LOOKS_AFTER)  # bytes of each call

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory, shape (num_elements,), valid until the next call."""
        num_bytes = num_elements * dtype.itemsize
        self._lately.append(num_bytes)
        if not num_bytes <= self._memory.numel() <= 2 * max(self._lately):
            self._memory = _NOTHING  # the old one's place may be part of the new one's
            self._memory = self._allocate(max(self._lately))
        return self._memory[:num_bytes].view(dtype)
