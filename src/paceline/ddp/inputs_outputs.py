"""The tensors in the outputs of a wrapped module's forward, wherever they are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.distributed.rpc import is_available as rpc_is_available
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence


def batch_size(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the first dimension of the first tensor among a forward's arguments; 0 if there is none."""
    for value in (*inputs, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.size(0) if value.dim() else 0
    return 0


def find_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings, dataclasses and packed sequences."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, PackedSequence):
        yield output.data
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from find_tensors(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from find_tensors(getattr(output, field.name, None))
    elif rpc_is_available():
        yield from _remote_tensors(output)


_DEEPEST = 4  # so far objects are followed, and what they hold


def find_nodes(output: Any, module: Module, begin: int) -> list[Any]:
    """Return the nodes of autograd's graph that a backward of this output passes first.

    Where no tensor is in it, the attributes of objects in it and of the modules are searched: a loss may be kept there.
    Nodes numbered below `begin` belong to other forwards.
    """
    nodes = [tensor.grad_fn for tensor in find_tensors(output) if tensor.grad_fn is not None]
    if not nodes:
        attributes = [vars(part) for part in module.modules()]
        hidden = [tensor.grad_fn for tensor in _search([output, *attributes]) if tensor.grad_fn is not None]
        nodes = [node for node in hidden if node._sequence_nr() >= begin]
    return nodes


def _search(places: list[Any]) -> Iterator[Tensor]:
    """Yield the tensors in these places, in containers there and in attributes of objects. Do not enter modules."""
    seen: set[int] = set()
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for place in places:
            if isinstance(place, Tensor):
                yield place
            elif id(place) not in seen and not isinstance(place, (Module, type, ModuleType)):
                seen.add(id(place))
                inner += _held_by(place)
        places = inner


def _held_by(place: Any) -> Iterable[Any]:
    if isinstance(place, Mapping):
        return list(place.values())
    if isinstance(place, (list, tuple, set, frozenset)):
        return place
    slots = [name for kind in type(place).__mro__ for name in vars(kind).get("__slots__", ())]
    named = [getattr(place, name, None) for name in slots if isinstance(name, str)]
    return [*getattr(place, "__dict__", {}).values(), *named]


def _remote_tensors(output: Any) -> Iterator[Tensor]:
    from torch.distributed.rpc import RRef  # noqa: PLC0415 (not in every build)

    if isinstance(output, RRef) and output.is_owner():
        yield from find_tensors(output.local_value())
