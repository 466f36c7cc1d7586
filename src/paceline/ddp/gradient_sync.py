"""The plain `GradientSync`, which sends each bucket of a backward as a whole, and `SyncFactory`, which makes it.

The reducer calls a sync without knowing its class. Skipping and forward overlap derive from these classes. The order of
calls is the order of collectives, the same on every rank.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from paceline.comm.collectives import Work
from paceline.comm.device import devices_of
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket
from paceline.ddp.layout import ManagedParameters
from paceline.ddp.membership import Groups
from paceline.ddp.open_forwards import OpenForwards
from paceline.ddp.step import BackwardPass, GradientSync
from paceline.observe import BucketTiming, StepTimings
from paceline.observe.device_times import DeviceTimes
from paceline.observe.timings import profiler_range
from paceline.reductions import Reduction
from paceline.reductions.hook import is_users_hook

# Smaller messages are looked at instead of calling back. For a callback the backend's thread needs Python's lock, and
# has to get it before it ends the message and begins the next one.
LEAST_CALLED_BACK_BYTES = 256 * 1024


class _Launched:
    """One bucket on its way. Without a handle it is skipped."""

    def __init__(self, bucket: Bucket, size_bytes: int) -> None:
        self.bucket = bucket
        self.size_bytes = size_bytes
        self.pending: Work | None = None
        self.launched_s = self.done_s = time.perf_counter()
        self.waited_s = 0.0

    def note_done(self) -> None:
        self.done_s = time.perf_counter()

    def timing(self) -> BucketTiming:
        bucket = self.bucket
        return BucketTiming(
            bucket.index, self.size_bytes, bucket.ready_s, self.launched_s, self.done_s, self.waited_s
        )


class BucketSync(GradientSync):
    """The sync that sends every bucket as a whole, bucket i over group i mod k. Backward waits for all of them."""

    def __init__(
        self,
        reduction: Reduction,
        groups: Sequence[ProcessGroup],
        peers: Peers,
        buckets: Sequence[Bucket],
        times: DeviceTimes | None,
    ) -> None:
        super().__init__(peers, times)
        self._reduction = reduction
        self._groups = groups
        self._last: Bucket | None = buckets[-1]  # behind which nothing leaves
        self._launched: list[_Launched] = []
        self._num_awaited = 0
        self._unseen: deque[tuple[Work, _Launched]] = deque()  # small ones, not yet seen to have arrived

    def launch(self, bucket: Bucket) -> None:
        while self._unseen and self._unseen[0][0].is_done():
            self._unseen.popleft()[1].note_done()
        launched = _Launched(bucket, bucket.size_bytes)
        if self._times is not None:
            self._times.launch(bucket.index)
        try:
            pending = bucket.launch(self._reduction, self.group_of(bucket), bucket is self._last)
        except RuntimeError as error:
            if is_users_hook(self._reduction):
                raise
            self._peers.fail(error, f"launching {describe_bucket(bucket)}")
        launched.pending, launched.done_s = pending, 0.0
        if bucket.size_bytes < LEAST_CALLED_BACK_BYTES and self._times is None:
            self._unseen.append((pending, launched))
        else:
            pending.on_done(launched.note_done)
        if self._times is not None:
            pending.on_done(functools.partial(self._times.done, bucket.index))
        self._launched.append(launched)
        self.num_launched += 1

    def skip(self, bucket: Bucket) -> None:
        """Record this bucket as skipped, and send nothing."""
        self._launched.append(_Launched(bucket, 0))
        self.num_launched += 1

    def group_of(self, bucket: Bucket) -> ProcessGroup:
        return self._groups[bucket.index % len(self._groups)]

    @property
    def tells_by_launching(self) -> bool:
        """Return whether the last bucket carries the statuses."""
        has_words = self._last is not None and self._last.words is not None
        return self._reduction.carries_status and has_words

    def wait_for_status(self) -> bool:
        self.wait()
        return self.tells_by_launching

    def wait(self) -> None:
        for launched in self._launched[self._num_awaited :]:
            before_s = time.perf_counter()
            with profiler_range("waited"):
                if launched.pending is not None:
                    self._peers.wait(launched.pending, f"waiting for {describe_bucket(launched.bucket)}")
            after_s = time.perf_counter()
            launched.waited_s = after_s - before_s
            launched.done_s = launched.done_s or after_s
            if self._times is not None and launched.pending is not None:
                self._times.arrive(launched.bucket.index)
        self._num_awaited = len(self._launched)

    def launch_late(self, bucket: Bucket, scale: float) -> Work:
        return bucket.launch_late(scale, self.group_of(bucket))

    def timings(self) -> tuple[BucketTiming, ...]:
        return tuple(launched.timing() for launched in self._launched)


class SyncFactory:
    """The factory of the plain syncs of one reducer's backwards."""

    def __init__(self) -> None:
        self._groups: Sequence[ProcessGroup] = ()
        self._peers: Peers
        self._devices: list[torch.device] = []  # the accelerator whose times are taken, if there is one

    def follow(
        self,
        managed: ManagedParameters,
        groups: Groups,
        peers: Peers,
        open_forwards: OpenForwards,
        timings: StepTimings,
    ) -> None:
        """Reduce these parameters over these groups from now on. Local."""
        self._groups, self._peers = groups.for_gradients, peers
        self._devices = devices_of(managed.parameters)[:1]

    def begin(self, backward: BackwardPass, buckets: Sequence[Bucket]) -> GradientSync:
        """Begin a backward, and return its sync. Collective if the ranks have to agree first, local otherwise."""
        return BucketSync(backward.reduction, self._groups, self._peers, buckets, self._times())

    def _times(self) -> DeviceTimes | None:
        return DeviceTimes.begin(self._devices[0]) if self._devices else None


def describe_bucket(bucket: Bucket) -> str:
    """Return which bucket, how many gradients and how much, in words."""
    return f"bucket {bucket.index} ({len(bucket.members)} gradients, {bucket.size_bytes / 2**20:.1f} MiB)"
