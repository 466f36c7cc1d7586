"""The cut of gradients into buckets: made at the start, and once more in the order that rank 0 has observed."""

from __future__ import annotations

import functools

from paceline.comm.collectives import allocate_zeros
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket
from paceline.ddp.layout import GradientMemory, ManagedParameters
from paceline.ddp.membership import Groups
from paceline.ddp.ready_tracking import ReadyTracker
from paceline.ddp.setting import Setting
from paceline.ddp.verdict import Verdict


class BucketCuts:
    """The cut of one module's gradients into buckets; the same on every rank.

    Attributes:
        order: Indices of the parameters, as their gradients become ready.
        has_followed: Whether that is the order that rank 0 has observed. Until then it is the reverse of registration.
    """

    def __init__(
        self,
        managed: ManagedParameters,
        setting: Setting,
        tracker: ReadyTracker,  # listens to the buckets
        verdict: Verdict,  # its status lies behind the last bucket
        groups: Groups,  # ranks agree over the one for numbers; buffers are in memory that the others prefer
        peers: Peers,
    ) -> None:
        self._tracker, self._verdict, self._group, self._peers = tracker, verdict, groups.numbers, peers
        allocate = functools.partial(allocate_zeros, groups.for_gradients[0])
        self._memory = GradientMemory(managed, setting.caps, verdict.status, allocate)
        self.order = list(range(len(managed) - 1, -1, -1))
        self.has_followed = False
        self._batch_size = 0

    def note_batch(self, size: int) -> None:
        """Keep the number of samples in this rank's batch, to compare it with rank 0's; 0 if unknown or weighed."""
        self._batch_size = size

    def cut(self) -> list[Bucket]:
        """Return the buckets for the present order. Local; old buckets are worthless afterwards."""
        buckets = self._memory.cut(self.order)
        self._tracker.listen_to(buckets)
        return buckets

    def follow(self) -> bool:
        """Adopt the bucket order that rank 0 has observed. Return True if it changed. Collective."""
        device = self._verdict.status.words.device
        batch_size = self._batch_size
        order, first_size = self._tracker.agree_on_order(
            self.order, batch_size, device, self._group, self._peers
        )
        if batch_size and first_size and batch_size != first_size:
            self._verdict.warn_of_unequal_batches(batch_size, first_size)
        self.has_followed = True
        changed = order != self.order
        self.order = order
        return changed
