"""Uneven inputs: the messages of ranks within torch's `join`, before each step. See `Shadow`, too."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from paceline.comm.collectives import all_reduce, all_reduce_max, device_for_metadata
from paceline.ddp.membership import Membership


@dataclass(frozen=True)
class NextStep:
    """The next action of the ranks that still have inputs."""

    synchronizes: bool  # whether any of them runs a backward that synchronizes, next
    # Whether they exchange weights: now, for a window of micro-batches, of which one backward synchronizes; or, if
    # `synchronizes` too, when the backward of a step's one batch begins.
    opens_window: bool
    divisor: int | None = None  # by how many ranks its sums are divided; None: by all


class Joining:
    """The state of `join` on one rank, and the messages of its ranks."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.divides_by_all = True  # the mean is over all ranks, also those without batches
        self.was_used = False  # whether the module was ever within `join`
        self.authoritative_rank = 0  # whose model was the final one

    @staticmethod
    def is_enabled(wrapped: Any) -> bool:
        """Return whether the module is within `join` now; torch's `Join` says so to its joinable."""
        return bool(wrapped._join_config.enable)

    def begin(self, divides_by_all: bool) -> None:
        """Enter `join`. Local."""
        self.divides_by_all, self.was_used = divides_by_all, True

    def begin_again(self) -> None:
        """Forget the old members. Local."""
        self.divides_by_all, self.authoritative_rank = True, 0

    def notify(self, wrapped: Any, next_step: NextStep) -> NextStep:
        """Tell joined ranks what follows. Collective with their shadows; blocks for a message."""
        told = Join.notify_join_context(wrapped)
        announced = self.announce(is_active=True, mine=next_step)
        if told is not None:
            told.wait()  # what it sums may be dropped only then; the sum after it has come already
        return announced

    def announce(self, is_active: bool, mine: NextStep = NextStep(False, False)) -> NextStep:
        """Exchange the ranks' next actions, and return them combined. Collective."""
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
        """Return the highest rank that is a candidate; -1 where none is. Collective."""
        members = self._membership
        where = device_for_metadata(members.process_group, members.device)
        rank: Any = torch.tensor([members.rank if is_candidate else -1], device=where)
        members.peers.wait(
            all_reduce_max(rank, members.process_group), "agreeing on whose model is the final one"
        )
        return int(rank.item())

    def end(self, is_last_joiner: bool) -> int:
        """Agree on the rank whose model is the final one, when no rank has batches any more. Collective."""
        self.authoritative_rank = self.agree_on_source(is_last_joiner)
        return self.authoritative_rank


class Shadow(JoinHook):
    """The part of a rank that has no more batches in the others' forwards and backwards (torch's `Join`)."""

    def __init__(self, joinable: Joinable, steps: Any) -> None:
        self._joinable, self._steps = joinable, steps
        super().__init__()

    def main_hook(self) -> None:
        """Match one forward of the other ranks with zeros and, if they will synchronize, one backward. Collective."""
        steps = self._steps
        steps.reducer.prepare()
        others = steps.joining.announce(is_active=False)
        steps.reducer.step.divide_by(others.divisor)
        if not (others.synchronizes or others.opens_window):
            return
        is_window = others.opens_window and not others.synchronizes
        exchange = steps.weighing.exchange() if is_window else None  # before the first forward
        if steps.wrapped.training and steps.has_synchronized_buffers():
            source_of = functools.partial(steps.joining.agree_on_source, is_candidate=False)
            steps.reducer.step.buffers.broadcast_once(source_of, is_joined=True)
        steps.reducer.drop_gradients()
        if exchange is not None:
            steps.match_window(exchange.finish())
        elif others.opens_window:
            steps.weighing.exchange().finish().raise_if_refused(steps.membership.rank)  # as backward begins
            steps.run_without_autograd(share=0.0)
        else:
            steps.run_without_autograd()
        steps.reducer.drop_gradients()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._steps.take_final_model(is_last_joiner)
        self._joinable._join_config = _JoinConfig.construct_disabled_join_config()  # torch leaves it enabled
