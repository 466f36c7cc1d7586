"""The ranks that wait and those they wait for, by the collectives entered; and what launchers tell each other of it.

Launchers of several machines write into the store where they met. The rules of this board:

1. No launcher writes while all ranks make progress. Each reads one counter a second.
2. A launcher whose ranks wait asks, by that counter. Then each one writes how far its ranks are, and reads the rest.
3. Only a machine's own launcher can see whether a rank does anything. It judges and tells, and others pass that on.
4. What is written is sealed with the job's token (`comm/sealed_store.py`). A store that is gone is not asked again.
5. A store beyond a network that is cut does not answer for minutes. So a thread of its own asks it (`Correspondent`).
   The look at this machine's ranks and the launch's end wait for that thread a moment at most.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch.distributed as dist

from paceline.comm.sealed_store import SealedStore
from paceline.given import parse_json
from paceline.observe.progress import Entered


@dataclass(frozen=True)
class Standstill:
    """Ranks that wait, and the ranks that they wait for."""

    waiting: tuple[Entered, ...]  # the position of each rank that waits
    # ranks that are in no collective while others wait for them; empty: all ranks wait
    missing: tuple[int, ...]
    since_s: float  # when the last of them entered or left a collective
    starting: bool = False  # whether one of them has not entered any collective yet

    @property
    def who(self) -> tuple[object, ...]:
        """Return the ranks and counts of the standstill, without times: equal for two looks at the same one."""
        return self.missing, tuple((each.rank, each.group, each.count) for each in self.waiting)

    @property
    def known_s(self) -> float:
        """Return the time until which the ranks are known to wait; infinite if all are on this machine."""
        return min(each.known_s for each in self.waiting)

    @property
    def differs(self) -> bool:
        """Return whether those that wait are in different collectives."""
        return len({(each.group, each.count, each.what) for each in self.waiting}) > 1


def standstill(entered: Iterable[Entered], num_ranks: int) -> Standstill | None:
    """Return which ranks wait for which; None if no rank waits.

    `num_ranks` is the job's if all ranks are here, so that silent ones count as missing; else 0.
    """
    by_group: dict[bytes, list[Entered]] = {}
    for each in entered:
        by_group.setdefault(each.group, []).append(each)
    here = set(range(num_ranks)) or {each.rank for group in by_group.values() for each in group}
    waiting: dict[int, Entered] = {}
    missing: set[int] = set()
    for group in by_group.values():
        furthest, slowest = (choose(each.count for each in group) for choose in (max, min))
        # Where no rank is seen to wait, some may have launched a collective that others have not.
        inside = [each for each in group if each.waits] or [
            each for each in group if slowest < each.count == furthest
        ]
        waiting |= {each.rank: each for each in inside}
        if inside:
            count_of = {each.rank: each.count for each in group}
            members = set(group[0].ranks) & here or set(count_of)
            is_behind = {rank for rank in members if count_of.get(rank, 0) < max(x.count for x in inside)}
            missing |= is_behind - {each.rank for each in inside}
    if not waiting:
        return None
    missing -= set(waiting)
    last_s = max(
        each.at_s for group in by_group.values() for each in group if each.rank in missing | set(waiting)
    )
    known = {each.rank for group in by_group.values() for each in group}
    return Standstill(
        tuple(waiting[rank] for rank in sorted(waiting)),
        tuple(sorted(missing)),
        last_s,
        bool(missing - known),
    )


class StepLengths:
    """The lengths of the last steps, as the ranks count them."""

    def __init__(self) -> None:
        self._step = -1
        self._since_s = 0.0
        self._lengths_s: deque[float] = deque(maxlen=20)

    def note(self, entered: Iterable[Entered], now_s: float) -> None:
        step = max((each.step for each in entered), default=-1)
        if step > self._step:
            if self._step >= 0:
                self._lengths_s.append((now_s - self._since_s) / (step - self._step))
            self._step, self._since_s = step, now_s

    @property
    def usual_s(self) -> float:
        return median(self._lengths_s) if self._lengths_s else 0.0


_ASKS_S, _READS_S = 2.0, 10.0  # between two questions; how long after one answers are read
_MACHINES, _ASKED, _TOLD = "machines", "asked", "told"
_MOST_MACHINES = 10_000  # whatever a stranger writes
_MOMENT_S = 0.25  # a store that is well answers in milliseconds


class Board:
    """One launcher's view of the store where machines met, of one job. `num_ranks` 0: some may still come."""

    def __init__(self, store: Any, job: str, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        try:
            own = store.clone()  # with a connection of its own: the launcher's may be waiting
        except (AttributeError, RuntimeError):
            own = store
        self._store = dist.PrefixStore(f"paceline hangs {job}", own)
        self._sealed = SealedStore(self._store, "hangs")
        self._number = self._store.add(_MACHINES, 1) - 1
        self._num_asked = self._num_told = 0
        self._asked_s = self._reads_until_s = float("-inf")
        self._seen: dict[int, tuple[bytes, float]] = {}  # each machine's words, and when they came

    def look(self, own: Sequence[Entered], now_s: float, *, asks: bool) -> list[Entered]:
        """Ask and answer, and return how far other machines' ranks are, with pid 0. RuntimeError: the store is gone."""
        asks = asks and now_s - self._asked_s > _ASKS_S
        if asks:
            self._asked_s = now_s
        num_asked = self._store.add(_ASKED, int(asks))
        if num_asked != self._num_asked:
            self._num_asked = num_asked
            self._reads_until_s = now_s + _READS_S
            rows = [
                asdict(replace(each, at_s=now_s - each.at_s)) | {"group": each.group.hex(), "known_s": 0.0}
                for each in own
            ]
            self._sealed.set(f"machine/{self._number}", json.dumps(rows))
        if now_s > self._reads_until_s:
            return []
        others = range(min(self._store.add(_MACHINES, 0), _MOST_MACHINES))
        return [each for number in others if number != self._number for each in self._read(number, now_s)]

    def _read(self, number: int, now_s: float) -> list[Entered]:
        words = self._sealed.get(f"machine/{number}")
        if words is None:
            return []
        if number not in self._seen or self._seen[number][0] != words:
            self._seen[number] = words, now_s
        came_s = self._seen[number][1]
        try:
            return [_entered(row, came_s) for row in parse_json(words)]
        except (ValueError, TypeError, KeyError):
            return []

    def tell(self, lines: Sequence[str]) -> None:
        self._num_told = self._store.add(_TOLD, 1)
        self._sealed.set(f"{_TOLD}/{self._num_told}", json.dumps(list(lines)))

    def heard(self) -> list[str]:
        """Return the lines that another machine has told since the last call."""
        number = self._store.add(_TOLD, 0)
        if number == self._num_told:
            return []
        words = self._sealed.get(f"{_TOLD}/{number}")
        if words is None:
            return []  # it is being written
        self._num_told = number
        return [str(line) for line in parse_json(words) if str(line).isprintable()]


class Correspondent:
    """The only user of a board, on a thread of its own, so that no caller waits for a store that does not answer."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.num_ranks = board.num_ranks  # of all machines; 0: not known
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._others: list[Entered] = []
        self._heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_gone = False
        self._has_answered = threading.Event()
        self._has_answered.set()
        self._thread = threading.Thread(target=self._serve, name="paceline-hang-board", daemon=True)
        self._thread.start()

    def look(self, own: Sequence[Entered], now_s: float, *, asks: bool) -> tuple[list[Entered], list[str]]:
        """Call `Board.look` and `Board.heard`; empty if the store is slow. RuntimeError: the store is gone."""

        def call() -> None:
            self._others = self._board.look(own, now_s, asks=asks)
            for line in self._board.heard():
                self._heard.put(line)
            self._has_answered.set()

        if self._has_answered.is_set():
            self._has_answered.clear()
            self._calls.put(call)
        has_answered = self._has_answered.wait(_MOMENT_S)
        if self._is_gone:
            raise RuntimeError("the store is gone")
        lines = [self._heard.get() for _ in range(self._heard.qsize())]
        return (self._others if has_answered else []), lines

    def tell(self, lines: Sequence[str]) -> None:
        """Call `Board.tell` as soon as the store answers."""
        self._calls.put(lambda: self._board.tell(lines))

    def close(self) -> None:
        """End the thread. A call that the store does not answer is left behind: it ends with this process."""
        self._calls.put(None)
        self._thread.join(_MOMENT_S)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except RuntimeError:  # the store went with its launcher
                self._is_gone = True
                self._has_answered.set()
                return


def _entered(row: dict[str, Any], came_s: float) -> Entered:
    fields = row | {
        "pid": 0,
        "group": bytes.fromhex(row["group"]),
        "ranks": tuple(row["ranks"]),
        "at_s": came_s - float(row["at_s"]),
        "known_s": came_s,
    }
    return Entered(**fields)
