"""The ranks of one fit: all-gather, all-reduce and broadcast of arrays, with errors that name the rank that was lost.

Rules
1. Every method is a collective: every rank calls the same ones in the same order.
2. A failure is a `PeerLostError` on every rank that still runs, within the group's timeout.
3. A communicator of one rank communicates nothing and needs no process group.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numba
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm.collectives import Work, all_gather, all_reduce, backend_of, broadcast
from paceline.comm.gradient_group import group_beside
from paceline.comm.peers import Peers, next_name

_FEW_BYTES, _FACTS_BYTES = 4096, 16384  # of a first message


class Communicator(Protocol):
    """The ranks of one fit, and the collectives that a fit uses.

    Attributes:
        rank: This process's number.
        num_ranks: How many there are.
        num_collectives: Collectives so far.
        num_bytes: Bytes this rank has handed to them so far.
        rounds_alike: Whether the same computation gives the same bits on every rank: same processor, same libraries,
            same number of threads. Known once ranks were introduced, as is the next.
        num_threads: What torch may use in all ranks of rank 0's host.
    """

    rank: int
    num_ranks: int
    num_collectives: int
    num_bytes: int
    rounds_alike: bool
    num_threads: int

    def introduce(self, mine: Any, doing: str) -> list[Any]:
        """Gather as `gather_objects` does; ranks also get to know each other's processors and threads."""

    def gather(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        """All-gather: every rank's array, all of one shape, shape (num_ranks, *shape)."""

    def gather_uneven(self, mine: NDArray[Any], doing: str, room: int | None = None) -> list[NDArray[Any]]:
        """All-gather of arrays of one dimension, of any lengths.

        Args:
            mine: This rank's.
            doing: For errors.
            room: For how many numbers; where no rank has more, it is one collective instead of two. None: for a few.
        """

    def gather_objects(self, mine: Any, doing: str, room: int | None = None) -> list[Any]:
        """All-gather of small objects that JSON can hold; room for so many bytes, as in `gather_uneven`."""

    def total(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        """All-reduce: the sum over all ranks. `mine` may be written over."""

    def broadcast(self, array: NDArray[Any], doing: str) -> NDArray[Any]:
        """Rank 0's array, on every rank."""


class GroupCommunicator:
    """The ranks of a process group; through shared memory where they are on one host.

    Args:
        group: None for torch's default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        self._group = group_beside(group)
        self.rank = group.rank()
        self.num_ranks = group.size()
        self.num_collectives = 0
        self.num_bytes = 0
        self.rounds_alike = False
        self.num_threads = torch.get_num_threads()
        self._device = torch.device("cuda" if backend_of(group) == "nccl" else "cpu")
        self._peers = Peers(
            group,
            f"svm/{next_name(group, is_collective=True)}",
            in_slices=self._device.type == "cpu",  # elsewhere `wait` does not block the host
            first_act="calling fit",
            consequence="The model was not fitted. Look at the output of the rank named here first, then start all "
            "ranks again.",
        )

    def introduce(self, mine: Any, doing: str) -> list[Any]:
        me = _what_rounds(), platform.node(), torch.get_num_threads()
        told, rounding, hosts, threads = zip(
            *self.gather_objects([mine, *me], doing, _FACTS_BYTES), strict=True
        )
        self.rounds_alike = len(set(rounding)) == 1
        self.num_threads = sum(num for host, num in zip(hosts, threads, strict=True) if host == hosts[0])
        return list(told)

    def gather(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        row = self._to_device(mine)
        rows = torch.empty((self.num_ranks, *row.shape), dtype=row.dtype, device=row.device)
        self._do(lambda: all_gather(list(rows.unbind(0)), row, self._group, at_once=True), row, doing)
        return rows.cpu().numpy()

    def gather_uneven(self, mine: NDArray[Any], doing: str, room: int | None = None) -> list[NDArray[Any]]:
        # The first message holds the length, and the array too if there is room: then there is no second one.
        room = _FEW_BYTES // mine.itemsize if room is None else room
        message = np.zeros(8 + room * mine.itemsize, np.uint8)
        message[:8] = np.array([len(mine)], np.int64).view(np.uint8)
        if len(mine) <= room:
            message[8 : 8 + mine.nbytes] = np.ascontiguousarray(mine).view(np.uint8)
        messages = self.gather(message, doing)
        lengths = np.ascontiguousarray(messages[:, :8]).view(np.int64).ravel()
        if lengths.max() <= room:
            gathered = np.ascontiguousarray(messages[:, 8:]).view(mine.dtype)
        else:
            padded = np.zeros(int(lengths.max()), mine.dtype)
            padded[: len(mine)] = mine
            gathered = self.gather(padded, doing)
        return [row[:length] for row, length in zip(gathered, lengths, strict=True)]

    def gather_objects(self, mine: Any, doing: str, room: int | None = None) -> list[Any]:
        texts = self.gather_uneven(np.frombuffer(json.dumps(mine).encode(), np.uint8), doing, room)
        return [json.loads(text.tobytes()) for text in texts]

    def total(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        tensor = self._to_device(mine)
        self._do(lambda: all_reduce(tensor, self._group, at_once=True), tensor, doing)
        return tensor.cpu().numpy()

    def broadcast(self, array: NDArray[Any], doing: str) -> NDArray[Any]:
        tensor = self._to_device(array)
        self._do(lambda: broadcast(tensor, self._group, 0, at_once=True), tensor, doing)
        return tensor.cpu().numpy()

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(self._device)

    def _do(self, launch: Callable[[], Work], tensor: Tensor, doing: str) -> None:
        self.num_collectives += 1
        self.num_bytes += tensor.numel() * tensor.element_size()
        if tensor.numel() == 0:
            return
        try:
            pending = launch()
        except RuntimeError as error:
            self._peers.fail(error, doing)
        self._peers.wait(pending, doing)


@functools.cache
def _what_rounds() -> str:
    """Return a digest of what decides how this process rounds sums: processor, libraries and their threads."""
    cpu = (
        Path("/proc/cpuinfo").read_text(errors="replace")
        if Path("/proc/cpuinfo").exists()
        else platform.processor()
    )
    model = [line for line in cpu.splitlines() if line.startswith(("model name", "flags", "Features"))][:2]
    threads = [
        os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    ]
    words = [platform.machine(), *model, np.__version__, numba.__version__, *threads, str(os.cpu_count())]
    return hashlib.blake2b(json.dumps(words).encode(), digest_size=16).hexdigest()


class Alone:
    """A communicator of one process: collectives return what they are given."""

    def __init__(self) -> None:
        self.rank = 0
        self.num_ranks = 1
        self.num_collectives = 0
        self.num_bytes = 0
        self.rounds_alike = True
        self.num_threads = torch.get_num_threads()

    def introduce(self, mine: Any, doing: str) -> list[Any]:
        return [mine]

    def gather(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        return mine[None]

    def gather_uneven(self, mine: NDArray[Any], doing: str, room: int | None = None) -> list[NDArray[Any]]:
        return [mine]

    def gather_objects(self, mine: Any, doing: str, room: int | None = None) -> list[Any]:
        return [mine]

    def total(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        return mine

    def broadcast(self, array: NDArray[Any], doing: str) -> NDArray[Any]:
        return array
