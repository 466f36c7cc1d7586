"""Table of the sides that perform an all-reduce, and how sides and sizes are typed.

A side is opened once on every rank and is then handed flat float32 buffers. To add one, add a line: a name, which
program starts its ranks, and what opens it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigurationError
from paceline_lab.bench.protocol import require
from paceline_lab.emulation.quantities import size

FLOAT_BYTES = 4
Buffer = npt.NDArray[np.float32]


class Exchange(ABC):
    """The interface of a side that the measurement calls. Every method is collective.

    Attributes:
        rank: This process's number.
        num_ranks: Number of ranks.
    """

    rank: int
    num_ranks: int

    def make_buffer(self, num_elements: int) -> Buffer:
        """Return zeros, where this side likes to have them."""
        return np.zeros(num_elements, dtype=np.float32)

    @abstractmethod
    def all_reduce(self, buffer: Buffer) -> None:
        """Replace `buffer` by the sum over all ranks."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank."""


class GroupExchange(Exchange):
    """torch's default process group, or another one of the same ranks."""

    def __init__(self, backend: str | None = None) -> None:
        import torch.distributed as dist  # noqa: PLC0415  # ranks of MPI need no torch

        self._dist: Any = dist
        self._group = None if backend is None else dist.new_group(backend=backend)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def all_reduce(self, buffer: Buffer) -> None:
        import torch  # noqa: PLC0415

        self._dist.all_reduce(torch.from_numpy(buffer), group=self._group)

    def barrier(self) -> None:
        self._dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        self._dist.all_gather_object(values, value)
        return values


class ResidentExchange(GroupExchange):
    """A Paceline group whose buffers lie in shared memory, as those of its DistributedDataParallel do."""

    def make_buffer(self, num_elements: int) -> Buffer:
        import torch  # noqa: PLC0415

        group: Any = self._group
        tensor = group.allocate_tensor(num_elements, dtype=torch.float32, device=torch.device("cpu"))
        buffer: Buffer = tensor.numpy()
        return buffer

    def use(self, schedule: str) -> ResidentExchange:
        """Take this schedule whatever it costs."""
        group: Any = self._group
        group.use_schedule(schedule)
        return self

    def explain(self, size_bytes: int) -> str:
        """Say which algorithm a message of this size takes, and why. Collective."""
        group: Any = self._group
        return str(group.explain(size_bytes))


class MpiExchange(Exchange):
    """mpi4py under mpirun."""

    def __init__(self) -> None:
        from mpi4py import MPI  # noqa: PLC0415

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.num_ranks = self._world.Get_rank(), self._world.Get_size()

    def all_reduce(self, buffer: Buffer) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, buffer, op=self._mpi.SUM)

    def barrier(self) -> None:
        self._world.Barrier()

    def gather(self, value: Any) -> list[Any]:
        return list(self._world.allgather(value))


@dataclass(frozen=True)
class ReduceSide:
    """One line of the table.

    Attributes:
        starter: "torchrun": shares processes with all such sides, turn by turn; "mpirun": launches of its own.
        open: Called once on every rank.
        package: Package that has to be installed.
        note: Note that a reader of its figures needs.
    """

    starter: str
    open: Callable[[], Exchange]
    package: str = "torch"
    note: str = ""


_POLLS = (
    "Open MPI's ranks poll while they wait: on few cores that takes them from others, or yields at every look"
)
REDUCE_SIDES: dict[str, ReduceSide] = {
    "gloo": ReduceSide("torchrun", GroupExchange),
    "paceline": ReduceSide(
        "torchrun",
        lambda: ResidentExchange("paceline"),
        note="paceline: buffers in memory that the ranks of a host share, as those of Paceline's wrapper",
    ),
    "paceline-copied": ReduceSide(
        "torchrun",
        lambda: GroupExchange("paceline"),
        note="paceline-copied: buffers in ordinary memory, copied in and out",
    ),
    **{
        f"paceline-{name}": ReduceSide(
            "torchrun",
            functools.partial(lambda schedule: ResidentExchange("paceline").use(schedule), name),
            note=f"paceline-{name}: between hosts always by {name}",
        )
        for name in ("ring", "halving_doubling", "recursive_doubling", "circulant")
    },
    "mpi4py": ReduceSide(
        "mpirun", MpiExchange, "mpi4py", f"mpi4py: {_POLLS}; within a host it uses shared memory"
    ),
    "mpi4py-tcp": ReduceSide(
        "mpirun", MpiExchange, "mpi4py", "mpi4py-tcp: as mpi4py, over TCP within a host too"
    ),
}


def parse_reduce_sides(text: str) -> tuple[str, ...]:
    """Turn "gloo,mpi4py" into names that can be measured here.

    Raises:
        ConfigurationError: A name is not in the table, is there twice, or its package is not installed.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in REDUCE_SIDES]
    if unknown or not names or len(set(names)) < len(names):
        raise ConfigurationError(
            f"--vs {text!r}: {'no side is called ' + ', '.join(unknown) if unknown else 'name each side once'}. "
            f"There are: {', '.join(REDUCE_SIDES)}."
        )
    for name in names:
        require(REDUCE_SIDES[name].package)
    return names


_LARGEST_BYTES = 2**40


def parse_sizes(text: str) -> tuple[int, ...]:
    """Turn "64KiB,1MiB" into bytes, each at least one float32.

    Raises:
        ConfigurationError: A size has no unit, is no number, or is too small.
    """
    sizes = tuple(size(word, "--sizes") for word in text.split(",") if word.strip())
    large = [num_bytes for num_bytes in sizes if num_bytes > _LARGEST_BYTES]
    if large:
        raise ConfigurationError(f"--sizes {text!r} holds {large[0]:,} bytes. Pass at most 1 TiB.")
    small = [num_bytes for num_bytes in sizes if num_bytes < FLOAT_BYTES or num_bytes % FLOAT_BYTES]
    if small or not sizes:
        raise ConfigurationError(
            f"--sizes {text!r} holds {small or 'nothing'}; a message is made of float32 numbers, so its bytes are a "
            "multiple of 4. Pass sizes such as 64KiB,1MiB,25MiB."
        )
    return sizes
