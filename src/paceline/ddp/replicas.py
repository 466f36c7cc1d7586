"""The comparison of all ranks' models, before the first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline import version
from paceline.comm.collectives import device_for_metadata
from paceline.comm.peers import Peers, next_name
from paceline.ddp.layout import ManagedParameters
from paceline.errors import ReplicaMismatchError


@dataclass(frozen=True)
class Description:
    """The facts that must be equal on all ranks, by title. The version comes first."""

    lines: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls,
        managed: ManagedParameters,
        frozen: Iterable[tuple[str, Tensor]],
        buffers: Iterable[tuple[str, Tensor]],
        ignored: Iterable[str],
        options: Sequence[tuple[str, object]],
    ) -> Description:
        """Describe a module: parameters in order, buffers, what is left out, and the options that shape buckets."""
        lines = [(VERSION, version.__version__), ("number of trainable parameters", str(len(managed)))]
        for index, (name, parameter) in enumerate(zip(managed.names, managed.parameters, strict=True)):
            kind = ", sparse gradient" if managed.sparse[index] else ""
            kind += ", delayed" if index in managed.delayed else ""
            lines.append((f"params[{index}]", f"{name}: {_facts(parameter)}, requires_grad=True{kind}"))
        for name, tensor in frozen:
            lines.append((f"parameter {name}", f"{name}: {_facts(tensor)}, requires_grad=False"))
        lines += [(f"buffer {name}", f"{name}: {_facts(buffer)}") for name, buffer in buffers]
        lines.append(("ignored parameters and buffers", ", ".join(sorted(ignored)) or "none"))
        lines += [(f"argument {name}", str(value)) for name, value in options]
        return cls(tuple(lines))

    @classmethod
    def of_refusal(cls, error: Exception) -> Description:
        """Return the description of a rank that cannot wrap its module at all."""
        return cls(((VERSION, version.__version__), (REFUSAL, str(error))))


def _facts(tensor: Tensor) -> str:
    return f"sizes {list(tensor.shape)}, strides {list(tensor.stride())}, {str(tensor.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Verified:
    """The facts that all ranks know of each other, once they have the same model."""

    # for each rank whether it has the model on a CPU: so defaults that depend on it are the same
    are_on_cpu: Sequence[bool]
    number: int  # what rank 0 calls the module
    all_know_beside: bool  # whether all ranks know of a group beside the one that they asked for


def verify(
    description: Description,
    process_group: ProcessGroup,
    peers: Peers,
    device: torch.device,
    number: int = 0,
    knows_beside: bool = False,
    remedy: str | None = None,
) -> Verified:
    """Make sure that every rank described the same model. Return where each rank has it, and its number.

    Ranks may differ in the module's `device`, their `number` for it and `knows_beside`. Collective; blocks. One
    all-gather of 8 words a rank. Only where ranks differ a second one gathers the descriptions. Then every rank raises
    the same ReplicaMismatchError, which names rank and parameter. It ends with `remedy`, by default that of wrapping.
    """
    place, on_cpu = device_for_metadata(process_group, device), device.type == "cpu"
    encoded = json.dumps(description.lines).encode()
    digest = hashlib.sha256(encoded).digest()
    words = [len(encoded)] + [int.from_bytes(digest[i : i + 8], "big", signed=True) for i in range(0, 32, 8)]
    mine = torch.tensor([*words, on_cpu, knows_beside, number], device=place)
    gathered = [row.tolist() for row in peers.rows_of_all(mine, process_group, _COMPARING)]
    numbers = [row.pop() for row in gathered]
    knowing = [row.pop() for row in gathered]
    are_on_cpu = [bool(row.pop()) for row in gathered]
    if all(row == gathered[0] for row in gathered):
        return Verified(are_on_cpu, numbers[0], all(knowing))
    longest = max(row[0] for row in gathered)
    padded = torch.tensor(list(encoded.ljust(longest)), dtype=torch.uint8, device=place)
    texts = peers.rows_of_all(padded, process_group, _COMPARING)
    facts = [dict(json.loads(bytes(text.tolist()))) for text in texts]
    raise ReplicaMismatchError(_difference(facts, remedy or REMEDY))


def tell_of_refusal(error: Exception, process_group: ProcessGroup, device: torch.device) -> None:
    """Tell ranks that wrap their module that this one cannot. Collective: matches the others' `verify`."""
    if process_group.size() == 1:
        return
    in_slices = device_for_metadata(process_group, device).type == "cpu"
    peers = Peers(process_group, next_name(process_group, is_collective=True), in_slices=in_slices)
    with suppress(ReplicaMismatchError):  # what the others raise
        verify(Description.of_refusal(error), process_group, peers, device)


def _difference(facts: Sequence[dict[str, str]], remedy: str) -> str:
    """Return the first difference from rank 0, in words."""
    versions = [lines.get(VERSION, "of a version that does not say") for lines in facts]
    if (other_version := version.difference(versions)) is not None:
        return other_version
    for rank, lines in enumerate(facts):
        if REFUSAL in lines:
            return f"rank {rank} could not wrap its model: {lines[REFUSAL]} {remedy}"
    ours = facts[0]
    for rank, theirs in enumerate(facts[1:], start=1):
        count = "number of trainable parameters"
        if ours.get(count) != theirs.get(count):
            lacking = _first_missing(ours, theirs, rank) or _first_missing(theirs, ours, 0)
            return (
                f"DDP expects same model across all ranks, but Rank 0 has {ours[count]} params, while rank {rank} has "
                f"inconsistent {theirs[count]} params{lacking}. {remedy}"
            )
        for title in dict.fromkeys([*ours, *theirs]):
            if ours.get(title) != theirs.get(title):
                return (
                    f"[{rank}]: {title} in this process ({theirs.get(title, 'absent')}) appears not to match the same "
                    f"in process 0 ({ours.get(title, 'absent')}). {remedy}"
                )
    return f"the ranks describe their models in different orders. {remedy}"


_COMPARING = "comparing models with the other ranks"
VERSION = "version of Paceline"
REFUSAL = "refusal"
REMEDY = (
    "Build the same model, with the same arguments, on every rank before wrapping it; no value was changed."
)


def _first_missing(these: dict[str, str], those: dict[str, str], rank: int) -> str:
    found = [_trainable_names(lines) for lines in (these, those)]
    missing = [name for name in found[0] if name not in found[1]]
    return f"; rank {rank} does not train {missing[0]}, or ignores it" if missing else ""


def _trainable_names(lines: dict[str, str]) -> list[str]:
    return [fact.split(":")[0] for title, fact in lines.items() if title.startswith("params[")]
