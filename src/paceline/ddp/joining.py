"""Uneven inputs: a rank that has run out of batches shadows the others' collectives (torch's `Join`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from paceline.comm.collectives import launch_maximum, launch_sum
from paceline.ddp.accumulation import match_window
from paceline.ddp.weights import raise_if_refused

if TYPE_CHECKING:
    from paceline.ddp.coordinator import StepCoordinator


@dataclass
class JoinState:
    """What a rank knows of `join`.

    Attributes:
        divides_by_all: The mean is over all ranks, also those without batches.
        was_used: Whether the module was ever within `join`.
        authoritative_rank: Whose model was the final one.
    """

    divides_by_all: bool = True
    was_used: bool = False
    authoritative_rank: int = 0

    @staticmethod
    def is_enabled(wrapped: Any) -> bool:
        """Whether the module is within `join` now; torch's `Join` says so to its joinable."""
        return bool(wrapped._join_config.enable)


class Shadow(JoinHook):
    """What a joined rank does for each forward and backward of the ranks that still have inputs."""

    def __init__(self, joinable: Joinable, steps: StepCoordinator, divides_by_all: bool) -> None:
        self._joinable = joinable
        self._steps = steps
        steps.join.divides_by_all, steps.join.was_used = divides_by_all, True
        super().__init__()

    def main_hook(self) -> None:
        """Match one forward and, if the others will synchronize, one backward, contributing zeros."""
        steps = self._steps
        others = announce(steps, is_active=False)
        if not (others.synchronizes or others.opens_window):
            return
        is_window = others.opens_window and not others.synchronizes
        exchange = steps.weighing.exchange() if is_window else None  # before the first forward
        if steps.wrapped.training and steps.has_synchronized_buffers():
            steps.buffers.synchronize(agree_on_source(steps, is_candidate=False))
        reducer = steps.reducer
        reducer.prepare()
        steps.buffers.come_at_end = False
        reducer.recovery.drop_gradients()
        reducer.share = 0.0 if others.opens_window else None
        if exchange is not None:
            match_window(steps, exchange.finish())
        else:
            if others.opens_window:
                raise_if_refused(steps, steps.weighing.exchange().finish())  # as backward begins
            reducer.run_without_autograd()
        reducer.recovery.drop_gradients()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks take the model of a rank that trained to the end."""
        self._steps.reducer.share = None
        self._steps.take_final_model(is_last_joiner)
        self._joinable._join_config = _JoinConfig.construct_disabled_join_config()  # torch leaves it enabled


@dataclass(frozen=True)
class NextStep:
    """What the ranks that still have inputs are about to do.

    Attributes:
        synchronizes: Whether any of them runs a backward that synchronizes, next.
        opens_window: Whether they exchange weights: now, for a window of micro-batches, of which one backward
            synchronizes; or, if `synchronizes` too, when the backward of a step's one batch begins.
    """

    synchronizes: bool
    opens_window: bool


def notify(steps: StepCoordinator, next_step: NextStep) -> None:
    """Within `join`: tell the joined ranks that this one has another batch or window, and what follows.

    Contract:
        Collective with the joined ranks' `main_hook`.  Blocks: yes, for one small message.
    """
    joinable: Any = steps.wrapped
    steps.reducer.num_averaged = None
    if steps.join.is_enabled(joinable):
        Join.notify_join_context(joinable)
        announce(steps, is_active=True, mine=next_step)


def announce(steps: StepCoordinator, is_active: bool, mine: NextStep = NextStep(False, False)) -> NextStep:
    """What any rank is about to do; sets by how many ranks the sum is divided. Collective."""
    flags = torch.tensor(
        [float(flag) for flag in (mine.synchronizes, mine.opens_window, is_active)], device=steps.device
    )
    steps.peers.wait(launch_sum(flags, steps.process_group), "telling joined ranks about this step")
    num_synchronizing, num_windows, num_active = flags.tolist()
    divides_by_all = steps.join.divides_by_all or num_windows > 0
    steps.reducer.num_averaged = None if divides_by_all else max(1, round(num_active))
    return NextStep(num_synchronizing > 0, num_windows > 0)


def agree_on_source(steps: StepCoordinator, is_candidate: bool) -> int:
    """The highest rank that is a candidate; -1 where none is. Collective."""
    rank: Any = torch.tensor([steps.process_group.rank() if is_candidate else -1], device=steps.device)
    steps.peers.wait(launch_maximum(rank, steps.process_group), "agreeing on whose model is the final one")
    return int(rank.item())
