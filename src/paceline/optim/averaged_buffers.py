"""Buffers (batch-norm statistics) of models whose parameters are averaged: averaged with them, counters excepted."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import launch_broadcast, launch_sum
from paceline.comm.pending import Pending
from paceline.optim.flat_parameters import FlatParameters, flatten


class AveragedBuffers:
    """The buffers of one model.

    Args:
        buffers: Laid out alike on all ranks. What is no floating-point number (a counter) becomes rank 0's instead.
        process_group: Over whom.
    """

    def __init__(self, buffers: Iterable[Tensor], process_group: ProcessGroup) -> None:
        self._flats = flatten([buffer for buffer in buffers if buffer.numel()])
        self._group = process_group

    @property
    def num_bytes(self) -> int:
        return sum(flat.kept.nbytes for flat in self._flats)

    def layout(self) -> list[str]:
        """What has to be equal on all ranks."""
        return [f"{flat.kept.dtype} {tuple(b.shape)}" for flat in self._flats for b in flat.parameters]

    def launch(self) -> list[Pending]:
        """Start taking the mean. Collective; does not wait; buffers are not changed before `finish`."""
        return [] if self._group.size() == 1 else [self._launch(flat) for flat in self._flats]

    def _launch(self, flat: FlatParameters) -> Pending:
        flat.take()
        if not flat.kept.is_floating_point():
            return launch_broadcast(flat.kept, self._group, 0)
        return launch_sum(flat.kept.div_(self._group.size()), self._group)

    def finish(self) -> None:
        """Take over what was launched and has been waited for."""
        if self._group.size() > 1:
            for flat in self._flats:
                flat.put_back()
