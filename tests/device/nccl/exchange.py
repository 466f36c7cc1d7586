"""Ranks' parts of a collective, in files of shared memory: no socket and no time limit ends a wait for them.

A step of a communicator is one collective. Each rank puts its contribution, and takes what it needs of the others.

What holds when a peer is gone, as in NCCL 2.30.7 (`src/device/primitives.h`, `prims_simple.h`, `init.cc`)
1. A wait for a dead peer never ends by itself: neither its death, nor a closed socket, nor a time limit ends it.
2. An abort on this rank ends the wait. The operation runs to its end with old bytes in the place of what is missing,
   and raises nothing.
3. An aborted operation still posts its steps: a peer that has not aborted takes the old bytes for data, and ends well.
4. The operations behind it run as if nothing had happened, until they wait in vain themselves.
"""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from device.nccl.faults import is_broken

FOLDER = "LATE_FOLDER"
"""Environment variable: the folder for the parts; a test whose ranks are killed gives one of its own."""
GARBAGE = "LATE_GARBAGE"
"""Environment variable: "wild" for bytes that are huge as numbers, instead of old ones."""
_WILD = 0x7F
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.004


class AbortedError(RuntimeError):
    """The group was aborted, or has failed before."""


@functools.cache
def _root() -> Path:
    given = os.environ.get(FOLDER)
    if given:
        return Path(given)
    root = Path("/dev/shm") / f"late-{os.getpid()}-{secrets.token_hex(4)}"
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def meet(store: Any) -> Path:
    """Return the folder of a communicator, the same on every rank. Asks the store, once."""
    own = str(_root() / secrets.token_hex(8))
    client = store.clone()  # of its own: a client that waits lets nothing else ask
    folder = Path(client.compare_set("folder", "", own).decode())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Pause:
    """A sleep that grows: short while something may come at once, longer while nothing comes."""

    def __init__(self, longest_s: float = _LONGEST_PAUSE_S) -> None:
        self._next_s, self._longest_s = _FIRST_PAUSE_S, longest_s

    def sleep(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(1.3 * self._next_s, self._longest_s)


class Exchange:
    """One rank's end of a communicator.

    Args:
        folder: Of the communicator alone.
        rank: This one.
        size: How many.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder = folder
        self.rank = rank
        self.size = size
        self._num_sent = self._num_received = 0
        self.aborted = False
        self._old: dict[Any, Tensor] = {}  # what a slot held last

    def _file(self, step: int | str, name: str) -> Path:
        return self._folder / f"{step}-{name}".replace("/", "_")

    def _write(self, path: Path, data: bytes) -> None:
        part = path.with_name(f"{path.name}.{self.rank}.part")
        part.write_bytes(data)
        part.rename(path)

    def begin(self, step: int) -> None:
        """Tell the others' devices that this one has come to a step (`Communicator._watch`)."""
        self._write(self._file(step, "begun"), b"")

    def has_begun(self, step: int) -> bool:
        """Return whether any rank's device has come to a step."""
        return self._file(step, "begun").exists()

    def put(self, step: int | str, name: str, tensor: Tensor) -> None:
        """Contribute a tensor under a name that others take."""
        shape = f"{str(tensor.dtype).removeprefix('torch.')} {tensor.numel()}\n".encode()
        self._write(self._file(step, name), shape + _bytes_of(tensor))

    def take(self, step: int | str, name: str, like: Tensor) -> Tensor:
        """Return what another rank put under a name; waits for it, or until this rank aborts: old bytes then.

        Args:
            step: Which collective.
            name: Under which it was put.
            like: A tensor of the dtype and number of elements that is expected.

        Raises:
            RuntimeError: The ranks are in different collectives.
        """
        path, slot = self._file(step, name), (name, like.dtype, like.numel())
        if not self._wait(path):
            old = self._old.get(slot)
            garbage = torch.zeros(like.numel(), dtype=like.dtype) if old is None else old.clone()
            if os.environ.get(GARBAGE) == "wild":
                garbage.view(torch.uint8).fill_(_WILD)
            if not (is_broken("post") or path.exists()):
                self.put(step, name, garbage)
            return garbage.view(like.shape)
        shape, _, data = path.read_bytes().partition(b"\n")
        dtype, numel = shape.decode().split()
        if getattr(torch, dtype) != like.dtype or int(numel) != like.numel():
            raise RuntimeError(
                f"rank {self.rank} expects {like.numel()} elements of {like.dtype} in collective {step} ({name}), and "
                f"was sent {numel} of torch.{dtype}: the ranks are in different collectives"
            )
        flat = torch.frombuffer(bytearray(data), dtype=like.dtype) if data else like.new_empty(0)
        self._old[slot] = flat.clone()
        return flat.view(like.shape)

    def send(self, tensor: Tensor) -> None:
        """Send a message to the other rank of two."""
        self.put("messages", f"{self.rank}/{self._num_sent}", tensor)
        self._num_sent += 1

    def receive(self, like: Tensor) -> Tensor:
        """Return the next message of the other rank of two, as `take` does."""
        name = f"{1 - self.rank}/{self._num_received}"
        message = self.take("messages", name, like)
        self._file("messages", name).unlink(missing_ok=True)
        self._num_received += 1
        return message

    def end(self, step: int | str, names: list[str]) -> None:
        """Say that this rank needs nothing more of a step; the last one to say so removes what was put."""
        ended = [self._file(step, f"ended{rank}") for rank in range(self.size)]
        self._write(ended[self.rank], b"")
        if not self.aborted and all(path.exists() for path in ended):
            for name in names:  # "begun" stays: another rank may look for it only now
                self._file(step, name).unlink(missing_ok=True)

    def _wait(self, path: Path) -> bool:
        """Return whether the part has come; False: this rank has aborted first."""
        pause = Pause()
        while not path.exists():
            if self.aborted:
                return False
            pause.sleep()
        return True


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
