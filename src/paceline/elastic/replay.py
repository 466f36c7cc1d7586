"""The transfer of a training rank's state to a new rank: a snapshot in parts, and the gradients of later steps.

Rules
1. The giver copies some parameters at the beginning of each step, with their states in the optimizers. Of those that
   were copied the gradients of every later step follow, as `optimizer.step()` finds them, with the settings of that
   step. The receiver steps its own optimizer with them: the same numbers by the same code are the same bits.
2. That they are is not believed but compared: by `Carried.digest`, when the membership ends. What a script changes
   behind the optimizer's back shows there, and the rank receives everything, as if nothing had been sent.
3. The giver never waits for the receiver. What has not been read is bounded; beyond that the giver gives up.
4. Frames are JSON and tensors as they are. Nothing is unpickled. Between hosts the agents connect the two, and have
   made sure that both are of the job (`launch/elastic/state_call.py`).
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.elastic.handover import Carried, bytes_of
from paceline.elastic.rollback import copied, settings_of
from paceline.elastic.state_tree import PackedState, empty_tensors, pack, unpack
from paceline.errors import ConfigurationError, PacelineError

_LEAST_BYTES = 16 << 20  # of the snapshot, that are copied in a step
_NUM_STEPS = 8  # in which all of it is copied, if it is large
_MOST_STATES = 2.0  # that may wait to be read
_LENGTH_BYTES = 8
_BEAT_S = 0.2  # a receiver that waits for the next step says so again


class Giver:
    """Sends what `carried` holds to a receiver, a part of it at each `go_on`, from a thread of its own."""

    def __init__(self, end: socket.socket, carried: Carried) -> None:
        self._end, self._carried = end, carried
        self._parameters, self._num_sent = carried.parameters, 0
        states = (each for parameter in self._parameters for each in carried.of(parameter))
        self._total = sum(_size(each) for state in states for each in _tensors_in(state))
        self._posted = self._sent = 0  # bytes; only the thread writes the second
        self._frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hooks = [each.register_step_pre_hook(self._note_step) for each in carried.optimizers]
        self.is_over = False
        threading.Thread(target=self._send, name="paceline-giver", daemon=True).start()

    def go_on(self) -> None:
        """A step begins: copy some more. Local."""
        begun, stop = self._posted, max(_LEAST_BYTES, self._total // _NUM_STEPS)
        while not self.is_over and self._num_sent < len(self._parameters) and self._posted - begun < stop:
            parameter = self._parameters[self._num_sent]
            self._post({"place": self._num_sent, "state": copied(self._carried.of(parameter))})
            self._num_sent += 1
            if self._num_sent == len(self._parameters):
                self._post({"is_whole": True})

    def end(self, step: int) -> int:
        """End the transfer behind `step`. Return the digest of all that was given, or 0. Local."""
        self._post({"end": step})
        is_whole = not self.is_over and self._num_sent == len(self._parameters)
        self._leave()
        with contextlib.suppress(ConfigurationError):
            return self._carried.digest() if is_whole else 0
        return 0

    def _note_step(self, optimizer: Optimizer, *_: object) -> None:
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        found = [
            (place, parameter.grad)
            for place, parameter in enumerate(self._parameters[: self._num_sent])
            if parameter.grad is not None and id(parameter) in own
        ]
        if any(gradient.layout is not torch.strided for _, gradient in found):
            self._leave()
        elif found and not self.is_over:
            self._post(
                {
                    "optimizer": self._carried.optimizers.index(optimizer),
                    "settings": [settings_of(group) for group in optimizer.param_groups],
                    "gradients": [(place, gradient.clone()) for place, gradient in found],
                }
            )

    def _post(self, tree: Any) -> None:
        try:
            packed = pack(tree)
        except ConfigurationError:  # nothing that can be sent
            self._leave()
            return
        self._posted += sum(map(_size, packed.tensors))
        if self._posted - self._sent > _MOST_STATES * self._total + _LEAST_BYTES:
            self._leave()
        else:
            self._frames.put(packed)

    def _leave(self) -> None:
        """Give up, or end: what was posted is sent."""
        self.is_over = True
        self._frames.put(None)
        for hook in self._hooks:
            hook.remove()

    def _send(self) -> None:
        with self._end, contextlib.suppress(OSError):
            while (packed := self._frames.get()) is not None:
                self._end.sendall(len(packed.words).to_bytes(_LENGTH_BYTES, "big") + packed.words)
                for tensor in packed.tensors:
                    self._end.sendall(bytes_of(tensor).data)
                    self._sent += _size(tensor)
        self.is_over = True


@dataclass(frozen=True)
class Replayed:
    """The state that a receiver holds: parameters and optimizers' states after so many steps."""

    step: int
    digest: int


def receive(
    end: socket.socket, carried: Carried, waits: Callable[[], object], caught_up: Callable[[], object]
) -> Replayed | None:
    """Follow a giver until it ends; None: it gave up, or is dead. Blocks.

    `caught_up` is called once: as soon as nothing is left to be read, or nothing comes any more. Until then `waits` is
    called now and then while nothing comes.
    """
    has_told = is_whole = False
    try:
        with end:
            while True:
                while not (has_told or select.select([end], [], [], _BEAT_S)[0]):
                    waits()
                if (tree := _read(end)) is None:
                    return None
                if "end" in tree:
                    return Replayed(tree["end"], carried.digest()) if is_whole else None
                is_whole = is_whole or "is_whole" in tree
                take(tree, carried)
                if is_whole and not has_told and not select.select([end], [], [], 0)[0]:
                    has_told = True
                    caught_up()
    except (OSError, PacelineError, RuntimeError, ValueError, KeyError, TypeError):
        return None  # it receives everything
    finally:
        if not has_told:
            caught_up()


def take(tree: Any, carried: Carried) -> None:
    """Carry out one frame. Local."""
    if "state" in tree:
        carried.put(carried.parameters[tree["place"]], tree["state"])
    elif "gradients" in tree:
        optimizer = carried.optimizers[tree["optimizer"]]
        for group, settings in zip(optimizer.param_groups, tree["settings"], strict=True):
            group.update(settings)
        for place, gradient in tree["gradients"]:
            carried.parameters[place].grad = gradient
        optimizer.step()
        for place, _ in tree["gradients"]:
            carried.parameters[place].grad = None


def _read(end: socket.socket) -> Any:
    """The next frame; None: there is none."""
    length = bytearray(_LENGTH_BYTES)
    if not _fill(end, memoryview(length)):
        return None
    words = bytearray(int.from_bytes(length, "big"))
    tensors: list[Tensor] = []
    if not _fill(end, memoryview(words)):
        return None
    for tensor in empty_tensors(bytes(words)):
        tensors.append(tensor)
        if not _fill(end, bytes_of(tensor).data):
            return None
    return unpack(PackedState(bytes(words), tensors))


def _fill(end: socket.socket, room: memoryview) -> bool:
    while len(room):
        count = end.recv_into(room)
        if not count:
            return False
        room = room[count:]
    return True


def _tensors_in(state: Any) -> list[Tensor]:
    """Return the tensors of a parameter, or of its state in an optimizer."""
    if isinstance(state, dict):
        return [each for each in state.values() if isinstance(each, Tensor)]
    return [state] if isinstance(state, Tensor) else []


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
