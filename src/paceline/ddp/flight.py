"""The communication of one synchronized backward: buckets on the wire, in order, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.distributed import ProcessGroup

from paceline.comm.peers import Peers
from paceline.comm.pending import Done, Pending
from paceline.ddp.bucket import Bucket
from paceline.observe import BucketTiming
from paceline.observe.stations import station
from paceline.reductions import Reduction


class _Launched:
    """One bucket on its way."""

    def __init__(self, bucket: Bucket, size_bytes: int) -> None:
        self.bucket = bucket
        self.size_bytes = size_bytes
        self.launched_s = time.perf_counter()
        self.done_s = 0.0
        self.waited_s = 0.0

    def note_done(self) -> None:
        self.done_s = time.perf_counter()

    def timing(self) -> BucketTiming:
        bucket = self.bucket
        return BucketTiming(
            bucket.index, self.size_bytes, bucket.ready_s, self.launched_s, self.done_s, self.waited_s
        )


class Flight:
    """Launches buckets and waits for them.

    Contract:
        Collective: the same buckets in the same order on every rank. Bucket i goes to process group i mod k.

    Attributes:
        is_awaited_at_end: Backward ends when all buckets are back, and the last of them carries the control words.
    """

    is_awaited_at_end = True

    def __init__(self, reduction: Reduction, process_groups: Sequence[ProcessGroup], peers: Peers) -> None:
        self._reduction = reduction
        self._groups = process_groups
        self._peers = peers
        self._launched: list[tuple[_Launched, Pending]] = []

    @property
    def num_launched(self) -> int:
        return len(self._launched)

    def launch(self, bucket: Bucket, is_last: bool) -> None:
        """Send a collected bucket. Does not wait."""
        record = _Launched(bucket, bucket.size_bytes)
        try:
            pending = bucket.launch(self._reduction, self.group_of(bucket), is_last)
        except RuntimeError as error:
            if not self._reduction.is_ours:
                raise  # a user's hook said so
            raise self._peers.lost(error, f"launching {_describe(bucket)}") from error
        pending.on_done(record.note_done)
        self._launched.append((record, pending))

    def leave_out(self, bucket: Bucket) -> None:
        """It is the turn of a bucket that no rank needs: nothing is sent."""
        record, pending = _Launched(bucket, 0), Done()
        pending.on_done(record.note_done)
        self._launched.append((record, pending))

    def group_of(self, bucket: Bucket) -> ProcessGroup:
        return self._groups[bucket.index % len(self._groups)]

    def wait(self) -> None:
        """Wait for everything launched, in order.

        Raises:
            PeerLostError: A rank died or hangs; gradients are undefined.
        """
        for record, pending in self._launched:
            before_s = time.perf_counter()
            with station("waited"):
                self._peers.wait(pending, f"waiting for {_describe(record.bucket)}")
            after_s = time.perf_counter()
            record.waited_s = after_s - before_s
            record.done_s = record.done_s or after_s

    def timings(self) -> tuple[BucketTiming, ...]:
        return tuple(record.timing() for record, _ in self._launched)


def _describe(bucket: Bucket) -> str:
    return f"bucket {bucket.index} ({len(bucket.members)} gradients, {bucket.size_bytes / 2**20:.1f} MiB)"
