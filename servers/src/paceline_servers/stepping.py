"""A torch optimizer on the keys that live on one server; steps that can be taken back.

Rules
1. Only optimizers that treat every element by itself: then a parameter that is cut into keys is stepped as a whole one
   is, and a state may be cut anew for another number of servers.
2. A step is made as soon as a piece's gradients are there, before anybody knows whether backward ended well on every
   rank. So what was before is kept until ranks say that they have used the step; it costs the memory of a second copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ConfigurationError, ProtocolError
from paceline_servers.ordered_sum import Bytes

ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
)
"""Classes of torch.optim that treat every element of a parameter by itself, which servers step."""

_DTYPES = {
    str(dtype): dtype
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
}


class SteppedKeys:
    """Parameters and optimizer state of one server's keys.

    Args:
        words: "optimizer", a name of `ELEMENTWISE`; "groups", the settings of its groups; "keys": for each key its
            number, its group, its elements, its dtype.

    Raises:
        ConfigurationError: There is no such optimizer, or it steps no such tensors.
    """

    def __init__(self, words: dict[str, Any]) -> None:
        if words.get("optimizer") not in ELEMENTWISE:
            raise ConfigurationError(
                f"servers do not step {words.get('optimizer')!r}: they know {', '.join(ELEMENTWISE)}"
            )
        self._values: dict[int, Tensor] = {}
        self._group_of: dict[int, int] = {}
        members: list[list[Tensor]] = [[] for _ in words["groups"]]
        for number, group, num_elements, dtype in words["keys"]:
            value = torch.zeros(num_elements, dtype=_dtype(dtype))
            self._values[number], self._group_of[number] = value, group
            members[group].append(value)
        groups = [
            {"params": own, **_settings(each)} for own, each in zip(members, words["groups"], strict=True)
        ]
        self._optimizer: Optimizer = getattr(torch.optim, words["optimizer"])(groups)
        self._groups = self._optimizer.param_groups
        self._before: dict[int, tuple[Tensor, dict[str, Any]]] = {}

    def set_parameters(self, keys: list[int], values: Bytes) -> None:
        """The values of some keys, which follow each other; a step that is taken back leaves them."""
        for key, part in self._parts(keys, values):
            self._values[key].copy_(part)
            if key in self._before:
                self._before[key] = part, self._before[key][1]

    def begin(self, words: dict[str, Any]) -> None:
        """A step begins: "groups", its settings; "used", whether ranks used the last one; "unused", without these."""
        self._take_back(words["unused"] if words["used"] else list(self._before))
        self._before.clear()
        for group, settings in zip(self._groups, words["groups"], strict=True):
            group.update(_settings(settings))

    def _take_back(self, keys: list[int]) -> None:
        for key in keys:
            if key in self._before:
                value, state = self._before.pop(key)
                self._values[key].copy_(value)
                self._optimizer.state[self._values[key]] = state

    def step(self, keys: list[int], gradients: Bytes) -> Bytes:
        """Step these keys, whose gradients follow each other; their new values, likewise."""
        members: list[list[Tensor]] = [[] for _ in self._groups]
        for key, part in self._parts(keys, gradients):
            value = self._values[key]
            self._before[key] = value.clone(), _copy(self._optimizer.state[value])
            value.grad = part
            members[self._group_of[key]].append(value)
        self._optimizer.param_groups = [
            {**group, "params": own} for group, own in zip(self._groups, members, strict=True)
        ]
        self._optimizer.step()
        self._optimizer.param_groups = self._groups
        for key in keys:
            self._values[key].grad = None
        return np.concatenate([_bytes(self._values[key]) for key in keys])

    def _parts(self, keys: list[int], values: Bytes) -> list[tuple[int, Tensor]]:
        found, place = [], 0
        for key in keys:
            if key not in self._values:
                raise ProtocolError(f"key {key} does not live on this server")
            like = self._values[key]
            part = values[place : place + like.nbytes]
            if part.nbytes != like.nbytes:
                raise ProtocolError(f"key {key} has {like.nbytes} bytes, and {part.nbytes} came")
            found.append((key, torch.frombuffer(bytearray(part), dtype=like.dtype)))
            place += like.nbytes
        return found

    def fetch(self, words: dict[str, Any]) -> tuple[dict[str, Any], list[Bytes]]:
        """The state of all keys, as of the last step that was used; `words` as of `begin`. Changes nothing."""
        taken_back = set(words["unused"]) if words["used"] else set(self._before)
        heads: list[list[Any]] = []
        chunks: list[Bytes] = []
        for key, value in self._values.items():
            is_before = key in taken_back and key in self._before
            described, parts = described_state(
                self._before[key][1] if is_before else self._optimizer.state[value]
            )
            heads.append([key, described])
            chunks += parts
        return {"keys": heads}, chunks

    def load(self, words: dict[str, Any], state: memoryview) -> None:
        """Replace the state of all keys by what `fetch` described, for these keys."""
        for key, loaded in read_state(words, state).items():
            if key not in self._values:
                raise ProtocolError(f"key {key} does not live on this server")
            self._optimizer.state[self._values[key]] = loaded
            if key in self._before:  # a step that is taken back leaves what was loaded
                self._before[key] = self._before[key][0], _copy(loaded)


def described_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[Bytes]]:
    """A key's state as metadata, in which a tensor is its dtype and shape, and the tensors' bytes."""
    described, parts = dict(state), []
    for name, item in state.items():
        if isinstance(item, Tensor):
            described[name] = [str(item.dtype), list(item.shape)]
            parts.append(_bytes(item))
    return described, parts


def read_state(words: Mapping[str, Any], state: memoryview) -> dict[int, dict[str, Any]]:
    """By key, what `described_state` was given: of "keys", each with its metadata, and all bytes."""
    found: dict[int, dict[str, Any]] = {}
    place = 0
    for key, described in words["keys"]:
        own = found[key] = dict(described)
        for name, item in described.items():
            if isinstance(item, list):
                dtype = _dtype(item[0])
                num_bytes = dtype.itemsize * torch.Size(item[1]).numel()
                own[name] = torch.frombuffer(bytearray(state[place : place + num_bytes]), dtype=dtype).view(
                    item[1]
                )
                place += num_bytes
    return found


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigurationError(f"servers do not step tensors of {name}")
    return _DTYPES[name]


def _settings(words: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples, which `betas` is one of."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in words.items()}


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {name: item.clone() if isinstance(item, Tensor) else item for name, item in state.items()}


def _bytes(tensor: Tensor) -> Bytes:
    found: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    copied: Bytes = found.copy()
    return copied
