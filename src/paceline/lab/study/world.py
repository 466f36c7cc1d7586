"""Process groups of ranks that all live in one process, so that reductions run as they are, on any number of ranks.

Rules
1. The k-th collective of every rank is the same one. It is performed by whichever rank's call comes last, on that
   thread; no call waits, only the works that it returns.
2. Sums are folded in the order of the ranks, so they do not depend on who came last.
3. It has what the reductions ask for: sums, maxima and means, gathers and broadcasts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.lane import LaneWork
from paceline.errors import CollectiveMismatchError


@dataclass
class _Meeting:
    """One collective, and who has come to it so far."""

    name: str
    tensors: dict[int, list[Tensor]] = field(default_factory=dict)
    works: dict[int, LaneWork] = field(default_factory=dict)
    error: Exception | None = None

    def settle(self) -> None:
        """What every rank's work does at the end: tell its rank how it went."""
        if self.error is not None:
            raise self.error


class World:
    """All ranks of one process.

    Args:
        num_ranks: How many.

    Attributes:
        groups: One process group a rank, in order.
    """

    def __init__(self, num_ranks: int) -> None:
        self.groups = [InProcessGroup(self, rank, num_ranks) for rank in range(num_ranks)]
        self._num_joined = [0] * num_ranks
        self._meetings: dict[int, _Meeting] = {}
        self._lock = threading.Lock()

    def join(
        self, rank: int, name: str, tensors: list[Tensor], perform: Callable[[list[list[Tensor]]], None]
    ) -> LaneWork:
        """Take part in a rank's next collective with these tensors. Does not wait.

        Args:
            rank: Whose.
            name: Of the collective, its shape included.
            tensors: Inputs and outputs; undefined until the work is done.
            perform: Does it, given every rank's tensors in the order of the ranks.
        """
        with self._lock:
            number = self._num_joined[rank]
            meeting = self._meetings.setdefault(number, _Meeting(name))
            if meeting.name != name:
                raise CollectiveMismatchError(
                    f"rank {rank} called {name} as collective {number}, another rank {meeting.name}. In-process ranks "
                    "call the same collectives in the same order, as others do."
                )
            self._num_joined[rank] += 1
            meeting.tensors[rank] = tensors
            work = meeting.works[rank] = LaneWork(meeting.settle, tensors, name)
            if len(meeting.works) < len(self.groups):
                return work
            del self._meetings[number]
        try:
            with torch.no_grad():
                perform([meeting.tensors[each] for each in range(len(self.groups))])
        except Exception as error:  # noqa: BLE001  every rank must hear of it, or it waits for ever
            meeting.error = error
        for ended in meeting.works.values():
            ended.perform()
        return work


class InProcessGroup(dist.ProcessGroup):
    """One rank's place in a `World`."""

    def __init__(self, world: World, rank: int, num_ranks: int) -> None:
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
        fold = _FOLDS[_name_of(operation)]

        def perform(of_ranks: list[list[Tensor]]) -> None:
            for rows in zip(*of_ranks, strict=True):
                total = rows[0].clone()
                for row in rows[1:]:
                    fold(total, row)
                if _name_of(operation) == "AVG":
                    total.div_(len(rows))
                _hand_out(total, rows)

        return self._join("all-reduce", tensors, perform)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (rows,), (mine,) = outputs, inputs

        def perform(of_ranks: list[list[Tensor]]) -> None:
            for whose, (source, *_) in enumerate(of_ranks):
                _hand_out(source, [theirs[1 + whose] for theirs in of_ranks])

        return self._join("all-gather", [mine, *rows], perform)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        def perform(of_ranks: list[list[Tensor]]) -> None:
            for rows in zip(*of_ranks, strict=True):
                _hand_out(rows[opts.rootRank], rows)

        return self._join("broadcast", tensors, perform)

    def _join(
        self, what: str, tensors: list[Tensor], perform: Callable[[list[list[Tensor]]], None]
    ) -> dist.Work:
        name = f"{what} of {', '.join(f'{t.numel()} {t.dtype}' for t in tensors[:1])}"
        return self._world.join(self._rank, name, tensors, perform)


def _name_of(operation: Any) -> str:
    return str(getattr(operation, "op", operation)).rsplit(".", maxsplit=1)[-1]


_FOLDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "SUM": Tensor.add_,
    "AVG": Tensor.add_,
    "MAX": lambda total, row: torch.maximum(total, row, out=total),
}


def _hand_out(tensor: Tensor, rows: Sequence[Tensor]) -> None:
    for row in rows:
        if row is not tensor:
            row.copy_(tensor)
