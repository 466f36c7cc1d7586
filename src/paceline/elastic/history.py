"""Records of membership changes: the ranks lost and joined since this rank trained last, the reason, the stall.

Memberships may have ended before this rank trained in them. So the agent's word for the last one is not enough.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.ddp.membership import Change
from paceline.elastic.agent_connection import RankAssignment


class ChangeRecorder:
    """The recorder of changes between memberships in which this rank trained; `samples` are each rank's at first."""

    def __init__(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._members: Sequence[str] = ()  # of the last membership in which this rank trained
        self._whys: list[str] = []
        self._since_s: float | None = None

    def begin(self, since_s: float) -> None:
        """This rank trains no more, since then; what is said later of the same standstill changes nothing."""
        self._since_s = self._since_s or since_s

    def pass_through(self, seat: RankAssignment) -> None:
        """This rank is to go on there; it may be over before that."""
        self._whys.append(seat.why)

    def end(self, seat: RankAssignment, samples: Sequence[int], step: int) -> Change | None:
        """This rank trains there from now on, `samples` of each rank; None: training begins there, for all."""
        before, had = self._members, self._samples
        lost, num_new = seat.lost, seat.num_new
        if before:
            lost = tuple(rank for rank, member in enumerate(before) if member not in seat.members)
            num_new = sum(member not in before for member in seat.members)
        why = "; ".join(dict.fromkeys(self._whys))
        stalled_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        self._members, self._samples, self._whys, self._since_s = seat.members, samples, [], None
        if seat.num_new == seat.size:
            return None
        # Who comes in may take just what others have left: that has moved once.
        moved = max(sum(had[rank] for rank in lost if rank < len(had)), sum(samples[seat.size - num_new :]))
        return Change(step, lost, num_new, seat.size, why, stalled_s, moved)
