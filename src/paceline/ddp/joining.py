"""Uneven inputs: a rank that has run out of batches shadows the others' collectives (`torch.distributed.algorithms.Join`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from paceline.reductions.pending import PendingWork

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
        if not announce(wrapped, will_synchronize=False):
            return
        if wrapped._has_synchronized_buffers():
            wrapped._buffer_sync.synchronize(agree_on_source(wrapped, is_candidate=False))
        wrapped.reducer.prepare()
        wrapped.reducer.synchronizes_buffers = False
        wrapped.reducer.drop_gradients()
        wrapped.reducer.run_without_autograd()
        wrapped.reducer.drop_gradients()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Everybody takes the model of a rank that trained to the end."""
        self._wrapped._sync_final_model(is_last_joiner)


def notify(wrapped: DistributedDataParallel, will_synchronize: bool) -> None:
    """Within `join`: tell the joined ranks that this one has another batch, and whether its backward will synchronize.

    Contract:
        Collective with the joined ranks' `main_hook`.  Blocks: only where the number of active ranks is needed.
    """
    work = Join.notify_join_context(wrapped)
    if work is None:
        return
    wrapped.reducer.num_averaged = None
    if not wrapped._divide_by_initial_world_size:
        work.wait()
        wrapped.reducer.num_averaged = int(_value(work))
    announce(wrapped, will_synchronize)


def _value(work: dist.Work) -> float:
    result = work.result()
    return float(result[0].item() if isinstance(result, (list, tuple)) else result.item())


def announce(wrapped: DistributedDataParallel, will_synchronize: bool) -> bool:
    """Whether any rank's backward will synchronize. Collective."""
    flag = torch.tensor([float(will_synchronize)], device=wrapped.device)
    work = dist.all_reduce(flag, group=wrapped.process_group, async_op=True)
    wrapped._peers.wait(PendingWork(work), "telling joined ranks about this step")
    return bool(flag.item() > 0)


def agree_on_source(wrapped: DistributedDataParallel, is_candidate: bool) -> int:
    """The highest rank that is a candidate; -1 where nobody is. Collective."""
    rank: Any = torch.tensor([wrapped.process_group.rank() if is_candidate else -1], device=wrapped.device)
    work = dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=wrapped.process_group, async_op=True)
    wrapped._peers.wait(PendingWork(work), "agreeing on whose model is the final one")
    return int(rank.item())
