"""Process groups whose ranks all live in one process: any number of them, one after another on a thread, or as threads.

What runs over a process group (reductions, local steps, the SVM) runs over these as it is, for studies and tests.

Rules
1. The k-th collective of every rank is the same one. It is performed by whichever rank's call comes last, on that
   thread; no call waits, only the works that it returns. So one thread can play all ranks, if each launches before
   any waits, and a transport, whose exchanges wait, would be no help.
2. Sums are folded in the order of the ranks, so they do not depend on who came last.
3. It has what its users ask for: sums, maxima and means, gathers and broadcasts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.lane import LaneWork
from paceline.errors import CollectiveMismatchError, ProtocolError
from paceline.process_group.folds import op_name

_T = TypeVar("_T")


@dataclass
class _Collective:
    """One collective, and the ranks that have launched it so far."""

    name: str
    tensors: dict[int, list[Tensor]] = field(default_factory=dict)
    works: dict[int, LaneWork] = field(default_factory=dict)
    error: Exception | None = None

    def end(self) -> None:
        """End every rank's work, with the error if there is one."""
        for work in self.works.values():
            work.perform()

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


class InProcessWorld:
    """All ranks of one process.

    Args:
        num_ranks: Number of ranks.

    Attributes:
        groups: One process group a rank, in order.
    """

    def __init__(self, num_ranks: int) -> None:
        self.groups = [InProcessGroup(self, rank, num_ranks) for rank in range(num_ranks)]
        self._num_joined = [0] * num_ranks
        self._incomplete: dict[int, _Collective] = {}
        self._lock = threading.Lock()
        self._failure: ProtocolError | None = None

    def run(self, task: Callable[[InProcessGroup], _T]) -> list[_T]:
        """Call `task` with every rank's group, each on a thread of its own, and return the results by rank.

        Raises:
            BaseException: Error of the first rank on which `task` raised. The other ranks' collectives raise.
        """
        errors: list[BaseException] = []

        def one(group: InProcessGroup) -> _T:
            try:
                return task(group)
            except BaseException as error:
                errors.append(error)
                self._fail(group.rank(), error)
                raise

        with ThreadPoolExecutor(len(self.groups)) as threads:
            futures = [threads.submit(one, group) for group in self.groups]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def _fail(self, rank: int, error: BaseException) -> None:
        """Fail the collectives that `rank` has not launched, and the later ones."""
        with self._lock:
            if self._failure is None:
                words = f"rank {rank} of this process ended with {type(error).__name__}: {error}"
                self._failure = ProtocolError(words)
            failure = self._failure
            incomplete = list(self._incomplete.values())
            self._incomplete.clear()
        for collective in incomplete:
            collective.error = failure
            collective.end()

    def join(
        self, rank: int, name: str, tensors: list[Tensor], perform: Callable[[list[list[Tensor]]], None]
    ) -> LaneWork:
        """Launch a rank's next collective with these tensors. Does not wait.

        Args:
            rank: Rank that joins.
            name: Name of the collective, its shape included.
            tensors: Inputs and outputs; undefined until the work is done.
            perform: Does it, given every rank's tensors in the order of the ranks.

        Raises:
            CollectiveMismatchError: Another rank launched another collective.
            ProtocolError: A rank of `run` has raised.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            number = self._num_joined[rank]
            collective = self._incomplete.setdefault(number, _Collective(name))
            if collective.name != name:
                raise CollectiveMismatchError(
                    f"rank {rank} called {name} as collective {number}, another rank {collective.name}. In-process "
                    "ranks call the same collectives in the same order, as others do."
                )
            self._num_joined[rank] += 1
            collective.tensors[rank] = tensors
            work = collective.works[rank] = LaneWork(collective.raise_error, tensors, name)
            if len(collective.works) < len(self.groups):
                return work
            del self._incomplete[number]
        try:
            with torch.no_grad():
                perform([collective.tensors[each] for each in range(len(self.groups))])
        except Exception as error:  # noqa: BLE001  raised on every rank, or the others wait for ever
            collective.error = error
        collective.end()
        return work


class InProcessGroup(dist.ProcessGroup):
    """The process group of one rank of an `InProcessWorld`."""

    def __init__(self, world: InProcessWorld, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)  # type: ignore[call-arg]  # as a group in Python is made
        self._world, self._rank, self._num_ranks = world, rank, num_ranks

    def getBackendName(self) -> str:  # noqa: N802
        return "in-process"

    def name(self) -> str:
        return "in-process"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._num_ranks

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        operation = (opts or dist.AllreduceOptions()).reduceOp
        fold = _FOLDS[op_name(operation)]

        def perform(of_ranks: list[list[Tensor]]) -> None:
            for rows in zip(*of_ranks, strict=True):
                total = rows[0].clone()
                for row in rows[1:]:
                    fold(total, row)
                if op_name(operation) == "AVG":
                    total.div_(len(rows))
                _copy_to_all(total, rows)

        return self._join("all-reduce", tensors, perform)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (rows,), (mine,) = outputs, inputs

        def perform(of_ranks: list[list[Tensor]]) -> None:
            for whose, (source, *_) in enumerate(of_ranks):
                _copy_to_all(source, [theirs[1 + whose] for theirs in of_ranks])

        return self._join("all-gather", [mine, *rows], perform)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        def perform(of_ranks: list[list[Tensor]]) -> None:
            for rows in zip(*of_ranks, strict=True):
                _copy_to_all(rows[opts.rootRank], rows)

        return self._join("broadcast", tensors, perform)

    def _join(
        self, what: str, tensors: list[Tensor], perform: Callable[[list[list[Tensor]]], None]
    ) -> dist.Work:
        name = f"{what} of {', '.join(f'{t.numel()} {t.dtype}' for t in tensors[:1])}"
        return self._world.join(self._rank, name, tensors, perform)


_FOLDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "SUM": Tensor.add_,
    "AVG": Tensor.add_,
    "MAX": lambda total, row: torch.maximum(total, row, out=total),
}


def _copy_to_all(tensor: Tensor, rows: Sequence[Tensor]) -> None:
    for row in rows:
        if row is not tensor:
            row.copy_(tensor)
