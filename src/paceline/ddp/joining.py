"""Uneven inputs: a rank that has run out of batches shadows the others' collectives (torch's `Join`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from paceline.reductions.collectives import launch_maximum, launch_sum

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
        if not announce(wrapped, will_synchronize=False, is_active=False):
            return
        if wrapped.training and wrapped._has_synchronized_buffers():
            wrapped._buffer_sync.synchronize(agree_on_source(wrapped, is_candidate=False))
        wrapped.reducer.prepare()
        wrapped.reducer.synchronizes_buffers = False
        wrapped.reducer.drop_gradients()
        wrapped.reducer.run_without_autograd()
        wrapped.reducer.drop_gradients()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Everybody takes the model of a rank that trained to the end."""
        self._wrapped._sync_final_model(is_last_joiner)
        self._wrapped._join_config = _JoinConfig.construct_disabled_join_config()  # torch leaves it enabled


def notify(wrapped: DistributedDataParallel, will_synchronize: bool) -> None:
    """Within `join`: tell the joined ranks that this one has another batch, and whether its backward will synchronize.

    Contract:
        Collective with the joined ranks' `main_hook`.  Blocks: yes, for one small message.
    """
    wrapped.reducer.num_averaged = None
    if wrapped._join_config.enable:
        Join.notify_join_context(wrapped)
        announce(wrapped, will_synchronize, is_active=True)


def announce(wrapped: DistributedDataParallel, will_synchronize: bool, is_active: bool) -> bool:
    """Whether any rank's backward will synchronize; sets by how many ranks the sum is divided. Collective."""
    flags = torch.tensor([float(will_synchronize), float(is_active)], device=wrapped.device)
    wrapped._peers.wait(launch_sum(flags, wrapped.process_group), "telling joined ranks about this step")
    num_synchronizing, num_active = flags.tolist()
    wrapped.reducer.num_averaged = (
        None if wrapped._divide_by_initial_world_size else max(1, round(num_active))
    )
    return bool(num_synchronizing > 0)


def agree_on_source(wrapped: DistributedDataParallel, is_candidate: bool) -> int:
    """The highest rank that is a candidate; -1 where nobody is. Collective."""
    rank: Any = torch.tensor([wrapped.process_group.rank() if is_candidate else -1], device=wrapped.device)
    wrapped._peers.wait(
        launch_maximum(rank, wrapped.process_group), "agreeing on whose model is the final one"
    )
    return int(rank.item())
