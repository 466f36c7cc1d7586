"""The state that a rank receives which is behind or has just come, and the moment at which it takes it over.

Rules
1. State is forwarded along a tree, from the holder to the ranks that lack it. A rank that has replayed needs only the
   rest, another one everything. No other rank takes part.
2. It is received into memory of its own, and taken over only when all of it is there. So a rank whose giver dies
   meanwhile has what it had.
3. Numbers travel as JSON, tensors as they are. Nothing is unpickled.
4. Parameters' states in optimizers are put where they belong, in their own dtypes. `load_state_dict` would cast them.
5. Schedules are loaded, not stepped: to step one as often gives other bits.
6. No generator's state is sent. Each step seeds the generators from the rank's seeds and the place in the data. So a
   process that takes a lost rank's place draws the numbers that the lost rank would have drawn.
7. A rank has parts of a sharded optimizer's state alone (`optim.shard`). If one is lost, or a step was given up, no
   rank holds a whole state. Then rank 0 receives the shadow's, and all ranks take that. Before a rank leaves or comes
   in, all ranks gather the whole state.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from paceline.comm.collectives import all_gather, pass_on
from paceline.comm.device import is_accelerator, seed_generators
from paceline.comm.given_up import aside
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.elastic.rollback import (
    HOST,
    Buffers,
    TrainingPosition,
    extra_state,
    put_extra_state,
    settings_of,
)
from paceline.elastic.state_tree import PackedState, empty_tensors, pack, unpack
from paceline.optim.shard import Sharded, is_sharded
from paceline.optim.shares import Part, memory_of

_MESSAGE_BYTES = 16 << 20  # of tensors that are sent together
_FACTOR, _MODULUS = 1_000_003, (1 << 61) - 1


@dataclass(frozen=True)
class RankStates:
    """The state that each rank of a group holds: a row of steps completed, whether it holds all of it, and a digest.

    `void` has the places where the loops of ranks began that have lost parts of their state (rule 7).
    """

    rows: tuple[tuple[int, ...], ...]
    seeds: tuple[tuple[int, ...], ...] = ()  # of each rank's script
    void: tuple[TrainingPosition, ...] = ()

    @classmethod
    def of(
        cls,
        step: int,
        is_whole: bool,
        digest: int,
        seeds: Sequence[int],
        group: ProcessGroup,
        void: TrainingPosition | None = None,
    ) -> RankStates:
        """Tell each other. Collective; blocks. `void` is given if this rank has lost parts of its state."""
        begin = astuple(void or TrainingPosition(0, 0, 0))
        own = [step, is_whole, digest, void is not None, *begin, *seeds]
        rows = aside(lambda: gather_numbers(own, group, HOST))
        begins = tuple(TrainingPosition(*each[4:7]) for each in rows if each[3])
        return cls(tuple(each[:3] for each in rows), tuple(each[7:] for each in rows), begins)

    @property
    def holder(self) -> int:
        """Return the first rank of those that hold everything and are furthest."""
        steps = [step if is_whole else -1 for step, is_whole, _ in self.rows]
        return steps.index(max(steps))

    def lacks_all(self, rank: int) -> bool:
        """Return whether a rank has to receive parameters and optimizers' states: it does not hold the newest."""
        step, is_whole, digest = self.rows[rank]
        newest = self.rows[self.holder][0]
        if is_whole or step != newest:
            return step != newest
        return digest not in {each[2] for each in self.rows if each[1] and each[0] == newest and each[2]}

    def lacks_something(self, rank: int) -> bool:
        """Return whether it has to receive at least the rest: buffers, random numbers, schedules, its position."""
        return not self.rows[rank][1] or self.lacks_all(rank)


@dataclass(frozen=True)
class Piece:
    """A parameter, or a run of its memory, with what optimizers keep for it: what is sent of a state at once.

    `owner` and `part` say which sharded optimizer keeps that, and for which of its parts.
    """

    index: int  # of the parameter
    run: tuple[int, int] | None = None  # of its elements; None: all
    owner: int | None = None  # the optimizer's index
    part: Part | None = None


class Carried:
    """The state of training on this rank: module, optimizers, others with a `state_dict`, the sampler's position."""

    def __init__(
        self, module: Module, optimizers: Sequence[Optimizer], others: Sequence[Any], sampler: GlobalShuffle
    ) -> None:
        self._module, self.optimizers, self._others = module, optimizers, others
        self.sampler, self._buffers = sampler, Buffers(module)
        found = next((each.device for each in module.parameters()), HOST)
        self.device = found if is_accelerator(found) else HOST
        self.own_seeds = _seeds_of_script()
        self.seeds: Sequence[Sequence[int]] = ()  # of each rank with which the job began; empty before

    @property
    def parameters(self) -> list[Parameter]:
        """Return the module's parameters and others that the optimizers step, in the same order on all ranks."""
        groups = (group["params"] for each in self.optimizers for group in each.param_groups)
        return list(dict.fromkeys((*self._module.parameters(), *itertools.chain.from_iterable(groups))))

    @property
    def is_divided(self) -> bool:
        """Return whether ranks have parts of an optimizer's state."""
        return any(map(is_sharded, self.optimizers))

    def of(self, parameter: Parameter) -> list[Any]:
        """Return one parameter and its state in each optimizer; of a sharded one, what it has gathered. No copies."""
        states = (
            (each.whole(parameter) if isinstance(each, Sharded) else each.state.get(parameter)) or None
            for each in self.optimizers
        )
        return [parameter.detach(), *states]

    def put(self, parameter: Parameter, given: Sequence[Any]) -> None:
        """Take what `of` was on another rank, but for sharded optimizers."""
        with torch.no_grad():
            parameter.copy_(given[0])
        for optimizer, state in zip(self.optimizers, given[1:], strict=True):
            if isinstance(optimizer, Sharded):
                continue
            optimizer.state.pop(parameter, None)
            if state is not None:
                is_dict = isinstance(state, dict)
                items = state.items() if is_dict else ()
                laid = {name: laid_out_as(parameter, value) for name, value in items}
                optimizer.state[parameter] = laid if is_dict else state

    def pieces(self, choose: Callable[[Sequence[int]], Sequence[int]]) -> list[Piece]:
        """Return what this rank sends. It may `choose` from what all ranks hold, by bytes. Local."""
        parameters = self.parameters
        index_of = {id(each): index for index, each in enumerate(parameters)}
        own: list[Piece] = []
        divided: set[int] = set()
        for owner, optimizer in enumerate(self.optimizers):
            if isinstance(optimizer, Sharded):
                divided.update(index_of[id(each)] for each in optimizer.divided)
                for parameter, part, is_whole in optimizer.held_parts():
                    run = None if is_whole else (part.start, part.stop)
                    own.append(Piece(index_of[id(parameter)], run, owner, part))
        others = [index for index in range(len(parameters)) if index not in divided]
        chosen = choose([parameters[index].nbytes for index in others])
        return [*own, *(Piece(others[place]) for place in chosen)]

    def of_piece(self, piece: Piece) -> list[Any]:
        """Return the values of a piece, and its state in each optimizer. Nothing is copied."""
        parameter = self.parameters[piece.index]
        found = self.of(parameter)
        if piece.run is not None:
            found = [_run_of(each, parameter, piece.run) for each in found]
        for place, optimizer in enumerate(self.optimizers):
            if isinstance(optimizer, Sharded) and piece.owner in (None, place):
                found[1 + place] = optimizer.held(parameter, piece.part) or None
        return found

    def put_piece(self, piece: Piece, given: Sequence[Any]) -> None:
        """Take what `of_piece` was on another rank."""
        parameter = self.parameters[piece.index]
        if piece.run is None:
            self.put(parameter, given)
            return
        start, stop = piece.run
        memory_of(parameter)[start:stop].copy_(given[0])
        for optimizer, state in zip(self.optimizers, given[1:], strict=True):
            for name, value in (state or {}).items():
                kept = optimizer.state[parameter]
                if not isinstance(value, Tensor) or value.shape != (stop - start,):
                    kept[name] = value
                    continue
                if not isinstance(kept.get(name), Tensor):
                    kept[name] = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
                memory_of(kept[name])[start:stop].copy_(value)

    def digest(self) -> int:
        """Return a number, not 0, that other bits of parameters or optimizers' states change. Local; reads all."""
        return _digest(self.whole())

    def digest_of(self, piece: Piece) -> int:
        """Return such a number of one piece. Local."""
        return _digest(pack(self.of_piece(piece)))

    def whole(self) -> PackedState:
        """Return parameters and optimizers' states, for a rank that lacks them. Called between two steps. Local."""
        return pack(self.whole_tree())

    def whole_tree(self) -> dict[str, Any]:
        """Return what `whole` packs; nothing is copied."""
        return {
            "parameters": [self.of(each) for each in self.parameters],
            "optimizers": [_own_state(each) for each in self.optimizers],
        }

    def rest(self, position: TrainingPosition, batch: GlobalBatch) -> PackedState:
        """Return what else another rank needs, between two steps. Local. `batch` is that of the job's beginning."""
        return pack(self.rest_tree(position, batch))

    def rest_tree(self, position: TrainingPosition, batch: GlobalBatch) -> dict[str, Any]:
        """Return the tree that `rest` packs. Neither buffers nor the states of other objects are copied."""
        return {
            "position": [position.step, position.epoch, position.num_samples],
            "batch": batch.as_dict(),
            "sampler": dict(self.sampler.state_dict()),
            "seeds": self.seeds,
            "buffers": self._buffers.named(),
            "extra_state": extra_state(self._module),
            "settings": [[settings_of(group) for group in each.param_groups] for each in self.optimizers],
            "others": [each.state_dict() for each in self._others],
        }

    # ---- as torch names it

    def names(self) -> list[str]:
        """Return the name of each parameter, in their order; one that is not the module's has its place for a name."""
        own = {id(each): name for name, each in self._module.named_parameters()}
        return [own.get(id(each), f"parameter {place}") for place, each in enumerate(self.parameters)]

    def module_state(self) -> dict[str, Any]:
        """Return the module's `state_dict()`; nothing is copied."""
        return self._module.state_dict()

    def optimizer_state(self) -> dict[str, Any]:
        """Return all optimizers' states by parameters' names, as torch's checkpoints do; nothing is copied."""
        names = {id(each): name for each, name in zip(self.parameters, self.names(), strict=True)}
        groups = [group for each in self.optimizers for group in each.param_groups]
        return {
            "state": {
                names[id(parameter)]: dict(state)
                for each in self.optimizers
                for parameter, state in each.state.items()
                if isinstance(parameter, Tensor)
            },
            "param_groups": [
                {**settings_of(group), "params": [names[id(each)] for each in group["params"]]}
                for group in groups
            ],
        }

    def take(self, tree: Any, *, is_new: bool) -> None:
        """Take over the giver's state; if `is_new`, its place in the data too. A rank that is behind has one. Local."""
        if "parameters" in tree:
            # First, as it waits for what a step that failed may still write into parameters.
            for place, each in enumerate(self.optimizers, 1):
                if isinstance(each, Sharded):
                    states = zip(self.parameters, (its[place] for its in tree["parameters"]), strict=True)
                    each.hold_whole({parameter: state for parameter, state in states if state is not None})
            for each, own_state in zip(self.optimizers, tree["optimizers"], strict=True):
                _put_own_state(each, own_state)
            for parameter, given in zip(self.parameters, tree["parameters"], strict=True):
                self.put(parameter, given)
        self._buffers.put(tree["buffers"])
        put_extra_state(self._module, tree["extra_state"])
        for each, settings in zip(self.optimizers, tree["settings"], strict=True):
            for group, its in zip(each.param_groups, settings, strict=True):
                group.update(its)
        for each, state in zip(self._others, tree["others"], strict=True):
            each.load_state_dict(state)
        self.seeds = tree["seeds"]
        if is_new:
            state = tree["sampler"]
            self.sampler.load_state_dict(state, batch_may_change="tokens" not in state)

    # ---- random numbers

    def seed(self, rank: int, position: TrainingPosition, is_fetched: bool = False) -> None:
        """Seed the generators for rank `rank`'s step at this position. If its data `is_fetched`, only torch's. Local.

        Fetching may draw: a loader draws the seed of its workers whenever an iteration over it begins.
        """
        torch_seed, numpy_seed, python_seed = self.seeds[rank % len(self.seeds)]
        where = f"{position.epoch},{position.num_samples}"
        seed_generators(_mixed(f"{torch_seed},{where},{is_fetched}"), self.device)
        if not is_fetched:
            with contextlib.suppress(TypeError):  # the script has put another generator in its place
                np.random.seed(_mixed(f"{numpy_seed},{where}"))  # noqa: NPY002  scripts draw from it
            random.seed(_mixed(f"{python_seed},{where}"))


def _seeds_of_script() -> list[int]:
    """Return a number for torch's, numpy's and Python's generator, which depends on how the script has seeded it."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    return [torch.initial_seed() % _MODULUS, _digest(pack(numpy_state)), _digest(pack(random.getstate()))]


def _mixed(words: str) -> int:
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big")


def gather_numbers(own: Sequence[int], group: ProcessGroup, device: torch.device) -> list[tuple[int, ...]]:
    """Return the numbers of each rank, which has as many as this one. Collective; blocks."""
    row = torch.tensor(own, device=device)
    rows = [torch.empty_like(row) for _ in range(group.size())]
    all_gather(rows, row, group).wait()
    return [tuple(each.tolist()) for each in rows]


def _own_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer's class keeps or saves besides parameters' states and groups' settings."""
    if isinstance(optimizer, Sharded):
        return {"saved": {}, "kept": {}}
    saved = {} if _saves_as_torch_does(optimizer) else optimizer.state_dict()
    return {
        "saved": {name: each for name, each in saved.items() if name != "param_groups"},
        "kept": {key: each for key, each in optimizer.state.items() if not isinstance(key, Tensor)},
    }


def _put_own_state(optimizer: Optimizer, given: dict[str, Any]) -> None:
    """Take what `_own_state` was; parameters' states come later."""
    if isinstance(optimizer, Sharded):
        return
    if given["saved"]:
        optimizer.load_state_dict({**optimizer.state_dict(), **given["saved"]})
    optimizer.state.update(given["kept"])


def _saves_as_torch_does(optimizer: Optimizer) -> bool:
    kind, has_hooks = type(optimizer), bool(optimizer._optimizer_state_dict_post_hooks)
    methods = (kind.state_dict, kind.load_state_dict)
    return methods == (Optimizer.state_dict, Optimizer.load_state_dict) and not has_hooks


def laid_out_as(parameter: Tensor, value: Any) -> Any:
    """Return a value in the parameter's strides if it has its shape: reductions of an optimizer add in their order."""
    is_other = (
        isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride()
    )
    return (
        torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
        if is_other
        else value
    )


def _run_of(value: Any, parameter: Tensor, run: tuple[int, int]) -> Any:
    """Return a run of a parameter's memory, or what an optimizer keeps for that run."""
    if isinstance(value, dict):
        return {name: _run_of(each, parameter, run) for name, each in value.items()}
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return memory_of(value)[run[0] : run[1]]


def bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Return a tensor's elements: its own memory, if it is contiguous and on the host. Waits for a device."""
    return _as_bytes(tensor).cpu().numpy()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _digest(packed: PackedState) -> int:
    found = zlib.crc32(packed.words)
    for tensor in packed.tensors:
        found = (found * _FACTOR + _sum_of(bytes_of(tensor))) % _MODULUS
    return found + 1


def _sum_of(found: npt.NDArray[np.uint8]) -> int:
    whole = len(found) // 8 * 8
    words = found[:whole].view(np.uint64)
    return int(words.sum(dtype=np.uint64)) + int.from_bytes(found[whole:].tobytes(), "big")


def hand_over_to_all(tree: dict[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """Return rank 0's tree on every rank. Collective; blocks."""
    is_giver = group.rank() == 0
    if group.size() == 1:
        return tree
    given: dict[str, Any] = unpack(_pass_on(pack(tree) if is_giver else None, range(group.size()), group))
    return given


def hand_over(
    carried: Carried, states: RankStates, position: TrainingPosition, batch: GlobalBatch, group: ProcessGroup
) -> dict[str, Any]:
    """Let each rank have what it lacks; returns that, nothing if it lacks nothing. Collective; blocks.

    Contract:
        `states` are the same on every rank; `position` and `batch` count on the holder.
    """
    ranks, found = range(group.size()), dict[str, Any]()
    is_holder = group.rank() == states.holder
    parts: tuple[tuple[Callable[[int], bool], Callable[[], PackedState]], ...] = (
        (states.lacks_something, lambda: carried.rest(position, batch)),
        (states.lacks_all, carried.whole),
    )
    for lacks, pack_part in parts:
        order = [states.holder, *filter(lacks, ranks)]
        if len(order) > 1 and group.rank() in order:
            tree = unpack(_pass_on(pack_part() if is_holder else None, order, group), carried.device)
            found.update({} if is_holder else tree)
    return found


def _pass_on(packed: PackedState | None, order: Sequence[int], group: ProcessGroup) -> PackedState:
    """Give these ranks what the first one has packed. Collective over them; blocks."""
    length = torch.tensor([len(packed.words) if packed else 0])
    pass_on(length, group, order)
    text = torch.frombuffer(bytearray(packed.words if packed else int(length)), dtype=torch.uint8)
    pass_on(text, group, order)
    words = text.numpy().tobytes()
    tensors = [each.cpu() for each in packed.tensors] if packed else empty_tensors(words)
    for several in _messages(tensors):
        sizes = [each.nbytes for each in several]
        flat = torch.cat(several) if packed else torch.empty(sum(sizes), dtype=torch.uint8)
        pass_on(flat, group, order)
        if not packed:
            for own, given in zip(several, flat.split(sizes), strict=True):
                own.copy_(given)
    return PackedState(words, tensors)


def _messages(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors of each message. Several small ones share a message."""
    found: list[list[Tensor]] = []
    room = 0
    for each in tensors:
        if each.nbytes > room or not found:
            found.append([])
            room = _MESSAGE_BYTES
        found[-1].append(_as_bytes(each))
        room -= each.nbytes
    return [each for each in found if sum(part.nbytes for part in each)]
