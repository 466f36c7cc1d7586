"""The state of a sharded optimizer, as a whole: gathered on rank 0, cut for this rank, or moved to other ranks.

Rules
1. The whole has torch's format: parameters by their place in the groups, state in the parameter's shape.
2. A state that has one number for each element of a part is cut and joined as the parameter's memory is. Any other is
   the same for all parts of a parameter (the number of steps), or belongs to a part that is a whole parameter.
3. A parameter that was frozen so far has no parts. State that was loaded for it waits as a whole, on every rank.
4. State travels as bytes of `torch.save`, which are loaded with `weights_only`.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.collectives import C10dWork, MessageWork, broadcast, device_for_metadata, irecv, isend
from paceline.errors import ConfigurationError
from paceline.optim.sharded_step import ShardedStep
from paceline.optim.shares import Part, memory_of
from paceline.reductions.reduction import real_numel

MASTER = "master_weights"
"""The name under which the float32 copy of a narrower parameter is kept in a saved state."""


@dataclass(frozen=True)
class OwnPart:
    """A part of a parameter that this rank steps, and what the optimizer keeps for it."""

    parameter: Parameter
    part: Part
    is_whole: bool  # the parameter has one owner, so state may have any shape
    kept: Mapping[str, Any]

    def has_elements(self, value: Any) -> bool:
        """Return whether a state has one number for each element of the part (rule 2)."""
        return not self.is_whole and isinstance(value, Tensor) and value.shape == (len(self.part),)


@runtime_checkable
class Loaded(Protocol):
    """State that `torch.distributed.checkpoint` has loaded for the parts of this rank."""

    def of(self, part: Part) -> Tensor:
        """Return the elements of one part."""


Pieces = dict[int, list[tuple[Part, dict[str, Any]]]]
"""By a parameter's index: its parts, and what the optimizer keeps for each."""


Waiting = dict[int, dict[str, Any]]
"""By the index of a parameter without parts: its state (rule 3)."""


def full_state(
    shares: ShardedStep, state: Mapping[Tensor, Any], waiting: Waiting, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the whole state in torch's format on rank 0, None elsewhere. Collective; blocks."""
    pieces = _gather(shares, _own(shares, state))
    if shares.rank:
        return None
    whole: dict[int, dict[str, Any]] = {index: dict(kept) for index, kept in waiting.items()}
    for index in sorted(pieces):
        if sum(len(part) for part, _ in pieces[index]) != real_numel(shares.parameters[index]):
            raise _lost(index)
        whole[index] = _whole(shares, index, pieces[index])
    return {"state": dict(sorted(whole.items())), "param_groups": packed_groups(groups)}


def _whole(shares: ShardedStep, index: int, parts: Sequence[tuple[Part, dict[str, Any]]]) -> dict[str, Any]:
    """Return a parameter's state in torch's format, put together from all of its parts."""
    parameter = shares.parameters[index]
    joined = _join(parts, Part(index, 0, real_numel(parameter)), shares.is_whole(index))
    if shares.is_whole(index):
        return joined
    return {name: _shaped(each, parameter) for name, each in joined.items()}


def packed_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups with their parameters' numbers in the place of these, as torch saves them."""
    start, packed = 0, []
    for group in groups:
        stop = start + len(group["params"])
        settings = {name: value for name, value in group.items() if name != "params"}
        packed.append({**settings, "params": list(range(start, stop))})
        start = stop
    return packed


def cut_state(
    shares: ShardedStep, groups: Sequence[Mapping[str, Any]], given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]], Waiting]:
    """Return this rank's parts of a whole state, in torch's format, the groups of parts that it is for, and the rest.

    Local. The rest is of parameters without parts (rule 3).

    Raises:
        ConfigurationError: The state is of another number of groups or parameters; nothing was changed.
    """
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"load_state_dict({given!r:.20}) of a sharded optimizer takes the whole state, on every rank, and "
            "full_state_dict() returns that on rank 0 alone. Load the file that rank 0 has saved on every rank."
        )
    saved = given.get("param_groups", ())
    counts = [len(group["params"]) for group in groups]
    if [len(group["params"]) for group in saved] != counts:
        raise ConfigurationError(
            f"the optimizer has groups of {counts} parameters, and the state to be loaded has groups of "
            f"{[len(group['params']) for group in saved]}. Give what full_state_dict(optimizer), or a plain "
            "optimizer's state_dict(), returned for a model like this one."
        )
    numbers = [number for group in saved for number in group["params"]]
    place_of = [place for place, count in enumerate(counts) for _ in range(count)]
    parts: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
    cut_groups = [{**group, "params": []} for group in saved]
    cut: dict[int, dict[str, Any]] = {}
    for number, (part, own) in enumerate(shares.parts.items()):
        place = place_of[part.index]
        parts[place]["params"].append(own)
        cut_groups[place]["params"].append(number)
        kept = given["state"].get(numbers[part.index])
        own_state = {name: _cut(shares, part, value) for name, value in (kept or {}).items()}
        if shares.cut.needs_master(
            shares.parameters[part.index]
        ):  # of the values that the model has now, if not saved
            own_state.setdefault(MASTER, _cut(shares, part, shares.parameters[part.index].detach()))
        own_state = _without_master(shares, part, own, own_state)
        if kept is not None:
            cut[number] = own_state
    found = {index: given["state"].get(numbers[index]) for index in shares.undivided}
    waiting = {index: _copied(kept) for index, kept in found.items() if kept}
    return {"state": cut, "param_groups": cut_groups}, parts, waiting


def _copied(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in kept.items()}


def divide_waiting(shares: ShardedStep, state: defaultdict[Tensor, Any], waiting: Waiting) -> None:
    """Cut the state of parameters that have parts now. Local; on every rank."""
    for index in [*waiting.keys() - {*shares.undivided}]:
        kept = waiting.pop(index)
        for part, own in shares.parts.items():
            if part.index == index:
                cut = {name: _cut(shares, part, value) for name, value in _copied(kept).items()}
                state[own] = _without_master(shares, part, own, cut)


def _cut(shares: ShardedStep, part: Part, value: Any) -> Any:
    """Return this part of a state of its parameter (rule 2)."""
    if isinstance(value, Loaded):
        return value.of(part).clone()
    parameter = shares.parameters[part.index]
    if shares.is_whole(part.index) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    laid = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
    return memory_of(laid.copy_(value))[part.start : part.stop].clone()


def move(shares: ShardedStep, state: defaultdict[Tensor, Any], waiting: Waiting) -> None:
    """Divide the state among the ranks that there are now. Collective over them; blocks.

    State that waits is passed on to ranks that are new.

    Raises:
        ConfigurationError: Some of it was lost with ranks that are gone; on every rank.
    """
    before = [*_own(shares, state), *((Part(index, 0, 0), kept) for index, kept in waiting.items())]
    shares.divide_again()
    wanted = {part.index for part in shares.parts} | {*shares.undivided}
    covered: defaultdict[int, int] = defaultdict(int)
    pieces: Pieces = {}
    for source in range(shares.num_ranks):
        for part, kept in _broadcast(shares, before, source):
            if not len(part):
                waiting[part.index] = kept
                continue
            covered[part.index] += len(part)
            if part.index in wanted:
                pieces.setdefault(part.index, []).append((part, kept))
    for index, length in covered.items():
        if length < real_numel(shares.parameters[index]):
            raise _lost(index)
    state.clear()
    for part, own in shares.parts.items():
        if part.index in pieces:
            kept = _join(pieces[part.index], part, shares.is_whole(part.index))
            state[own] = _without_master(shares, part, own, kept)
    for index in shares.undivided:  # it has been frozen since
        if index in pieces:
            waiting[index] = _whole(shares, index, pieces[index])


def state_of_all(
    shares: ShardedStep, state: Mapping[Tensor, Any], waiting: Waiting
) -> dict[int, dict[str, Any]]:
    """Return the whole state by the indices of parameters, on every rank. Collective; blocks."""
    own, pieces = _own(shares, state), Pieces()
    for source in range(shares.num_ranks):
        for part, kept in _broadcast(shares, own, source):
            pieces.setdefault(part.index, []).append((part, kept))
    return {**waiting, **{index: _whole(shares, index, parts) for index, parts in pieces.items()}}


def _without_master(shares: ShardedStep, part: Part, own: Parameter, kept: dict[str, Any]) -> dict[str, Any]:
    """Give a master weight what was kept for it, and return the rest."""
    master = kept.pop(MASTER, None)
    if master is not None and shares.cut.needs_master(shares.parameters[part.index]):
        with torch.no_grad():
            own.copy_(master)
    return kept


def _lost(index: int) -> ConfigurationError:
    return ConfigurationError(
        f"the state of the sharded optimizer is not complete: parts of parameter {index}'s are with ranks that are no "
        "members any more. Load a saved state on every rank: optimizer.load_state_dict(state)."
    )


def own_parts(shares: ShardedStep, state: Mapping[Tensor, Any], waiting: Waiting) -> list[OwnPart]:
    """Return this rank's parts, with what it keeps for each; parameters without parts as one part. Local."""
    found = []
    for part, own in shares.parts.items():
        kept, parameter = dict(state.get(own, {})), shares.parameters[part.index]
        if shares.cut.needs_master(parameter):
            kept[MASTER] = own.detach()
        found.append(OwnPart(parameter, part, shares.is_whole(part.index), kept))
    for index in shares.undivided:
        parameter = shares.parameters[index]
        part = Part(index, 0, real_numel(parameter))
        found.append(OwnPart(parameter, part, is_whole=True, kept=waiting.get(index, {})))
    return found


def _own(shares: ShardedStep, state: Mapping[Tensor, Any]) -> list[tuple[Part, dict[str, Any]]]:
    """Return what this rank keeps, part by part."""
    return [(each.part, dict(each.kept)) for each in own_parts(shares, state, {}) if each.kept]


def _join(pieces: Sequence[tuple[Part, dict[str, Any]]], wanted: Part, is_whole: bool) -> dict[str, Any]:
    """Return the state of a run of elements, of the parts that hold some of them (rule 2)."""
    if is_whole:
        return dict(pieces[0][1])
    joined: dict[str, Any] = {}
    for name, first in pieces[0][1].items():
        if not isinstance(first, Tensor) or first.shape != (len(pieces[0][0]),):
            joined[name] = first.clone() if isinstance(first, Tensor) else first
            continue
        joined[name] = run = first.new_empty(len(wanted))
        for part, kept in pieces:
            start, stop = max(part.start, wanted.start), min(part.stop, wanted.stop)
            if start < stop:
                piece = kept[name][start - part.start : stop - part.start]
                run[start - wanted.start : stop - wanted.start].copy_(piece)
    return joined


def _shaped(value: Any, parameter: Parameter) -> Any:
    """Return a state in the parameter's shape and strides, if it has a number for each of its elements."""
    if not isinstance(value, Tensor) or value.shape != (parameter.numel(),):
        return value
    return value.as_strided(parameter.shape, parameter.stride())


# ---- messages


def _gather(shares: ShardedStep, own: list[tuple[Part, dict[str, Any]]]) -> Pieces:
    """Return all ranks' state on rank 0, and nothing on other ranks. Collective; blocks."""
    group, device = shares.members.process_group, _device(shares)
    received = [*own] if shares.rank == 0 else []
    for source in range(1, shares.num_ranks):
        if shares.rank == source:
            message = _packed_bytes(own, device)
            for tensor in (torch.tensor([message.numel()], device=device), message):
                _wait(shares, MessageWork(isend(tensor, group, 0, 0)))
        elif shares.rank == 0:
            length = torch.zeros(1, dtype=torch.int64, device=device)
            _wait(shares, MessageWork(irecv(length, group, source, 0)))
            message = torch.empty(int(length), dtype=torch.uint8, device=device)
            _wait(shares, MessageWork(irecv(message, group, source, 0)))
            received += _unpacked(message)
    pieces: Pieces = {}
    for part, kept in received:
        pieces.setdefault(part.index, []).append((part, kept))
    return pieces


def _broadcast(
    shares: ShardedStep, own: list[tuple[Part, dict[str, Any]]], source: int
) -> list[tuple[Part, dict[str, Any]]]:
    """Return what one rank keeps, on every rank. Collective; blocks."""
    group, device, is_source = shares.members.process_group, _device(shares), shares.rank == source
    message = _packed_bytes(own, device) if is_source else torch.empty(0, dtype=torch.uint8, device=device)
    length = torch.tensor([message.numel()], device=device)
    _wait(shares, broadcast(length, group, source))
    if not is_source:
        message = torch.empty(int(length), dtype=torch.uint8, device=device)
    _wait(shares, broadcast(message, group, source))
    return _unpacked(message)


def _device(shares: ShardedStep) -> torch.device:
    return device_for_metadata(shares.members.process_group, shares.parameters[0].device)


def _wait(shares: ShardedStep, work: C10dWork) -> None:
    shares.members.peers.wait(
        work, "exchanging the state of a sharded optimizer", "No parameter was changed."
    )


def _packed_bytes(own: Sequence[tuple[Part, dict[str, Any]]], device: torch.device) -> Tensor:
    file = io.BytesIO()
    torch.save([((part.index, part.start, part.stop), kept) for part, kept in own], file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(device)


def _unpacked(message: Tensor) -> list[tuple[Part, dict[str, Any]]]:
    loaded = torch.load(io.BytesIO(message.cpu().numpy().tobytes()), weights_only=True)
    return [(Part(*place), kept) for place, kept in loaded]
