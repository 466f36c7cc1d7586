"""The ranks of one fit: all-gather, all-reduce and broadcast of arrays, with errors that name the rank that was lost.

Rules
1. Every method is a collective: every rank calls the same ones in the same order.
2. A failure is a `PeerLostError` on every rank that still runs, within the group's timeout.
3. A world of one rank communicates nothing and needs no process group.
"""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numba
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm.collectives import backend_of, launch_broadcast, launch_gather, launch_sum
from paceline.comm.gradient_group import group_beside
from paceline.comm.peers import Peers, next_name
from paceline.comm.pending import Pending

_FEW_BYTES = 4096
_rounding_alike: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


class World(Protocol):
    """The ranks of one fit, and the collectives that a fit uses.

    Attributes:
        rank: This process's number.
        num_ranks: How many there are.
        num_collectives: Collectives so far.
        num_bytes: Bytes this rank has handed to them so far.
        rounds_alike: Whether the same computation gives the same bits on every rank: same processor, same libraries,
            same number of threads.
    """

    rank: int
    num_ranks: int
    num_collectives: int
    num_bytes: int

    @property
    def rounds_alike(self) -> bool: ...

    def gather(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        """All-gather: every rank's array, all of one shape, shape (num_ranks, *shape)."""

    def gather_uneven(self, mine: NDArray[Any], doing: str) -> list[NDArray[Any]]:
        """All-gather of arrays of one dimension, of any lengths."""

    def gather_objects(self, mine: Any, doing: str) -> list[Any]:
        """All-gather of small objects that JSON can hold."""

    def total(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        """All-reduce: the sum over all ranks. `mine` may be written over."""

    def broadcast(self, array: NDArray[Any], doing: str) -> NDArray[Any]:
        """Rank 0's array, on every rank."""


class GroupWorld:
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
        self._device = torch.device("cuda" if backend_of(group) == "nccl" else "cpu")
        self._peers = Peers(
            group,
            f"svm/{next_name(group, is_collective=True)}",
            in_slices=self._device.type == "cpu",  # elsewhere `wait` does not block the host
            first_act="calling fit",
            consequence="The model was not fitted. Look at the output of the rank named here first, then start all "
            "ranks again.",
        )

    @property
    def rounds_alike(self) -> bool:
        if self._group not in _rounding_alike:
            everyone = self.gather_objects(_what_rounds(), "comparing processors")
            _rounding_alike[self._group] = all(other == everyone[0] for other in everyone)
        return _rounding_alike[self._group]

    def gather(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        row = self._to_device(mine)
        rows = torch.empty((self.num_ranks, *row.shape), dtype=row.dtype, device=row.device)
        self._do(lambda: launch_gather(list(rows.unbind(0)), row, self._group, at_once=True), row, doing)
        return rows.cpu().numpy()

    def gather_uneven(self, mine: NDArray[Any], doing: str) -> list[NDArray[Any]]:
        # The first message holds the length, and the array too if it is small: then there is no second one.
        few = _FEW_BYTES // mine.itemsize
        message = np.zeros(8 + few * mine.itemsize, np.uint8)
        message[:8] = np.array([len(mine)], np.int64).view(np.uint8)
        if len(mine) <= few:
            message[8 : 8 + mine.nbytes] = np.ascontiguousarray(mine).view(np.uint8)
        messages = self.gather(message, doing)
        lengths = np.ascontiguousarray(messages[:, :8]).view(np.int64).ravel()
        if lengths.max() <= few:
            gathered = np.ascontiguousarray(messages[:, 8:]).view(mine.dtype)
        else:
            padded = np.zeros(int(lengths.max()), mine.dtype)
            padded[: len(mine)] = mine
            gathered = self.gather(padded, doing)
        return [row[:length] for row, length in zip(gathered, lengths, strict=True)]

    def gather_objects(self, mine: Any, doing: str) -> list[Any]:
        texts = self.gather_uneven(np.frombuffer(json.dumps(mine).encode(), np.uint8), doing)
        return [json.loads(text.tobytes()) for text in texts]

    def total(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        tensor = self._to_device(mine)
        self._do(lambda: launch_sum(tensor, self._group, at_once=True), tensor, doing)
        return tensor.cpu().numpy()

    def broadcast(self, array: NDArray[Any], doing: str) -> NDArray[Any]:
        tensor = self._to_device(array)
        self._do(lambda: launch_broadcast(tensor, self._group, 0, at_once=True), tensor, doing)
        return tensor.cpu().numpy()

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(self._device)

    def _do(self, launch: Callable[[], Pending], tensor: Tensor, doing: str) -> None:
        self.num_collectives += 1
        self.num_bytes += tensor.numel() * tensor.element_size()
        if tensor.numel() == 0:
            return
        try:
            pending = launch()
        except RuntimeError as error:
            raise self._peers.lost(error, doing) from error
        self._peers.wait(pending, doing)


@functools.cache
def _what_rounds() -> list[str]:
    """What decides how this process rounds floating-point sums: processor, libraries and their threads."""
    cpu = (
        Path("/proc/cpuinfo").read_text(errors="replace")
        if Path("/proc/cpuinfo").exists()
        else platform.processor()
    )
    model = [line for line in cpu.splitlines() if line.startswith(("model name", "flags", "Features"))][:2]
    threads = [
        os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    ]
    return [platform.machine(), *model, np.__version__, numba.__version__, *threads, str(os.cpu_count())]


class Alone:
    """A world of one process: collectives return what they are given."""

    def __init__(self) -> None:
        self.rank = 0
        self.num_ranks = 1
        self.num_collectives = 0
        self.num_bytes = 0
        self.rounds_alike = True

    def gather(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        return mine[None]

    def gather_uneven(self, mine: NDArray[Any], doing: str) -> list[NDArray[Any]]:
        return [mine]

    def gather_objects(self, mine: Any, doing: str) -> list[Any]:
        return [mine]

    def total(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        return mine

    def broadcast(self, array: NDArray[Any], doing: str) -> NDArray[Any]:
        return array
