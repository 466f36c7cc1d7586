"""A torch optimizer on the keys that live on one server; steps that can be taken back.

Rules
1. Only optimizers that treat every element by itself are possible. Then a parameter that is cut into keys is stepped
   like a whole one. A state may be cut differently for another number of servers.
2. A step is made as soon as a piece's gradients have come, before any rank knows whether backward ended well
   everywhere. So the values before it are kept until ranks report that they have used the step. That takes the memory
   of a second copy.
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
        words: "optimizer": a name of `ELEMENTWISE`. "groups": the settings of its groups. "keys": for each key its
            number, its group, its number of elements, its dtype.

    Raises:
        ConfigurationError: There is no such optimizer, or it cannot step such tensors.
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
        """Set the values of some keys, concatenated in `values`. A step that is taken back keeps them."""
        for key, part in self._parts(keys, values):
            self._values[key].copy_(part)
            if key in self._before:
                self._before[key] = part, self._before[key][1]

    def begin(self, words: dict[str, Any]) -> None:
        """Begin a step. `words` holds "groups", "used" and "unused".

        "groups" are the settings. "used" says whether ranks used the last step, except the keys in "unused".
        """
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
        """Step these keys, whose gradients are concatenated. Return their new values in the same order."""
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
        """Return the state of all keys after the last step that was used. `words` is as for `begin`."""
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
        """Replace the state of these keys by a state that `fetch` described."""
        for key, loaded in read_state(words, state).items():
            if key not in self._values:
                raise ProtocolError(f"key {key} does not live on this server")
            self._optimizer.state[self._values[key]] = loaded
            if key in self._before:  # a step that is taken back keeps the loaded state
                self._before[key] = self._before[key][0], _copy(loaded)


def described_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[Bytes]]:
    """Return a key's state as metadata, where a tensor is its dtype and shape, and the tensors' bytes."""
    described, parts = dict(state), []
    for name, item in state.items():
        if isinstance(item, Tensor):
            described[name] = [str(item.dtype), list(item.shape)]
            parts.append(_bytes(item))
    return described, parts


def read_state(words: Mapping[str, Any], state: memoryview) -> dict[int, dict[str, Any]]:
    """Return the states by key, from the metadata of `described_state` in "keys" and all bytes."""
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
    """Return settings with lists as tuples, which JSON does not have (`betas` is one)."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in words.items()}


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {name: item.clone() if isinstance(item, Tensor) else item for name, item in state.items()}


def _bytes(tensor: Tensor) -> Bytes:
    found: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    copied: Bytes = found.copy()
    return copied
