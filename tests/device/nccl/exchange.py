"""How the ranks' host memory gets to each other: through the store that the group was opened with.

A step of a communicator is one collective. Each rank puts what it contributes, and takes what it needs of the others.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SLICE = timedelta(seconds=1)  # after which an abort is noticed


class AbortedError(RuntimeError):
    """The group was aborted, or has failed before."""


def copied(store: Any) -> Any:
    """Another client of the same store: one that waits lets nobody else ask."""
    return store.clone()


class Exchange:
    """One rank's end of a communicator.

    Args:
        store: Of the communicator alone.
        rank: This one.
        size: How many.
        timeout: After which a rank that has not put its part is given up.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store: Any = copied(store)  # a client that waits lets nobody else ask
        self.rank = rank
        self.size = size
        self._timeout = timeout
        self._num_sent = self._num_received = 0
        self.aborted = False

    def begin(self, step: int) -> None:
        """Tell the others' devices that this one has come to a step (`Watch`)."""
        self._store.set(f"{step}/begun", b"1")

    def put(self, step: int | str, name: str, tensor: Tensor) -> None:
        """Contribute a tensor under a name that others take."""
        shape = f"{str(tensor.dtype).removeprefix('torch.')} {tensor.numel()}\n".encode()
        self._store.set(f"{step}/{name}", shape + _bytes_of(tensor))

    def take(self, step: int | str, name: str, like: Tensor) -> Tensor:
        """What another rank put under a name; waits for it.

        Args:
            step: Which collective.
            name: Under which it was put.
            like: A tensor of the dtype and number of elements that is expected.

        Raises:
            AbortedError: The group was aborted meanwhile.
            TimeoutError: Nothing was put.
            RuntimeError: The ranks are in different collectives.
        """
        key = f"{step}/{name}"
        self._wait(key)
        shape, _, data = self._store.get(key).partition(b"\n")
        dtype, numel = shape.decode().split()
        if getattr(torch, dtype) != like.dtype or int(numel) != like.numel():
            raise RuntimeError(
                f"rank {self.rank} expects {like.numel()} elements of {like.dtype} in collective {step} ({name}), and "
                f"was sent {numel} of torch.{dtype}: the ranks are in different collectives"
            )
        flat = torch.frombuffer(bytearray(data), dtype=like.dtype) if data else like.new_empty(0)
        return flat.view(like.shape)

    def send(self, tensor: Tensor) -> None:
        """Send a message to the other rank of two."""
        self.put("messages", f"{self.rank}/{self._num_sent}", tensor)
        self._num_sent += 1

    def receive(self, like: Tensor) -> Tensor:
        """Return the next message of the other rank of two, as `take` does."""
        name = f"{1 - self.rank}/{self._num_received}"
        message = self.take("messages", name, like)
        self._store.delete_key(f"messages/{name}")
        self._num_received += 1
        return message

    def end(self, step: int | str, names: list[str], num_ranks: int) -> None:
        """Say that this rank needs nothing more of a step; the last one to say so removes what was put."""
        if self._store.add(f"{step}/ended", 1) == num_ranks:
            for key in (*names, "ended"):  # "begun" stays: another rank may look for it only now
                self._store.delete_key(f"{step}/{key}")

    def _wait(self, key: str) -> None:
        until_s = time.monotonic() + self._timeout.total_seconds()
        while not self.aborted:
            try:
                self._store.wait([key], min(_SLICE, self._timeout))
            except dist.DistStoreError:
                if time.monotonic() < until_s:
                    continue
                raise TimeoutError(
                    f"rank {self.rank} waited {self._timeout.total_seconds():g} s for another rank's part ({key})"
                ) from None
            return
        raise AbortedError(f"rank {self.rank}: the group was aborted")


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
