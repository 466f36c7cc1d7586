"""Watches a launch for ranks that hang: says which rank is missing, where it is, and what the others wait for.

Rules
1. A rank hangs if others wait for it in a collective that it has not entered, and three things hold. No rank involved
   has entered or left a collective for some seconds. The rank does nothing: it neither computes, nor reads, nor writes
   (`host/processes.py`). So an evaluation, a checkpoint or a compilation on one rank is no hang, however long. It is
   mentioned after minutes.
2. A rank that waits is not to blame. Where all ranks wait, in different collectives, all of them are named.
3. The watch reports and ends nothing. If the ranks go on after all, it says so, and waits longer the next time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from paceline.host.processes import GONE, Activity, activity_of, parent_of, state_of
from paceline.host.stacks import Stack, stack_of
from paceline.launch.hang_board import Board, Correspondent, Standstill, StepLengths, standstill
from paceline.launch.watchdog import marked
from paceline.observe import progress
from paceline.observe.progress import Entered

QUIET_S = 5.0
_LOOK_S = 0.5
_WINDOW_S = 3.0  # so long a rank must have done nothing
_START_S = 30.0  # ... that has not entered anything yet: it may be importing
_NETWORK_S = 60.0  # every rank is in the same collective: it may be large
_BUSY_S = 300.0  # a rank that computes while others wait is worth a line after that
_ASK_AFTER_S = 1.0  # ranks here have waited so long: other machines are asked about theirs
_END_S = 10.0  # a look may be under way as the launch ends: py-spy
_STEPS = 2.0  # steps of usual length may be that long
_LAUNCHER = -1  # the launcher waits, and no rank of its machine does
_MOST_SHOWN = 4
_MOST_FRAMES = 12
_NEXT = (
    "Nothing has been ended: the others fail at their group's timeout, or end the launch now (Ctrl-C). "
    "`paceline explain hang` says more."
)


def headline(what: Standstill, quiet_s: float) -> str:
    """Return which ranks are missing, or that ranks are in different collectives."""
    if not what.missing:
        where = "; ".join(f"rank {each.rank} is {_act(each)}" for each in what.waiting[:_MOST_SHOWN])
        return f"hang: the ranks are in different collectives, and each waits for the others: {where}."
    first, *others = what.missing
    who = f"hang: {_names_of(what.missing)} are missing" if others else f"hang: rank {first} is missing"
    waits = waiting(what)
    comma = "," if what.waiting[0].step >= 0 else ""
    return f"{who}. {waits[0].upper()}{waits[1:]}{comma} for {quiet_s:.1f} s."


def headline_of_all(what: Standstill, num_ranks: int, quiet_s: float) -> str:
    """Return the sentence for a hang in which every rank here is in the same collective."""
    who = "every rank" if num_ranks else "every rank of this machine"
    rest = (
        "So the network between them does not carry it"
        if num_ranks
        else "So a rank of another machine is missing, or the network does not carry it"
    )
    return f"hang: {who} is {_act(what.waiting[0])}, and nothing has moved for {quiet_s:.0f} s. {rest}."


def waiting(what: Standstill) -> str:
    """Return which ranks wait, and what for."""
    first = what.waiting[0]
    names = _names_of([each.rank for each in what.waiting])
    return f"{names} {'has' if len(what.waiting) == 1 else 'have'} been {_act(first)}"


def _act(entered: Entered) -> str:
    return f"{entered.what}, step {entered.step}" if entered.step >= 0 else entered.what


def _names_of(ranks: Sequence[int]) -> str:
    if list(ranks) == [_LAUNCHER]:
        return "the launcher"
    shown = [str(rank) for rank in ranks[:_MOST_SHOWN]]
    more = f" and {len(ranks) - _MOST_SHOWN} more" if len(ranks) > _MOST_SHOWN else ""
    words = ", ".join(shown) + more if more or len(shown) < 2 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


def _describe(rank: int, pid: int, stack: Stack) -> list[str]:
    if not stack.frames:
        return [
            f"  rank {rank} (process {pid}) {stack.kernel or 'does nothing'}; its Python stack is unknown: {stack.by}"
        ]
    lines = [
        f"  rank {rank} (process {pid}) {stack.kernel or 'does nothing'}, in, innermost first ({stack.by}):"
    ]
    return lines + [f"    {frame}" for frame in stack.frames[:_MOST_FRAMES]]


def _place(stack: Stack) -> str:
    own = [frame for frame in stack.frames if frame.is_of_user] or list(stack.frames)
    return str(own[0]) if own else "a place that could not be read"


@dataclass
class _Suspicion:
    """A standstill that is being looked at."""

    what: Standstill
    counts: Mapping[tuple[int, bytes], int]  # how far every rank here was, in each group
    pids: Mapping[int, int]  # of the ranks here
    looked_s: float
    before: Mapping[int, Activity]  # what each missing rank had done then
    told_s: float | None = None
    busy_is_told: bool = False

    def went_on(self, entered: Iterable[Entered]) -> bool:
        """Return whether the awaited ranks have entered a collective since. At the launch's end none does."""
        awaited = self.what.missing or tuple(each.rank for each in self.what.waiting)
        return any(
            each.rank in awaited and each.count > self.counts.get((each.rank, each.group), 0)
            for each in entered
        )


class HangWatch:
    """Looks at the ranks of this machine twice a second; a context manager around the launch.

    The ranks write how far they are into `folder`. `num_ranks` is the job's if all are here, 0 otherwise, and may be
    set; nothing may move for `quiet_s` before a rank is called hung.
    """

    def __init__(
        self, folder: Path, launch_id: str, num_ranks: int, quiet_s: float, note: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._launch_id = launch_id
        self.num_ranks = num_ranks
        self._quiet_s = quiet_s
        self._note = note
        self._board: Correspondent | None = None
        self._waits: tuple[Entered, ...] = ()  # as `note_waits` was told
        self._awaited: Mapping[int, int] = {}
        self._suspicion: _Suspicion | None = None
        self._steps = StepLengths()
        self.last_words = ""
        """The hang in which the launch ended, for the launcher's last message; or an empty string."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-hang-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(_END_S)
        if self._board is not None:
            self._board.close()

    def meet(self, store: Any, job: str, num_ranks: int) -> None:
        """Use the store in which the machines have met, in place of an earlier one. Arguments as `Board`'s."""
        before, self._board = self._board, Correspondent(Board(store, job, num_ranks))
        if before is not None:
            before.close()

    def note_waits(self, waiting: Mapping[int, int], missing: Mapping[int, int], what: str) -> None:
        """Take note of ranks here that others wait for outside of collectives, by their numbers and process ids.

        `waiting` is empty if only the launcher waits, `missing` if no rank waits. `what` says in words what is done.
        """
        ranks = tuple(sorted(missing))
        waits = (waiting or {_LAUNCHER: 0}) if missing else {}
        known = {each.rank: each.ranks for each in self._waits}
        if known != dict.fromkeys(waits, ranks):
            now_s, group = time.monotonic(), what.encode()
            self._awaited = missing
            self._waits = tuple(
                Entered(rank, pid, group, ranks, 1, now_s, -1, what, waits=True)
                for rank, pid in waits.items()
            )

    def _watch(self) -> None:
        while not self._ends.wait(_LOOK_S):
            with contextlib.suppress(OSError):  # a file or a process that went meanwhile
                self._look(time.monotonic())

    def _look(self, now_s: float) -> None:
        own = [each for each in progress.read(self._folder) if state_of(each.pid) != GONE] + [*self._waits]
        self._steps.note(own, now_s)
        entered = own if self._board is None else [*own, *self._of_others(self._board, own, now_s)]
        found = standstill(entered, self._num_known)
        known = self._suspicion
        if known is not None and (found is None or self._has_moved(found, known.what)):
            if known.told_s is not None and known.went_on(entered):
                self._tell_that_it_went_on(known, now_s)
            known = self._suspicion = None
        if found is not None and known is None and now_s - found.since_s > _LOOK_S:
            counts = {(each.rank, each.group): each.count for each in entered}
            pids = {**_processes(self._launch_id), **{each.rank: each.pid for each in own}, **self._awaited}
            self._suspicion = _Suspicion(found, counts, pids, now_s, _activities(found, pids))
        elif (
            found is not None
            and known is not None
            and known.told_s is None
            and now_s - known.looked_s >= min(_WINDOW_S, self._quiet_s)
        ):
            self._judge(known, now_s, min(now_s, found.known_s))

    @property
    def _num_known(self) -> int:
        """Return the number of ranks of the job, or 0 if it is not known."""
        return self.num_ranks if self._board is None else self._board.num_ranks

    def _has_moved(self, now: Standstill, before: Standstill) -> bool:
        """Return whether it is another standstill. Times of other machines' ranks are known to a look or two."""
        off_s = 0.0 if self._board is None else 2 * _LOOK_S
        return now.who != before.who or now.since_s > before.since_s + off_s

    def _judge(self, suspicion: _Suspicion, now_s: float, known_s: float) -> None:
        """Tell if it is a hang that no rank involved has moved until `known_s`. Remote ranks may have moved since."""
        what, quiet_s = suspicion.what, known_s - suspicion.what.since_s
        if what.missing and not set(what.missing) & set(suspicion.pids):
            return  # none of them is here: their launcher tells
        if not what.missing and not what.differs:
            if quiet_s > max(_NETWORK_S, self._patience_s()):
                self._tell(suspicion, now_s, headline_of_all(what, self._num_known, quiet_s))
            return
        activities = _activities(what, suspicion.pids)
        elapsed_s = now_s - suspicion.looked_s
        busy = [
            rank
            for rank, now in activities.items()
            if rank in suspicion.before and now.has_done_something(suspicion.before[rank], elapsed_s)
        ]
        if busy:
            suspicion.before, suspicion.looked_s = activities, now_s
            if quiet_s > _BUSY_S and not suspicion.busy_is_told:
                suspicion.busy_is_told = True
                self._note(
                    f"{_names_of(busy)} has been busy for {quiet_s:.0f} s without entering a collective, "
                    f"while {waiting(what)}. That is no hang; if it is no evaluation or checkpoint either, "
                    f"py-spy dump --pid {suspicion.pids[busy[0]]} shows where it is."
                )
        elif quiet_s > max(self._patience_s(), _START_S if what.starting else 0.0):
            self._tell(suspicion, now_s, headline(what, quiet_s))

    def _patience_s(self) -> float:
        return max(self._quiet_s, _STEPS * self._steps.usual_s)

    def _tell(self, suspicion: _Suspicion, now_s: float, headline: str) -> None:
        what, pids = suspicion.what, suspicion.pids
        suspicion.told_s = now_s
        stacks = {
            rank: stack_of(pids[rank], self._folder) for rank in what.missing[:_MOST_SHOWN] if rank in pids
        }
        waits = next((each for each in what.waiting if each.pid), None)
        lines = [headline]
        for rank, stack in stacks.items():
            lines += _describe(rank, pids[rank], stack)
        if waits is not None and (stack := stack_of(waits.pid)).frames:
            lines.append(f"  rank {waits.rank} waits in {_place(stack)}")
        lines.append(_NEXT)
        where = "; ".join(f"rank {rank} was in {_place(stack)}" for rank, stack in stacks.items())
        self.last_words = f" Before that: {headline}" + (f" {where}." if where else "")
        for line in lines:
            self._note(line)
        if self._board is not None:
            self._board.tell(lines)

    def _of_others(self, board: Correspondent, own: Sequence[Entered], now_s: float) -> list[Entered]:
        here = standstill(own, 0)
        try:
            others, lines = board.look(
                own, now_s, asks=here is not None and now_s - here.since_s > _ASK_AFTER_S
            )
        except RuntimeError:  # the store went with its launcher
            if self._board is board:
                self._board = None
            return []
        if lines and here is not None:
            self.last_words = f" Before that: {lines[0]}"
            for line in (f"{lines[0]} That is on another machine.", *lines[1:]):
                self._note(line)
        return others

    def _tell_that_it_went_on(self, suspicion: _Suspicion, now_s: float) -> None:
        stood_s = now_s - suspicion.what.since_s
        self._quiet_s = min(max(self._quiet_s, 2.0 * stood_s), _BUSY_S)
        self.last_words = ""
        who = _names_of(suspicion.what.missing) if suspicion.what.missing else "every rank"
        self._note(
            f"{who} went on after {stood_s:.1f} s; it was no hang. The next one is called one after "
            f"{self._quiet_s:.0f} s (--hang-after)"
        )


def _activities(what: Standstill, pids: Mapping[int, int]) -> dict[int, Activity]:
    return {rank: activity_of(pids[rank]) for rank in what.missing if rank in pids}


def _processes(launch_id: str) -> dict[int, int]:
    """Return the process of each rank here: the one with its RANK whose parent has another."""
    rank_of: dict[int, int] = {}
    for pid in marked(launch_id):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank_of[pid] = int(next(word[5:] for word in environment if word.startswith(b"RANK=")))
    return {rank: pid for pid, rank in rank_of.items() if rank_of.get(parent_of(pid)) != rank}
