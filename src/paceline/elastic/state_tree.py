"""State as words and tensors: what `state_dict()`s return, so that it can be sent, and nothing is unpickled.

A tree of dicts, lists, tuples, numbers, texts, None, bytes, arrays and tensors becomes JSON. There each tensor is a
place in a list, with its shape and dtype. So a receiver knows what to allocate, and tensors travel without a copy. A
tensor that is in the tree twice travels once. Numbers arrive in all their bits. Python writes the shortest text that
reads as the same double, and a number of numpy's is an array.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import ConfigurationError, ProtocolError

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class PackedState:
    """A tree, taken apart."""

    words: bytes  # JSON
    tensors: list[Tensor]  # in the order of their places


def pack(tree: Any) -> PackedState:
    """Take a tree apart; tensors are not copied. Raises ConfigurationError for any other object in it."""
    found: dict[int, tuple[int, Tensor]] = {}
    words = json.dumps(_described(tree, "", found), separators=(",", ":"))
    tensors = [each.detach().resolve_conj().resolve_neg() for _, each in found.values()]
    return PackedState(words.encode(), tensors)


def _described(value: Any, where: str, found: dict[int, tuple[int, Tensor]]) -> Any:
    """Describe `value` as JSON. `found` has the place of each tensor by its id, and keeps the tensor alive."""

    def inner(each: Any, name: object = None) -> Any:
        return _described(each, where if name is None else f"{where}[{name!r}]", found)

    if type(value) in _PLAIN:
        return value
    if _is_plain_tensor(value):
        place, _ = found.setdefault(id(value), (len(found), value))
        described = {"t": place, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        return described if value.is_cpu else {**described, "on_device": True}
    if isinstance(value, Mapping):
        return {"d": [[inner(key), inner(each, key)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [inner(each, place) for place, each in enumerate(value)]
        return {"l" if isinstance(value, list) else "u": items}
    if isinstance(value, bytes):
        return {"b": inner(torch.from_numpy(np.frombuffer(value, np.uint8).copy()))}
    if isinstance(value, (np.ndarray, np.number, np.bool_)):
        kind = "a" if isinstance(value, np.ndarray) else "n"
        with contextlib.suppress(TypeError, ValueError):  # its elements are no numbers of torch's
            return {kind: inner(torch.from_numpy(np.array(value, order="C")))}
    if isinstance(value, _PLAIN):  # an enumeration's member
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    raise ConfigurationError(
        f"state{where} is a {type(value).__name__}, and another rank is sent numbers, texts, bytes, lists, dicts, "
        "arrays and tensors only. Leave it out of state_dict() and get_extra_state()."
    )


def _is_plain_tensor(value: Any) -> bool:
    """Return whether its bytes and dtype are all that it is."""
    return type(value) in (Tensor, Parameter) and value.layout is torch.strided and not value.is_quantized


def empty_tensors(words: bytes) -> list[Tensor]:
    """Return empty CPU tensors like those of the tree that these words describe, for receiving."""
    found: dict[int, Tensor] = {}
    for node in _tensors_of(json.loads(words)):
        dtype = getattr(torch, node["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ProtocolError(f"another rank's state has a tensor of dtype {node['dtype']!r}.")
        if node["t"] not in found:
            found[node["t"]] = torch.empty(node["shape"], dtype=dtype)
    return [found[place] for place in range(len(found))]


def _tensors_of(node: Any) -> Iterable[Any]:
    if isinstance(node, dict) and "t" in node:
        yield node
    elif isinstance(node, (dict, list)):
        for each in node.values() if isinstance(node, dict) else node:
            yield from _tensors_of(each)


def unpack(packed: PackedState, device: torch.device | None = None) -> Any:
    """Put a tree together again; its tensors are those given, copied to `device` if they were on an accelerator."""
    tree, tensors = json.loads(packed.words), [*packed.tensors]
    for place in {node["t"] for node in _tensors_of(tree) if "on_device" in node}:
        tensors[place] = tensors[place].to(device)
    return _built(tree, tensors)


def _built(node: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    if "t" in node:
        return tensors[node["t"]]
    ((kind, inside),) = node.items()
    if kind == "d":
        return {_built(key, tensors): _built(each, tensors) for key, each in inside}
    if kind in ("l", "u"):
        items = [_built(each, tensors) for each in inside]
        return items if kind == "l" else tuple(items)
    array = _built(inside, tensors).numpy()
    return array if kind == "a" else array.tobytes() if kind == "b" else array[()]
