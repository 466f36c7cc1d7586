"""State as words and tensors: what `state_dict()`s return, so that it can be sent, and nothing is unpickled.

A tree of dicts, lists, tuples, numbers, texts, None and tensors becomes JSON, in which each tensor is a place in a
list, with its shape and dtype. So whoever receives knows what to allocate, and tensors travel without a copy.
Numbers arrive in all their bits: Python writes the shortest text that reads as the same double.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigurationError, ProtocolError

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class PackedState:
    """A tree, taken apart."""

    words: bytes  # JSON
    tensors: list[Tensor]  # in the order of their places


def pack(tree: Any) -> PackedState:
    """Take a tree apart; tensors are not copied. Raises ConfigurationError for any other object in it."""
    tensors: list[Tensor] = []
    return PackedState(json.dumps(_described(tree, "", tensors), separators=(",", ":")).encode(), tensors)


def _described(value: Any, where: str, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        dtype = str(value.dtype).removeprefix("torch.")
        return {"t": len(tensors) - 1, "shape": list(value.shape), "dtype": dtype}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        pairs = [
            [_described(key, where, tensors), _described(each, f"{where}[{key!r}]", tensors)]
            for key, each in value.items()
        ]
        return {"d": pairs}
    if isinstance(value, (list, tuple)):
        items = [_described(each, f"{where}[{place}]", tensors) for place, each in enumerate(value)]
        return {"l" if isinstance(value, list) else "u": items}
    if isinstance(value, _PLAIN):  # numpy's float64 is a float
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy's
        return _described(value.item(), where, tensors)
    raise ConfigurationError(
        f"state{where} is a {type(value).__name__}, and another rank is sent numbers, texts, lists, dicts and tensors "
        "only. Leave it out of state_dict()."
    )


def empty_tensors(words: bytes) -> list[Tensor]:
    """Tensors like those of the tree that these words describe, on the CPU, to be filled."""
    found: dict[int, Tensor] = {}
    for node in _tensors_of(json.loads(words)):
        dtype = getattr(torch, node["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ProtocolError(f"another rank's state has a tensor of dtype {node['dtype']!r}.")
        found[node["t"]] = torch.empty(node["shape"], dtype=dtype)
    return [found[place] for place in range(len(found))]


def _tensors_of(node: Any) -> Iterable[Any]:
    if not isinstance(node, dict):
        return
    if "t" in node:
        yield node
    for pair in node.get("d", ()):
        for each in pair:
            yield from _tensors_of(each)
    for each in (*node.get("l", ()), *node.get("u", ())):
        yield from _tensors_of(each)


def unpack(packed: PackedState) -> Any:
    """Put a tree together again; its tensors are those given."""
    return _built(json.loads(packed.words), packed.tensors)


def _built(node: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    if "t" in node:
        return tensors[node["t"]]
    if "d" in node:
        return {_built(key, tensors): _built(each, tensors) for key, each in node["d"]}
    if "l" in node:
        return [_built(each, tensors) for each in node["l"]]
    return tuple(_built(each, tensors) for each in node["u"])
