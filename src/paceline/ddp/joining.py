"""Uneven inputs: a rank that has run out of batches shadows the others' collectives (torch's `Join`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from paceline.comm.collectives import launch_maximum, launch_sum
from paceline.ddp.accumulation import match_window
from paceline.ddp.weights import WeightExchange

if TYPE_CHECKING:
    from paceline.ddp.wrapper import DistributedDataParallel


class Shadow(JoinHook):
    """What a joined rank does for each forward and backward of the ranks that still have inputs."""

    def __init__(self, wrapped: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self._wrapped = wrapped
        wrapped._divide_by_initial_world_size = divide_by_initial_world_size
        wrapped._joins_uneven_inputs = True
        super().__init__()

    def main_hook(self) -> None:
        """Match one forward and, if the others will synchronize, one backward, contributing zeros."""
        wrapped = self._wrapped
        others = announce(wrapped, is_active=False)
        if not (others.synchronizes or others.opens_window):
            return
        exchange = exchange_weights(wrapped) if others.opens_window else None
        if wrapped.training and wrapped._has_synchronized_buffers():
            wrapped._buffer_sync.synchronize(agree_on_source(wrapped, is_candidate=False))
        wrapped.reducer.prepare()
        wrapped.reducer.synchronizes_buffers = False
        wrapped.reducer.recovery.drop_gradients()
        if exchange is None:
            wrapped.reducer.run_without_autograd()
        else:
            match_window(wrapped, exchange.finish())
        wrapped.reducer.recovery.drop_gradients()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Everybody takes the model of a rank that trained to the end."""
        self._wrapped._sync_final_model(is_last_joiner)
        self._wrapped._join_config = _JoinConfig.construct_disabled_join_config()  # torch leaves it enabled


@dataclass(frozen=True)
class NextStep:
    """What the ranks that still have inputs are about to do.

    Attributes:
        synchronizes: Whether any of them runs a backward that synchronizes, next.
        opens_window: Whether they open a window of micro-batches, of which one backward will.
    """

    synchronizes: bool
    opens_window: bool


def notify(wrapped: DistributedDataParallel, next_step: NextStep) -> None:
    """Within `join`: tell the joined ranks that this one has another batch or window, and what follows.

    Contract:
        Collective with the joined ranks' `main_hook`.  Blocks: yes, for one small message.
    """
    wrapped.reducer.num_averaged = None
    if wrapped._join_config.enable:
        Join.notify_join_context(wrapped)
        announce(wrapped, is_active=True, mine=next_step)


def announce(
    wrapped: DistributedDataParallel, is_active: bool, mine: NextStep = NextStep(False, False)
) -> NextStep:
    """What any rank is about to do; sets by how many ranks the sum is divided. Collective."""
    flags = torch.tensor(
        [float(flag) for flag in (mine.synchronizes, mine.opens_window, is_active)], device=wrapped.device
    )
    wrapped._peers.wait(launch_sum(flags, wrapped.process_group), "telling joined ranks about this step")
    num_synchronizing, num_windows, num_active = flags.tolist()
    divides_by_all = wrapped._divide_by_initial_world_size or num_windows > 0
    wrapped.reducer.num_averaged = None if divides_by_all else max(1, round(num_active))
    return NextStep(num_synchronizing > 0, num_windows > 0)


def exchange_weights(
    wrapped: DistributedDataParallel, weight: float = 0.0, num_micro_steps: int = 0
) -> WeightExchange:
    """Tell the other ranks what this rank's micro-batches of a step count; by default nothing. Collective."""
    return WeightExchange(weight, num_micro_steps, wrapped.process_group, wrapped._peers, wrapped.device)


def agree_on_source(wrapped: DistributedDataParallel, is_candidate: bool) -> int:
    """The highest rank that is a candidate; -1 where nobody is. Collective."""
    rank: Any = torch.tensor([wrapped.process_group.rank() if is_candidate else -1], device=wrapped.device)
    wrapped._peers.wait(
        launch_maximum(rank, wrapped.process_group), "agreeing on whose model is the final one"
    )
    return int(rank.item())
