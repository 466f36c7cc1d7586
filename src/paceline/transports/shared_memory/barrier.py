"""A barrier for the ranks of one host, with a timeout, that names the rank that is missing.

Rules
1. A rank that has left a barrier knows that every rank of the host has arrived at it.
2. What a rank announces (`Status.announcements`) before a barrier can be read by all ranks after it, and until the next
   but one.
3. A rank that waits checks every `SLICE_S` whether the others are alive. It raises, and writes so in its status, when
   one is gone, when one gave up, and at the timeout. After that the barrier is broken for good.
4. A rank that gives up wakes the ranks that wait for it, and its own threads that wait for others: they raise at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from paceline.errors import PeerLostError
from paceline.host.processes import GONE, is_stopped, start_time_of, state_of
from paceline.transports.shared_memory import futex
from paceline.transports.shared_memory.neighbours import Host, Neighbour

SLICE_S = 0.1
_NUM_LOOKS = 10  # a microsecond or two
# How long a rank looks before it sleeps; not at all where ranks outnumber cores. A sleeping rank is late for the next
# barrier by what waking takes, 0.1 ms on a virtual machine. With less patience, ranks put each other to sleep for ever.
PATIENCE_S = 250e-6
PATIENCE_BESIDE_COMPUTING_S = 50e-6


class HostBarrier:
    """A barrier that the ranks of one host use again and again.

    A rank waits for the others at one barrier at most `timeout_s`. `is_beside_computing` says whether another thread of
    this rank computes meanwhile, from which looking would take time.
    """

    def __init__(
        self, host: Host, timeout_s: float, is_beside_computing: Callable[[], bool] = lambda: False
    ) -> None:
        self._me = host.me
        self._others = [other for other in host.neighbours if other.rank != host.me.rank]
        self.number = 0  # of the last barrier that this rank has arrived at
        self._starts = {other.rank: start_time_of(other.pid) for other in self._others}
        self._is_beside_computing = is_beside_computing
        self._has_cores = host.num_ranks <= len(os.sched_getaffinity(0))
        self.timeout_s = timeout_s
        self.is_broken = False

    def wait(self, doing: Callable[[], str]) -> None:
        """Wait up to `timeout_s` for all other ranks. Raises PeerLostError, which quotes `doing()`."""
        self.number += 1
        self._me.status.arrive(self.number)
        for other in self._others:
            if not other.status.has_arrived(self.number):
                self._await(other, doing)
        futex.fence()  # what the others wrote before they arrived is read after their arrival has been seen

    def _await(self, other: Neighbour, doing: Callable[[], str]) -> None:
        patience_s = PATIENCE_BESIDE_COMPUTING_S if self._is_beside_computing() else PATIENCE_S
        start_s = time.monotonic()
        while self._has_cores and time.monotonic() - start_s < patience_s:
            for _ in range(_NUM_LOOKS):
                if other.status.has_arrived(self.number):
                    return
            futex.let_threads_run()
        slice_s = min(SLICE_S, self.timeout_s)
        next_check_s = start_s + slice_s
        while not other.status.wait_for(self.number, slice_s):
            now_s = time.monotonic()
            has_given_up = self.is_broken or other.status.given_up_because_of is not None
            if now_s < next_check_s and not has_given_up:
                continue  # woken for an earlier barrier, or by a signal
            next_check_s = now_s + slice_s
            lost = self._lost(other, now_s - start_s)
            if lost is not None and not other.status.has_arrived(self.number):
                self.give_up(lost[0])
                raise PeerLostError(
                    f"rank {self._me.rank} was {doing()} when rank {lost[0]} {lost[1]}.", lost[0]
                )

    def _lost(self, other: Neighbour, waited_s: float) -> tuple[int, str] | None:
        """Return which rank is missing, and why; None as long as it may still arrive."""
        if self.is_broken:
            return self._me.rank, "(this one) was told to give up"
        because_of = other.status.given_up_because_of
        if because_of is not None:  # before looking at its process, which may have ended for that reason
            if because_of == self._me.rank:
                return other.rank, f"(process {other.pid}) had already given up waiting for this one"
            if because_of == other.rank:
                return other.rank, f"(process {other.pid}) gave up after an error of its own; see its output"
            return because_of, f"was lost, as rank {other.rank} found"
        if other.status.has_left:
            return other.rank, f"(process {other.pid}) had left: its program ended, or destroyed the group"
        state = state_of(other.pid)
        if state == GONE or start_time_of(other.pid) != self._starts[other.rank]:
            return other.rank, f"(process {other.pid}) died"
        if waited_s >= self.timeout_s:
            word = "is stopped" if is_stopped(state) else "is running but did not come"
            return other.rank, f"(process {other.pid}) {word} for {self.timeout_s:g} s, the time limit"
        return None

    def give_up(self, lost_rank: int) -> None:
        """Break the barrier: tell the others that this rank will not arrive any more.

        From any thread. One that is just about to wait may miss it, and then looks after `SLICE_S`.
        """
        self.is_broken = True
        self._me.status.give_up(lost_rank)
        for other in self._others:
            other.status.wake()
