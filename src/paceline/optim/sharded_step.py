"""One rank's part of a sharded optimizer step, and the exchange by which every rank gets all parameters.

Rules
1. A rank steps its parts of the parameters, and holds optimizer state for these alone.
2. A part is a parameter of its own for the optimizer: an alias of the whole's memory. Its gradient is an alias too,
   and only for the length of a step. With master weights it is a float32 copy, which the optimizer steps instead.
3. Parts are stepped in the order of the exchanges, and an exchange is launched when this rank's parts of it are. So
   the network is busy while the next parts are stepped. Two exchanges may be under way.
4. What is exchanged is the same on every rank: it depends on the parameters alone, not on which of them have gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Work, all_gather_pieces, shares_memory
from paceline.comm.device import keep_for_current_streams
from paceline.comm.peers import Peers
from paceline.comm.ring import all_gather_on_ring
from paceline.errors import ConfigurationError
from paceline.optim.behind_forward import HALF_STEPPED, BehindForward, Job
from paceline.optim.shares import (
    Division,
    Exchange,
    Part,
    can_be_cut,
    divide,
    divide_whole,
    memory_of,
    real_dtype,
)
from paceline.reductions.owned_mean import Owned

Run = Callable[[Sequence[tuple[int, Parameter]]], None]
"""Steps parameters, each with the index of the optimizer's parameter that it is a part of."""

_MOST_UNDER_WAY = 2
_ENDED_S = 1.0  # until a collective of a group that has ended fails
_NEWTON_SCHULZ_STEPS = 5


class Members(Protocol):
    """The ranks that share a model's steps: `model.membership`."""

    name: str
    epoch: int
    peers: Peers
    model: Any
    groups: Any

    @property
    def process_group(self) -> ProcessGroup:
        """Return the script's group."""

    def keep_together(self, why: str) -> None:
        """Note that every rank takes part in every step from now on."""

    @property
    def gradient_groups(self) -> list[ProcessGroup]:
        """Return the groups that carry gradients."""


@dataclass(frozen=True)
class Cut:
    """The rules by which an optimizer's parameters are divided.

    Attributes:
        is_whole: Whether each parameter has one owner.
        is_muon: Whether a step's cost is that of orthogonalising a matrix, not that of reading it.
        has_masters: Whether the owner steps a float32 copy of a narrower parameter.
    """

    is_whole: bool
    is_muon: bool = False
    has_masters: bool = False

    def cost(self, parameter: Tensor) -> float:
        """Return what a parameter's step costs, in any unit: about the floating-point operations."""
        if not self.is_muon or parameter.dim() < 2:
            return float(parameter.numel())
        return parameter.numel() * (1.0 + 2 * _NEWTON_SCHULZ_STEPS * min(parameter.shape[:2]))

    def needs_master(self, parameter: Tensor) -> bool:
        """Return whether the owner steps a wider copy of this parameter."""
        return self.has_masters and parameter.dtype in (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _UnderWay:
    """An exchange that has been launched; `rows` are what each rank sends, if they have to be unpacked."""

    exchange: Exchange
    work: Work
    rows: Sequence[Tensor]


class ShardedStep:
    """Steps this rank's parts of an optimizer's parameters, and exchanges them.

    Attributes:
        members: The ranks.
        cut: How parameters may be divided.
        parameters: The optimizer's, in the order of its groups.
        parts: What the optimizer steps for each part that this rank owns.
    """

    def __init__(
        self,
        members: Members,
        cut: Cut,
        # Returns what gives each owner its part of the gradients over this group; None: gradients are whole
        choose_owned: Callable[[], Owned | None],
        buckets: Callable[[], Sequence[Sequence[Parameter]]],  # the parameters that are reduced together
        behind: BehindForward | None,  # what lets the next forward begin meanwhile
    ) -> None:
        self.members, self.cut, self.behind = members, cut, behind
        self._choose_owned, self._owned, self._buckets = choose_owned, choose_owned(), buckets
        self.parameters: list[Parameter] = []
        self.parts: dict[Part, Parameter] = {}
        self._divisions: list[Division] = []
        self._divided: set[int] = set()
        self._given_up: list[Work] = []  # what was under way in a step that has failed
        self._buffers: dict[tuple[torch.dtype, torch.device, int | None], Tensor] = {}

    @property
    def rank(self) -> int:
        return self.members.process_group.rank()

    @property
    def num_ranks(self) -> int:
        return self.members.process_group.size()

    # ---- who owns what

    def follow(self, parameters: Sequence[Parameter]) -> None:
        """Divide those of these parameters that are new, or were frozen until now. Local; the same on every rank."""
        self.parameters = list(parameters)
        new = [
            index
            for index, parameter in enumerate(self.parameters)
            if index not in self._divided and parameter.requires_grad and parameter.numel()
        ]
        if not new:
            return
        divisions = self._divide(new)
        self._divisions += divisions
        self._divided.update(new)
        for division in divisions:
            for part in division.owned_by(self.rank):
                self.parts[part] = self._part_of(part)
        if self._owned is not None:
            self._owned.own(self._owners(divisions))

    @property
    def undivided(self) -> list[int]:
        """Return the indices of parameters that no rank steps: they were frozen so far, or are empty."""
        return [index for index in range(len(self.parameters)) if index not in self._divided]

    def _divide(self, new: Sequence[int]) -> list[Division]:
        between_hosts = not all(map(shares_memory, self.members.gradient_groups))
        if self.cut.is_whole:
            costs = [self.cut.cost(self.parameters[index]) for index in new]
            return [divide_whole(self.parameters, new, self.num_ranks, costs, between_hosts)]
        if self._owned is None and self.behind is None:
            return [divide(self.parameters, new, self.num_ranks, between_hosts)]
        # Every rank owns as much of each bucket: else one would receive most of some buckets, and others wait. The
        # last bucket has the parameters that the forward needs first.
        index_of = {id(self.parameters[index]): index for index in new}
        units = [
            [index_of.pop(id(p)) for p in bucket if id(p) in index_of] for bucket in reversed(self._buckets())
        ]
        return [
            divide(self.parameters, unit, self.num_ranks, between_hosts)
            for unit in (*units, [*index_of.values()])
            if unit
        ]

    def _owners(self, divisions: Iterable[Division]) -> dict[Parameter, list[tuple[int, int, int]]]:
        owners: dict[Parameter, list[tuple[int, int, int]]] = {}
        for division in divisions:
            for rank in range(self.num_ranks):
                for part in division.owned_by(rank):
                    runs = owners.setdefault(self.parameters[part.index], [])
                    runs.append((rank, part.start, part.stop))
        return owners

    def end_failed_step(self) -> None:
        """Wait until what was under way in a step that has failed writes into no parameter any more. Local."""
        for work in self._given_up:
            with contextlib.suppress(RuntimeError):
                work.wait(_ENDED_S)
        self._given_up = []

    def divide_again(self) -> None:
        """Divide all parameters among the ranks that there are now, without any state. Local."""
        self.parts, self._divisions, self._divided = {}, [], set()
        if self._owned is not None:
            self._owned.disown(self.parameters)
        self._owned = self._choose_owned()
        self._buffers.clear()
        self.follow(self.parameters)

    def keep_gradients_whole(self) -> None:
        """Have every rank receive all gradients, from the next backward on. Local; on every rank."""
        if self._owned is not None:
            self._owned.disown(self.parameters)
            if self._owned.in_place_of is not None:
                self.members.model.reduce_by(self._owned.in_place_of)
        self._owned, self._choose_owned = None, lambda: None

    def is_whole(self, index: int) -> bool:
        """Return whether a parameter's part is the whole, in its own shape."""
        return self.cut.is_whole or not can_be_cut(self.parameters[index])

    def _part_of(self, part: Part) -> Parameter:
        parameter = self.parameters[part.index]
        memory = self._memory(part)
        return Parameter(memory.to(torch.float32, copy=True) if self.cut.needs_master(parameter) else memory)

    def _memory(self, part: Part) -> Tensor:
        """Return an alias of a part's elements: in the parameter's shape if it is the whole, else shape (N,)."""
        parameter = self.parameters[part.index]
        if self.is_whole(part.index):
            return parameter.detach()
        return memory_of(parameter)[part.start : part.stop]

    # ---- a step

    def step(self, run: Run) -> None:
        """Step this rank's parts, and receive the others. Collective; blocks.

        Args:
            run: Steps parameters, each with the index of the parameter that it is a part of.

        Raises:
            PeerLostError: A rank died or hangs; some parameters are stepped.
            ConfigurationError: A gradient is sparse.
        """
        taken = () if self._owned is None else self._owned.take(self.parameters)
        under_way: list[_UnderWay] = []
        try:
            for number, (exchange, parts) in enumerate(self._turns()):
                self._lend_all(parts)
                self._run(parts, run)
                if self.num_ranks == 1:
                    continue
                if len(under_way) == _MOST_UNDER_WAY:
                    self._finish(under_way[0])
                    under_way.pop(0)
                under_way.append(self._launch(exchange, number % _MOST_UNDER_WAY))
            for launched in under_way:
                self._finish(launched)
        except RuntimeError:
            self._given_up = [each.work for each in under_way]
            raise
        for parameter in taken:  # which would seem to be whole
            parameter.grad = None
        torch.autograd.graph.increment_version([self.parameters[index] for index in sorted(self._divided)])

    def step_behind(self, run: Run, behind: BehindForward) -> None:
        """Make a step as `step` does, behind the next forward, which waits for its parameters. Collective.

        Does not wait. The gradients are taken: `.grad` is None afterwards.
        """
        if self._owned is not None:
            self._owned.take(self.parameters)
        turns = self._turns()
        for _, parts in turns:
            self._lend_all(parts)
        for index in self._divided:
            self.parameters[index].grad = None
        behind.defer([self._job(exchange, parts, run) for exchange, parts in turns], self.members.peers)

    def _job(self, exchange: Exchange, parts: Sequence[Part], run: Run) -> Job:
        launched: list[_UnderWay] = []
        indices = dict.fromkeys(part.index for by_rank in exchange.parts for part in by_rank)

        def begin() -> Work:
            # They may be copies, made on another stream, which end with this step.
            keep_for_current_streams(
                [own.grad for part in parts if (own := self.parts[part]).grad is not None]
            )
            self._run(parts, run)
            launched.append(self._launch(exchange))
            return launched[0].work

        return Job([self.parameters[index] for index in indices], begin, lambda: self._unpack(launched.pop()))

    def _turns(self) -> list[tuple[Exchange, tuple[Part, ...]]]:
        """Return each exchange, with the parts that this rank steps before it."""
        return [
            (exchange, by_rank[self.rank])
            for division in self._divisions
            for exchange, by_rank in zip(division.exchanges, division.stepped, strict=True)
        ]

    def _lend_all(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._lend(part, self.parts[part])

    def _run(self, parts: Sequence[Part], run: Run) -> None:
        if parts:
            run([(part.index, self.parts[part]) for part in parts])
        for part in parts:
            self._take_back(part, self.parts[part])

    def _lend(self, part: Part, own: Parameter) -> None:
        """Give what is stepped for a part the parameter's memory and gradient (rule 2)."""
        parameter = self.parameters[part.index]
        has_master = self.cut.needs_master(parameter)
        if not has_master and own.data_ptr() != (there := self._memory(part)).data_ptr():
            own.data = there  # the module was moved, or its parameters were assigned
        gradient = parameter.grad
        if gradient is None:
            own.grad = None
            return
        if gradient.is_sparse:
            raise ConfigurationError(
                "shard(optimizer, model): a gradient is sparse, and its rows belong to no rank's part. Build the "
                "embedding with sparse=False, or leave its parameters to an optimizer that is not sharded."
            )
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        if not self.is_whole(part.index):
            gradient = memory_of(gradient)[part.start : part.stop]
        own.grad = gradient.to(own.dtype) if has_master else gradient.detach()

    def _take_back(self, part: Part, own: Parameter) -> None:
        parameter = self.parameters[part.index]
        own.grad = None
        if self.cut.needs_master(parameter):
            self._memory(part).copy_(own.detach())

    # ---- the exchange

    def _launch(self, exchange: Exchange, slot: int | None = None) -> _UnderWay:
        group = self.members.gradient_groups[0] if self.behind is None else self.members.groups.for_pieces
        if not exchange.in_place and self._like(exchange).is_cpu and shares_memory(group):
            by_rank = [self._memories(parts) for parts in exchange.parts]
            return _UnderWay(exchange, all_gather_pieces(by_rank, group), rows=())
        if exchange.in_place:
            rows = self._memories(part for (part,) in exchange.parts)
        else:
            rows = list(self._buffer(exchange, slot).split(exchange.length))
            own = self._memories(exchange.parts[self.rank])
            if own:
                torch._foreach_copy_(self._pieces(rows[self.rank], own), own)
        return _UnderWay(exchange, all_gather_on_ring(rows, rows[self.rank], group), rows)

    def _finish(self, launched: _UnderWay) -> None:
        doing = "receiving the parameters that other ranks have stepped"
        self.members.peers.wait(launched.work, doing, HALF_STEPPED)
        self._unpack(launched)

    def _unpack(self, launched: _UnderWay) -> None:
        """Copy what has arrived into the parameters, if it is not there already."""
        if launched.exchange.in_place or not launched.rows:
            return
        keep_for_current_streams(launched.rows)  # made on the lane's stream
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for rank, parts in enumerate(launched.exchange.parts):
            if rank != self.rank and parts:
                memories = self._memories(parts)
                targets += memories
                sources += self._pieces(launched.rows[rank], memories)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _memories(self, parts: Iterable[Part]) -> list[Tensor]:
        return [memory_of(self.parameters[part.index])[part.start : part.stop] for part in parts]

    @staticmethod
    def _pieces(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        lengths = [each.numel() for each in like]
        return list(row[: sum(lengths)].split(lengths))

    def _like(self, exchange: Exchange) -> Parameter:
        """Return a parameter of an exchange, whose dtype and device all have."""
        return self.parameters[next(part for parts in exchange.parts for part in parts).index]

    def _buffer(self, exchange: Exchange, slot: int | None) -> Tensor:
        """Return memory for an exchange. A slot has one exchange under way, and keeps its memory for the next step."""
        like = self._like(exchange)
        dtype, wanted = real_dtype(like), exchange.length * self.num_ranks
        kept = self._buffers.get((dtype, like.device, slot))
        if kept is None or kept.numel() < wanted:
            kept = torch.empty(wanted, dtype=dtype, device=like.device)
            if slot is not None:
                self._buffers[dtype, like.device, slot] = kept
        return kept[:wanted]
