"""The transfer of a training rank's state to a new rank, or to a shadow: a snapshot in parts, then later gradients.

Rules
1. The giver copies some parameters at the beginning of each step, with their states in the optimizers. Of those that
   were copied the gradients of every later step follow, as `optimizer.step()` finds them, with the settings of that
   step. The receiver steps its own optimizer with them: the same numbers by the same code are the same bits. With them
   comes what the devices' vote and a `GradScaler` tell a fused optimizer, so a bad step changes nothing there either.
2. That they are is not believed but compared, by `Carried.digest`, when the receiver becomes a member. What a script
   changes behind the optimizer's back shows there, and the rank receives everything, as if nothing had been sent.
3. The giver never waits for the receiver. What has not been read is bounded; beyond that the giver gives up. Nor does
   it wait for an accelerator: copies are on their way to the host, and the sending thread waits for them.
4. Frames are JSON and tensors as they are. Nothing is unpickled. Between hosts the agents connect the two, and have
   made sure that both are of the job (`launch/elastic/links.py`).
5. A shadow (`shadow.py`) has one giver for each rank that it follows, and each gives its `Share`. Between two steps a
   frame "turn" follows the gradients. It has the step and digests of some parameters. The first giver adds the rest of
   the state. A shadow applies a step only when this frame is there.
6. A shadow says which step it holds. A giver that begins behind the same step sends no snapshot. A frame "snapshot"
   says that one begins: what this giver has sent before, and was not applied, is void. A giver with too many unread
   frames drops the later ones, and begins a snapshot when the others are read.
7. A giver and a shadow on one host share memory, in which gradients travel (`shared_memory.py`). The frame says where.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.device import AsyncValue
from paceline.data import GlobalBatch
from paceline.elastic.handover import Carried, Piece, bytes_of, laid_out_as
from paceline.elastic.rollback import HOST, TrainingPosition, copied, settings_of
from paceline.elastic.shared_memory import SharedMemory
from paceline.elastic.state_tree import PackedState, empty_tensors, pack, unpack
from paceline.errors import ConfigurationError, PacelineError, ProtocolError
from paceline.optim.shares import is_dense, memory_of

_LEAST_BYTES = 16 << 20  # of the snapshot, that are copied in a step
_NUM_STEPS = 8  # in which all of it is copied, if it is large
_MOST_STATES = 2.0  # that may wait to be read
_DIGEST_NUMBERS = 1 << 17  # of a parameter, at once
_DIGEST_STEPS = 64  # in which a shadow confirms every parameter once
_DRAIN_S, _CONFIRM_S, _LOOK_S = 1.0, 10.0, 0.001
_HEADER = struct.Struct("!qq")  # how many bytes of words follow, and where the tensors are in shared memory
_INLINE = -1  # the tensors follow the words
_NO_STEP = -1
HELD_BYTES = 8  # of the number that a shadow says: the step that it holds as it begins, or -1
CONFIRMED = -2  # minus the step whose turn it has applied
_NO_SHADOW = "the ranks train on an accelerator, whose bits no CPU repeats. Save after elastic.synchronize()."
_SAID = (
    "found_inf",
    "grad_scale",
)  # to a fused optimizer within its step: by the devices' vote, by a GradScaler
_BEAT_S = 0.2  # a receiver that waits for the next step says so again


@dataclass(frozen=True)
class Share:
    """The part of a state that one of several givers sends."""

    index: int
    count: int

    def indices(self, sizes: Sequence[int]) -> list[int]:
        """Return the indices of this part's parameters, so that the parts have about as many bytes each."""
        room = [0] * self.count
        found = []
        for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
            owner = room.index(min(room))
            room[owner] += sizes[index]
            if owner == self.index:
                found.append(index)
        return sorted(found)


class Giver:
    """Sends what `carried` holds to a receiver, a part of it at each `go_on`, from a thread of its own.

    A replacement is sent everything by one giver. A shadow is sent a `share` by each of several.
    """

    def __init__(
        self,
        end: socket.socket,
        carried: Carried,
        share: Share | None = None,
        asked_for: int | None = None,  # what the shadow has asked for already
    ) -> None:
        self._end, self._carried, self._share = end, carried, share
        self._parameters, self._num_sent = carried.parameters, 0
        parts = Share(0, 1) if share is None else share
        self._pieces = carried.pieces(parts.indices)
        self._measure()
        self._posted = self._sent = 0  # bytes; only the thread writes the second
        self._frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hooks = [each.register_step_pre_hook(self._note_step) for each in carried.optimizers]
        self.is_over = self._is_behind = False
        self._begun_at: int | None = None  # the step of the first turn
        self._turned_at = -1
        self._next_digest = 0
        self._asked_for = asked_for  # the step behind which the shadow wants to follow, -1 for a snapshot
        self._confirmed = _NO_STEP  # the last step that it has applied
        if share is not None:
            self._num_sent = len(self._pieces)  # until the shadow asks for a snapshot
            self._post({"bytes": self._total * share.count})  # about
            if {each.device.type for each in self._parameters} - {"cpu"}:
                self._post({"refused": _NO_SHADOW})
                self.leave()
        elif carried.is_divided:
            self.leave()  # no rank has the whole state
        self._memory = None if self.is_over or share is None else self._share_memory()
        threading.Thread(target=self._send, name="paceline-giver", daemon=True).start()

    def _share_memory(self) -> SharedMemory | None:
        """Send a shadow on this host the memory for its gradients. None: it is on another, or there is none."""
        sizes = [_gradient_bytes(self._parameters[each.index], each) for each in self._pieces]
        if self._end.family != socket.AF_UNIX or not any(sizes):
            return None
        words = pack({}).words
        with contextlib.suppress(OSError):
            return SharedMemory.sent(self._end, _HEADER.pack(len(words), _INLINE) + words, sizes)
        return None

    def _size_of(self, piece: Piece) -> int:
        return sum(_size(each) for state in self._carried.of_piece(piece) for each in _tensors_in(state))

    def _measure(self) -> None:
        """See how large the own share is. An optimizer has states only after its first step."""
        self._total = sum(map(self._size_of, self._pieces))
        self._compared = [each for piece in self._pieces for each in self._runs_of(piece)]

    def _runs_of(self, piece: Piece) -> list[Piece]:
        """Return runs of a large piece, so that no step takes long for its digest."""
        parameter = self._parameters[piece.index]
        count = memory_of(parameter).numel() if is_dense(parameter) else 0
        if piece.run is not None or count <= _DIGEST_NUMBERS:
            return [piece]
        starts = range(0, count, _DIGEST_NUMBERS)
        return [Piece(piece.index, (start, min(start + _DIGEST_NUMBERS, count))) for start in starts]

    def go_on(self, position: TrainingPosition, batch: GlobalBatch) -> None:
        """Begin a step at this position, and send some more of the state. Local. `batch` is the job's first one."""
        if self._share is not None:
            self._turn(position, batch)
        begun, stop = self._posted, max(_LEAST_BYTES, self._total // _NUM_STEPS)
        while not self.is_over and self._num_sent < len(self._pieces) and self._posted - begun < stop:
            piece = self._pieces[self._num_sent]
            state = copied(self._carried.of_piece(piece))
            self._post({"index": piece.index, "run": piece.run, "state": state})
            self._num_sent += 1
            if self._num_sent == len(self._pieces):
                self._post({"is_whole": True})

    def end(self, position: TrainingPosition, batch: GlobalBatch) -> None:
        """End the transfer at this position. Local."""
        if self._share is None:
            self._post({"end": position.step})
        elif position.step > self._turned_at:
            self._turn(position, batch)
        self.leave()

    # ---- to a shadow

    def drain(self) -> None:
        """Wait until the shadow has read all that was posted, for `_DRAIN_S` at most. Local; blocks.

        If ranks have parts of the state, wait for up to `_CONFIRM_S` until it has applied the last step.
        """
        needs_word = self._share is not None and self._carried.is_divided
        if needs_word:
            self._post({"wants_word": True})
        until_s = time.monotonic() + (_CONFIRM_S if needs_word else _DRAIN_S)
        while self._share is not None and not self.is_over and not self._is_behind:
            self._hear()
            is_there = self._confirmed >= self._turned_at if needs_word else self._sent >= self._posted
            if is_there or time.monotonic() > until_s:
                return
            time.sleep(_LOOK_S)

    def _turn(self, position: TrainingPosition, batch: GlobalBatch) -> None:
        """Post what belongs to the end of a step, and hear what the shadow asks for."""
        assert self._share is not None
        if self.is_over or (self._is_behind and self._sent < self._posted):
            return
        is_first = self._begun_at is None
        if self._begun_at is None:
            self._begun_at = position.step
        self._hear()
        asked_for, self._asked_for = self._asked_for, None
        is_anew = self._is_behind or asked_for not in (None, self._begun_at)
        if is_anew or self._turned_at in (-1, self._begun_at):
            self._measure()
        self._is_behind, self._turned_at = False, position.step
        if is_anew:
            self._num_sent = 0
            self._post({"snapshot": True})
        tree: dict[str, Any] = {"turn": position.step}
        if self._share.index == 0:
            tree["rest"] = copied(self._carried.rest_tree(position, batch))
        if not is_first and self._num_sent == len(self._pieces):
            tree["digests"] = self._some_digests()
        self._post(tree)

    def _hear(self) -> None:
        """Take in what the shadow has said until now."""
        words = bytearray(HELD_BYTES)
        with contextlib.suppress(OSError):
            while select.select([self._end], [], [], 0)[0] and _fill(self._end, memoryview(words)):
                said = int.from_bytes(words, "big", signed=True)
                if said <= CONFIRMED:
                    self._confirmed = CONFIRMED - said
                else:
                    self._asked_for = said

    def _some_digests(self) -> list[tuple[int, tuple[int, int] | None, int]]:
        """Return the digests of a few pieces, so that all have their turn in `_DIGEST_STEPS`."""
        found: list[tuple[int, tuple[int, int] | None, int]] = []
        num_bytes = 0
        while len(found) < len(self._compared) and num_bytes < self._total / _DIGEST_STEPS:
            piece = self._compared[self._next_digest % len(self._compared)]
            found.append((piece.index, piece.run, self._carried.digest_of(piece)))
            num_bytes += self._size_of(piece)
            self._next_digest += 1
        return found

    # ---- frames

    def _note_step(self, optimizer: Optimizer, *_: object) -> None:
        stepped = [each for group in optimizer.param_groups for each in group["params"]]
        if all(each.grad is None for each in stepped):
            return  # a step that was given up: another rank may have completed it, and no share of it may look sent
        own = set(map(id, stepped))
        found = [
            (piece, gradient)
            for piece in self._pieces[: self._num_sent]
            if (gradient := self._parameters[piece.index].grad) is not None
            and id(self._parameters[piece.index]) in own
        ]
        if any(gradient.layout is not torch.strided for _, gradient in found):
            self._post({"refused": "sparse gradients are not sent. Leave out sparse=True."})
            self.leave()
        elif (found or self._share is not None) and not self.is_over:
            self._post(
                {
                    "optimizer": self._carried.optimizers.index(optimizer),
                    "settings": [settings_of(group) for group in optimizer.param_groups],
                    "gradients": [
                        (each.index, each.run, self._part(each, gradient)) for each, gradient in found
                    ],
                    "said": {
                        name: each for name in _SAID if (each := getattr(optimizer, name, None)) is not None
                    },
                },
                is_live=True,
            )

    def _part(self, piece: Piece, gradient: Tensor) -> Tensor:
        """Return the gradient of a piece, in the order of the parameter's memory."""
        if piece.run is None:
            return gradient
        like = torch.empty_like(self._parameters[piece.index])
        laid = gradient if gradient.stride() == like.stride() else like.copy_(gradient)
        return memory_of(laid)[piece.run[0] : piece.run[1]]

    def _post(self, tree: Any, is_live: bool = False) -> None:
        """Have the thread send a frame. `is_live`: its tensors are the training's own, and are copied here."""
        if self._is_behind:
            return
        try:
            packed = pack(tree)
        except ConfigurationError:  # nothing that can be sent
            self.leave()
            return
        tensors, begin = packed.tensors, _INLINE
        if is_live and self._memory is not None:
            self._hear()
            found = self._memory.put(tensors, self._turned_at + 1, self._confirmed)
            tensors, begin = (tensors, _INLINE) if found is None else ([], found)
        num_bytes = len(packed.words) + sum(map(_size, tensors))
        if self._posted + num_bytes - self._sent <= _MOST_STATES * self._total + _LEAST_BYTES:
            self._posted += num_bytes
            copies = [each.clone() for each in tensors] if is_live else tensors
            sent = [t if t.is_cpu else AsyncValue(t) for t in copies]
            self._frames.put((packed.words, sent, begin, num_bytes))
        elif self._share is None:
            self.leave()
        else:
            self._is_behind = True

    def leave(self) -> None:
        """Give up, or end: what was posted is sent. Local."""
        self.is_over = True
        self._frames.put(None)
        for hook in self._hooks:
            hook.remove()

    def _send(self) -> None:
        with self._end, contextlib.suppress(OSError):
            while (frame := self._frames.get()) is not None:
                words, tensors, begin, num_bytes = frame
                read = (each.read() if isinstance(each, AsyncValue) else each for each in tensors)
                _send_frame(self._end, words, read, begin)
                self._sent += num_bytes
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
                if (tree := read_frame(end, carried.device)) is None:
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
        run = tree["run"]
        carried.put_piece(Piece(tree["index"], run and tuple(run)), tree["state"])
    elif "gradients" in tree:
        optimizer = carried.optimizers[tree["optimizer"]]
        for group, settings in zip(optimizer.param_groups, tree["settings"], strict=True):
            group.update(settings)
        for index, run, gradient in tree["gradients"]:
            parameter = carried.parameters[index]
            if run is None:
                parameter.grad = laid_out_as(parameter, gradient)
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            memory_of(parameter.grad)[run[0] : run[1]] = gradient
        for name, value in tree["said"].items():
            setattr(optimizer, name, value)
        optimizer.step()
        for name in tree["said"]:
            delattr(optimizer, name)
        for index, *_ in tree["gradients"]:
            carried.parameters[index].grad = None


def send_frame(end: socket.socket, packed: PackedState) -> None:
    """Send a frame. Blocks; raises OSError if the receiver is gone."""
    _send_frame(end, packed.words, packed.tensors)


def _send_frame(end: socket.socket, words: bytes, tensors: Iterable[Tensor], begin: int = _INLINE) -> None:
    end.sendall(_HEADER.pack(len(words), begin) + words)
    for each in tensors:
        end.sendall(bytes_of(each).data)


def state_of_shadow(end: socket.socket, limit_s: float) -> tuple[int, dict[str, Any] | None]:
    """Return the step that the shadow at this end holds, or -1, and its whole state. Before a giver begins; blocks."""
    held = bytearray(HELD_BYTES)
    end.settimeout(limit_s)
    try:
        step = int.from_bytes(held, "big", signed=True) if _fill(end, memoryview(held)) else _NO_STEP
        if step == _NO_STEP:
            return _NO_STEP, None
        send_frame(end, pack({"wants_state": True}))
        return step, read_frame(end)
    except OSError:
        return _NO_STEP, None
    finally:
        end.settimeout(None)


def read_frame(end: socket.socket, device: torch.device = HOST) -> Any:
    """Return the next frame, its tensors where they were on the giver; None if the giver has ended. Blocks."""
    return FrameReader(end, device).read()


class FrameReader:
    """Reads frames of a giver, which may share memory with this process."""

    def __init__(self, end: socket.socket, device: torch.device = HOST) -> None:
        self._end, self._device = end, device
        self._memory: SharedMemory | None = None

    def read(self) -> Any:
        """Return the next frame, its tensors where they were on the giver; None if the giver has ended. Blocks."""
        first, descriptors, *_ = socket.recv_fds(self._end, _HEADER.size, 1)
        for each in descriptors:
            with os.fdopen(each, "r+b"):
                self._memory = SharedMemory(each)
        header = bytearray(first.ljust(_HEADER.size))
        if not first or not _fill(self._end, memoryview(header)[len(first) :]):
            return None
        num_words, begin = _HEADER.unpack(header)
        words = bytearray(num_words)
        if not _fill(self._end, memoryview(words)):
            return None
        tensors = empty_tensors(bytes(words))
        if begin != _INLINE:
            if self._memory is None:
                raise ProtocolError("another rank has gradients in memory that it does not share.")
            tensors = self._memory.at(begin, tensors)
        elif not all(_fill(self._end, bytes_of(each).data) for each in tensors):
            return None
        return unpack(PackedState(bytes(words), tensors), self._device)


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


def _gradient_bytes(parameter: Tensor, piece: Piece) -> int:
    count = parameter.numel() if piece.run is None else piece.run[1] - piece.run[0]
    return count * parameter.element_size()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
