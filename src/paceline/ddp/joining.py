"""Uneven inputs: what ranks tell each other within `join` (torch's), before each step; see `Shadow`, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import Join

from paceline.comm.collectives import all_reduce, all_reduce_max, device_for_metadata
from paceline.ddp.membership import Membership


@dataclass(frozen=True)
class NextStep:
    """What the ranks that still have inputs are about to do."""

    synchronizes: bool  # whether any of them runs a backward that synchronizes, next
    # Whether they exchange weights: now, for a window of micro-batches, of which one backward synchronizes; or, if
    # `synchronizes` too, when the backward of a step's one batch begins.
    opens_window: bool
    divisor: int | None = None  # by how many ranks its sums are divided; None: by all


class Joining:
    """What a rank knows of `join`, and what ranks tell each other there."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.divides_by_all = True  # the mean is over all ranks, also those without batches
        self.was_used = False  # whether the module was ever within `join`
        self.authoritative_rank = 0  # whose model was the final one

    @staticmethod
    def is_enabled(wrapped: Any) -> bool:
        """Whether the module is within `join` now; torch's `Join` says so to its joinable."""
        return bool(wrapped._join_config.enable)

    def begin(self, divides_by_all: bool) -> None:
        """The module is within `join` from now on. Local."""
        self.divides_by_all, self.was_used = divides_by_all, True

    def begin_again(self) -> None:
        """Other ranks take part from now on; nothing is known of them. Local."""
        self.divides_by_all, self.authoritative_rank = True, 0

    def notify(self, wrapped: Any, next_step: NextStep) -> NextStep:
        """Within `join`: tell joined ranks what follows. Collective with their shadows; blocks for a message."""
        told = Join.notify_join_context(wrapped)
        announced = self.announce(is_active=True, mine=next_step)
        if told is not None:
            told.wait()  # what it sums may be dropped only then; the sum after it has come already
        return announced

    def announce(self, is_active: bool, mine: NextStep = NextStep(False, False)) -> NextStep:
        """What any rank is about to do. Collective."""
        members = self._membership
        flags = torch.tensor(
            [float(flag) for flag in (mine.synchronizes, mine.opens_window, is_active)],
            device=device_for_metadata(members.process_group, members.device),
        )
        members.peers.wait(all_reduce(flags, members.process_group), "telling joined ranks about this step")
        num_synchronizing, num_windows, num_active = flags.tolist()
        divides_by_all = self.divides_by_all or num_windows > 0
        divisor = None if divides_by_all else max(1, round(num_active))
        return NextStep(num_synchronizing > 0, num_windows > 0, divisor)

    def agree_on_source(self, is_candidate: bool) -> int:
        """The highest rank that is a candidate; -1 where none is. Collective."""
        members = self._membership
        where = device_for_metadata(members.process_group, members.device)
        rank: Any = torch.tensor([members.rank if is_candidate else -1], device=where)
        members.peers.wait(
            all_reduce_max(rank, members.process_group), "agreeing on whose model is the final one"
        )
        return int(rank.item())

    def end(self, is_last_joiner: bool) -> int:
        """No rank has batches any more: agree on whose model is the final one. Collective."""
        self.authoritative_rank = self.agree_on_source(is_last_joiner)
        return self.authoritative_rank
