"""How the buckets of one backward travel, and what the step counts: decided when it begins, by others than the reducer.

`Terms` are returned by whoever knows them: a plain step, a window of micro-batches, a rank that shadows others.
`Flights` make the `Flight` of each backward. The reducer calls it and never asks which one it is. Here is the plain
flight; others wrap it or stand in its place. The order of calls is the order of collectives, the same on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.distributed import ProcessGroup

from paceline.comm.backward import Backward
from paceline.comm.collectives import Work
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket
from paceline.ddp.layout import ManagedParameters
from paceline.ddp.open_forwards import OpenForwards
from paceline.observe import BucketTiming, StepTimings
from paceline.observe.timings import profiler_range
from paceline.reductions import Reduction


@dataclass(frozen=True)
class Terms:
    """What one backward counts.

    Attributes:
        synchronizes: Whether it reduces gradients.
        weight: Of this rank's gradients in the mean; over the ranks, weights average to 1.
        share: This rank's fraction of all that counts in the step; None: the step is not weighed.
        num_averaged: By how many ranks sums are divided; None: by all.
    """

    synchronizes: bool = True
    weight: float = 1.0
    share: float | None = None
    num_averaged: int | None = None


@dataclass(frozen=True)
class Step:
    """A backward that begins, for whoever makes its flight.

    Attributes:
        backward: It.
        reduction: What combines its gradients.
        num_steps: Synchronized backwards before it.
        forward_s: Duration of the last forward before it.
        goes_first: No other module over these groups is in a synchronized backward: it may launch before the end.
        used_before: Indices of parameters that unsynchronized backwards of this step have touched.
        reached: Which parameters it touches; None: not known before it ends.
    """

    backward: Backward
    reduction: Reduction
    num_steps: int
    forward_s: float
    goes_first: bool
    used_before: set[int]
    reached: Callable[[], list[bool] | None]


class Flight(Protocol):
    """The buckets of one backward on their way. The methods stand in the order in which they are called."""

    @property
    def num_launched(self) -> int:
        """Buckets that have had their turn."""

    @property
    def not_expected(self) -> frozenset[int]:
        """Indices of parameters that the caller has declared not to be used."""

    def may_launch(self) -> bool:
        """A bucket is full: whether the first ones may leave before backward has ended. Local."""

    def leaves(self, bucket: Bucket) -> bool:
        """Whether any rank needs the bucket. Local."""

    def launch(self, bucket: Bucket) -> None:
        """It is the bucket's turn: send it, once it is collected. Collective; does not wait."""

    def close(self) -> Exception | None:
        """Autograd is done: come to know which buckets leave.

        Contract:
            Collective if the ranks still have to agree on that; then it blocks. Local in a plain flight.

        Returns:
            What this rank has to raise once it has completed the step's collectives.

        Raises:
            StepDroppedError: The ranks do not agree; on every rank, and nothing was launched.
        """

    def wait_for_words(self) -> bool:
        """Wait for what brings the ranks' status words; False: they have to be summed apart.

        Raises:
            PeerLostError: A rank died or hangs; gradients are undefined.
        """

    def hand_over(self, attach: Callable[[Bucket], None], conclude: Callable[[float], None]) -> bool:
        """Every rank's backward has ended well: whether somebody else completes each bucket when it is needed.

        Args:
            attach: Gives a bucket's parameters their gradients.
            conclude: To be called when the last bucket has arrived, with the seconds spent waiting for buckets.
        """

    def wait(self) -> None:
        """Wait for every bucket that has not been waited for, in order. Raises as `wait_for_words`."""

    def launch_late(self, bucket: Bucket, scale: float) -> Work:
        """Start summing what arrived after the bucket had left, or though it was left out. Collective."""

    def unexplained(self, unused: list[int]) -> list[int]:
        """Of these indices of unused parameters those that nobody has declared."""

    def timings(self) -> tuple[BucketTiming, ...]:
        """One record a bucket, by index."""


class Flights(Protocol):
    """Makes the flights of one reducer's backwards."""

    def follow(
        self,
        managed: ManagedParameters,
        groups: Sequence[ProcessGroup],
        peers: Peers,
        open_forwards: OpenForwards,
        timings: StepTimings,
    ) -> None:
        """These parameters are reduced from now on, over these groups. Local."""

    def begin(self, step: Step, buckets: Sequence[Bucket]) -> Flight:
        """A backward begins. Collective where ranks have to agree on something first, local otherwise."""


class _Launched:
    """One bucket on its way; without a handle, one that is left out."""

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


class PlainFlight:
    """Every bucket leaves as a whole, and backward waits for all.

    Contract:
        Collective: the same buckets in the same order on every rank. Bucket i goes to process group i mod k.

    Args:
        reduction: What launching a bucket means.
        groups: Over whom, in turn.
        peers: For waiting.
        buckets: Of the step.
    """

    not_expected: frozenset[int] = frozenset()

    def __init__(
        self, reduction: Reduction, groups: Sequence[ProcessGroup], peers: Peers, buckets: Sequence[Bucket]
    ) -> None:
        self._reduction = reduction
        self._groups = groups
        self._peers = peers
        self._last = buckets[-1]
        self._launched: list[_Launched] = []
        self._num_awaited = 0
        self.num_launched = 0

    def may_launch(self) -> bool:
        return True

    def leaves(self, bucket: Bucket) -> bool:
        return True

    def launch(self, bucket: Bucket) -> None:
        self.launch_whole(bucket, bucket is self._last)

    def launch_whole(self, bucket: Bucket, is_last: bool) -> None:
        """Launch it; `is_last`: nothing is launched after it in this step."""
        launched = _Launched(bucket, bucket.size_bytes)
        try:
            pending = bucket.launch(self._reduction, self.group_of(bucket), is_last)
        except RuntimeError as error:
            if not self._reduction.is_ours:
                raise  # a user's hook said so
            raise self._peers.lost(error, f"launching {describe_bucket(bucket)}") from error
        launched.pending = pending
        launched.done_s = 0.0
        pending.on_done(launched.note_done)
        self._launched.append(launched)
        self.num_launched += 1

    def leave_out(self, bucket: Bucket) -> None:
        """It is the turn of a bucket that no rank needs: nothing is sent."""
        self._launched.append(_Launched(bucket, 0))
        self.num_launched += 1

    def group_of(self, bucket: Bucket) -> ProcessGroup:
        return self._groups[bucket.index % len(self._groups)]

    def close(self) -> Exception | None:
        return None

    def wait_for_words(self) -> bool:
        self.wait()
        return self._reduction.carries_words and self._last.words is not None

    def wait(self) -> None:
        for launched in self._launched[self._num_awaited :]:
            before_s = time.perf_counter()
            with profiler_range("waited"):
                if launched.pending is not None:
                    self._peers.wait(launched.pending, f"waiting for {describe_bucket(launched.bucket)}")
            after_s = time.perf_counter()
            launched.waited_s = after_s - before_s
            launched.done_s = launched.done_s or after_s
        self._num_awaited = len(self._launched)

    def hand_over(self, attach: Callable[[Bucket], None], conclude: Callable[[float], None]) -> bool:
        return False

    def launch_late(self, bucket: Bucket, scale: float) -> Work:
        return bucket.launch_late(scale, self.group_of(bucket))

    def unexplained(self, unused: list[int]) -> list[int]:
        return unused

    def timings(self) -> tuple[BucketTiming, ...]:
        return tuple(launched.timing() for launched in self._launched)


class PlainFlights:
    """Makes plain flights."""

    def __init__(self) -> None:
        self._groups: Sequence[ProcessGroup] = ()
        self._peers: Peers

    def follow(
        self,
        managed: ManagedParameters,
        groups: Sequence[ProcessGroup],
        peers: Peers,
        open_forwards: OpenForwards,
        timings: StepTimings,
    ) -> None:
        """As `Flights.follow`."""
        self._groups, self._peers = groups, peers

    def begin(self, step: Step, buckets: Sequence[Bucket]) -> PlainFlight:
        return PlainFlight(step.reduction, self._groups, self._peers, buckets)


def describe_bucket(bucket: Bucket) -> str:
    """Which bucket, how many gradients and how much, in words."""
    return f"bucket {bucket.index} ({len(bucket.members)} gradients, {bucket.size_bytes / 2**20:.1f} MiB)"
