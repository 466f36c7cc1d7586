"""Ranks that are threads of one process and hand arrays to each other: to test and to count what many ranks do.

What they do is what processes do, turn by turn and byte by byte; how long it takes says nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.svm.world import World

_T = TypeVar("_T")


class InMemoryWorld:
    """One rank's view; see `World`.

    Args:
        rank: This thread's number.
        slots: One a rank, the same list on every rank.
        barrier: For as many threads.
    """

    rounds_alike = True

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.num_ranks = rank, len(slots)
        self.num_collectives = self.num_bytes = 0
        self._slots, self._barrier = slots, barrier

    def gather_uneven(self, mine: NDArray[Any], doing: str) -> list[NDArray[Any]]:
        self.num_collectives += 1
        self.num_bytes += mine.nbytes
        self._slots[self.rank] = mine.copy()
        self._barrier.wait()
        everyone = list(self._slots)
        self._barrier.wait()
        return everyone

    def gather(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        return np.stack(self.gather_uneven(mine, doing))

    def gather_objects(self, mine: Any, doing: str) -> list[Any]:
        return [one.item() for one in self.gather_uneven(_boxed(mine), doing)]

    def total(self, mine: NDArray[Any], doing: str) -> NDArray[Any]:
        return np.asarray(self.gather(mine, doing).sum(axis=0))

    def broadcast(self, array: NDArray[Any], doing: str) -> NDArray[Any]:
        return self.gather_uneven(array, doing)[0]


def _boxed(thing: Any) -> NDArray[Any]:
    box = np.empty((), object)
    box[()] = thing
    return box


def run(num_ranks: int, task: Callable[[World], _T]) -> list[_T]:
    """What `task` returns on every rank. If it raises on one, all stop, and that exception is raised."""
    slots: list[Any] = [None] * num_ranks
    found: list[Any] = [None] * num_ranks
    barrier, errors = threading.Barrier(num_ranks), []

    def one(rank: int) -> None:
        try:
            found[rank] = task(InMemoryWorld(rank, slots, barrier))
        except threading.BrokenBarrierError:
            pass  # another rank's error is the one to tell
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found
