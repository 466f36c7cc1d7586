"""Everybody of a host arrives, or somebody is named.

Rules
1. A meeting is a barrier: who has left it knows that every rank of the host has come.
2. A notice laid down before a meeting can be read by all after it, and until the next but one.
3. Who waits looks every `SLICE_S` whether those it waits for are alive. It raises, and says so on its board, when one
   is gone, when one gave up, and at the time limit. After that the host's ranks never meet again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from paceline.errors import PeerLostError
from paceline.host.processes import GONE, is_stopped, start_time_of, state_of
from paceline.transports.shared_memory.host import Host, Neighbour

SLICE_S = 0.1
PATIENCE_S = 50e-6  # waking a sleeping core costs about as much; not spent where ranks outnumber cores


class Meetings:
    """The barriers of one host's ranks.

    Args:
        host: Whose.
        timeout_s: How long one rank waits for the others, at most.
    """

    def __init__(self, host: Host, timeout_s: float) -> None:
        self._me = host.me
        self._others = [other for other in host.neighbours if other.rank != host.me.rank]
        self._boards = [neighbour.board for neighbour in host.neighbours]
        self._stage = 0
        self._starts = {other.rank: start_time_of(other.pid) for other in self._others}
        self._patience_s = PATIENCE_S if host.num_ranks <= len(os.sched_getaffinity(0)) else 0.0
        self.timeout_s = timeout_s
        self.is_broken = False

    def lay_down(self, words: Sequence[int]) -> None:
        """Leave a notice for the next meeting."""
        self._me.board.write_notice(self._stage + 1, words)

    def notices(self, num_words: int) -> list[list[int]]:
        """Read everybody's notice of the last meeting, in the order of the host's ranks."""
        return [board.read_notice(self._stage, num_words) for board in self._boards]

    def meet(self, doing: Callable[[], str]) -> None:
        """Arrive and wait for all others.

        Args:
            doing: Says, for an error, what this rank is doing.

        Contract:
            Collective over the host's ranks. Blocks: yes, at most `timeout_s`.

        Raises:
            PeerLostError: A rank died, gave up, or did not come in time.
        """
        self._stage += 1
        self._me.board.arrive(self._stage)
        for other in self._others:
            if not other.board.has_arrived(self._stage):
                self._await(other, doing)

    def _await(self, other: Neighbour, doing: Callable[[], str]) -> None:
        start_s = time.monotonic()
        while time.monotonic() - start_s < self._patience_s:
            time.sleep(0)  # lets go of the core, and of the interpreter's lock
            if other.board.has_arrived(self._stage):
                return
        slice_s = min(SLICE_S, self.timeout_s)
        next_look_s = start_s + slice_s
        while not other.board.wait_for(self._stage, slice_s):
            now_s = time.monotonic()
            if now_s < next_look_s:
                continue  # woken for an earlier stage, or by a signal
            next_look_s = now_s + slice_s
            lost = self._lost(other, now_s - start_s)
            if lost is not None and not other.board.has_arrived(self._stage):
                self.give_up(lost[0])
                raise PeerLostError(f"rank {self._me.rank} was {doing()} when rank {lost[0]} {lost[1]}.")

    def _lost(self, other: Neighbour, waited_s: float) -> tuple[int, str] | None:
        """Who is to blame, and for what; None while there is hope."""
        if self.is_broken:
            return self._me.rank, "(this one) was told to give up"
        state = state_of(other.pid)
        if state == GONE or start_time_of(other.pid) != self._starts[other.rank]:
            return other.rank, f"(process {other.pid}) died"
        because_of = other.board.given_up_because_of
        if because_of is not None:
            if because_of == self._me.rank:
                return other.rank, f"(process {other.pid}) had already given up waiting for this one"
            if because_of == other.rank:
                return other.rank, f"(process {other.pid}) gave up after an error of its own; see its output"
            return because_of, f"was lost, as rank {other.rank} found"
        if waited_s >= self.timeout_s:
            word = "is stopped" if is_stopped(state) else "is running but did not come"
            return other.rank, f"(process {other.pid}) {word} for {self.timeout_s:g} s, the time limit"
        return None

    def give_up(self, lost_rank: int) -> None:
        """Tell the others that this rank will not come any more."""
        self.is_broken = True
        self._me.board.give_up(lost_rank)
