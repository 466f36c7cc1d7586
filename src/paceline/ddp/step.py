"""One training step of a wrapped module on one rank, and each of its backwards: what is known of them until they end.

There is always exactly one step under way. It ends with a synchronized backward, well or not, or is given up; then the
next one begins. What belongs to a step is a field of this object, so nothing of it is found in the next one.

A step may have several backwards: all but the last do not synchronize. A step that is deferred (`forward_overlap`)
keeps its last `BackwardPass` until all gradients have arrived, while the next step is under way.

A `BackwardPlan` says what a backward counts; a plain step, a window of micro-batches or the shadow of another rank
returns it. A `GradientSync` is how its buckets travel. What a graph may keep, a forward or a hook, refers to none of
these objects.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from paceline.comm.backward import Backward
from paceline.comm.collectives import Work
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket
from paceline.ddp.buffers import BufferSync
from paceline.ddp.verdict import RankStatuses
from paceline.observe import BucketTiming
from paceline.observe.device_times import DeviceTimes
from paceline.observe.timings import StepTimes
from paceline.recording.model_facts import BatchCounts
from paceline.reductions import Reduction


@dataclass(frozen=True)
class BackwardPlan:
    """The weight of one backward, and whether it synchronizes."""

    synchronizes: bool = True  # whether it reduces gradients
    weight: float = 1.0  # of this rank's gradients in the mean; over the ranks, weights average to 1
    # This rank's fraction of all that counts in the step; None: the step is not weighed.
    share: float | None = None
    divisor: int | None = None  # by how many ranks sums are divided; None: by all
    active_ratio: float = 1.0  # the fraction of the ranks that have samples in the step


class GradientSync(ABC):
    """The buckets of one backward on their way. The methods stand in the order in which they are called."""

    not_expected: frozenset[int] = frozenset()
    """Indices of parameters that the caller has declared not to be used."""

    def __init__(self, peers: Peers, times: DeviceTimes | None) -> None:
        """Wait for `peers`; `times` are taken where gradients are on an accelerator."""
        self._peers, self._times = peers, times
        self.num_launched = 0  # buckets that have had their turn

    def may_launch(self) -> bool:
        """Return whether the first full buckets may leave before backward has ended. Local."""
        return True

    def is_needed(self, bucket: Bucket) -> bool:
        """Return whether any rank needs the bucket. Local."""
        return True

    @abstractmethod
    def launch(self, bucket: Bucket) -> None:
        """Send the bucket. It must be the next one in launch order. Collective; does not wait."""

    @property
    def tells_by_launching(self) -> bool:
        """Return whether the ranks know how each backward has ended once all have launched their buckets."""
        return False

    def agree(self) -> Exception | None:
        """Agree on the buckets to send, when autograd has ended. Local in a plain sync; else collective, and blocks.

        Returns what this rank has to raise once it has completed the step's collectives. Raises StepDroppedError, on
        every rank, if the ranks do not agree; nothing was launched.
        """
        if self._times is not None:
            self._times.end()
        return None

    def wait_for_status(self) -> bool:
        """Wait for what brings the ranks' status words; False: they are summed apart. Raises PeerLostError."""
        return False

    def defer(self, backward: BackwardPass) -> bool:
        """Return whether the caller's buckets are completed elsewhere. Called when every backward has ended well.

        Then it calls `BackwardPass.set_gradients` with each, and after the last one `conclude`.
        """
        return False

    @abstractmethod
    def wait(self) -> None:
        """Wait for every bucket that has not been waited for, in order. Raises as `wait_for_status`."""

    @abstractmethod
    def launch_late(self, bucket: Bucket, scale: float) -> Work:
        """Start summing gradients that arrived after their bucket was sent or left out. Collective."""

    def unexplained(self, unused: list[int]) -> list[int]:
        """Return those of these unused parameters' indices that were not declared."""
        return unused

    @abstractmethod
    def timings(self) -> tuple[BucketTiming, ...]:
        """Return one record a bucket, by index."""

    def device_times(self) -> DeviceTimes | None:
        """Return the times of a device; None on the CPU."""
        return self._times


class BackwardPass:
    """One run of autograd through the module, or what stands for one: what it counts, and how its buckets travel."""

    sync: GradientSync  # from `start` on
    statuses: RankStatuses  # from `note_statuses` on

    def __init__(
        self,
        # Autograd owns it, and drops it early only if the backward has raised: then the reference's callback runs.
        token: weakref.ref[Backward],
        plan: BackwardPlan,
        step: Step,  # to which it belongs
        reduction: Reduction,  # what combines its gradients
        launches_early: bool,  # no other module over these groups is in a synchronized backward (rule 6 of `reducer`)
        # Which parameters it touches; None: not known before it ends
        reached: Callable[[], list[bool] | None],
        # Called once all gradients have arrived, with this object and the seconds that the step has waited for them.
        on_concluded: Callable[[BackwardPass, float], None],
    ) -> None:
        # Never a strong reference: that autograd drops the token is the only sign of a raise (`comm.backward`).
        self.token = token
        begun = token()
        assert begun is not None, "the caller holds the token"
        self.plan, self.step, self.reduction = plan, step, reduction
        self.by_autograd, self.started_s = begun.by_autograd, begun.started_s
        self.launches_early, self.reached, self._on_concluded = launches_early, reached, on_concluded
        self.scale = 1.0  # of gradients on their way into a bucket
        self.mean_scale = 1.0  # of what bypasses the reduction
        self.unused: list[int] = []  # indices of parameters that this rank's step has not used

    def start(self, sync: GradientSync, scale: float, mean_scale: float) -> None:
        """Set how its buckets travel, and their scales. Local."""
        self.sync, self.scale, self.mean_scale = sync, scale, mean_scale

    def scale_by(self, factor: float) -> None:
        """Multiply gradients by this, too, on their way into a bucket. Local."""
        self.scale *= factor

    @property
    def is_running(self) -> bool:
        """Return whether autograd is at it."""
        token = self.token()
        if token is None:
            return False
        # While it waits, nodes of the graph own it; they may outlive an exception, and then no backward runs.
        return not token.waits_for_outer or torch._C._current_graph_task_id() >= 0

    def note_statuses(self, unused: list[int], statuses: RankStatuses) -> None:
        """Store which parameters this rank has not used, and the statuses of all ranks. Local."""
        self.unused, self.statuses = unused, statuses

    def set_gradients(self, bucket: Bucket) -> None:
        """Give the parameters of a bucket that has arrived their gradients. Local."""
        bucket.set_gradients(self.statuses.is_used)

    def conclude(self, waited_s: float) -> None:
        """Record the step: all gradients have arrived, at once or in the next forward. Local."""
        self._on_concluded(self, waited_s)


class Step:
    """Everything up to and including one synchronized backward."""

    backward: BackwardPass | None = None  # the one under way, or interrupted
    divisor: int | None = None  # by how many ranks its sums are divided, in `join`; None: by all

    def __init__(
        self,
        number: int,
        times: StepTimes,
        batch: BatchCounts,
        buffers: BufferSync,
        used_before: Iterable[int] = (),
    ) -> None:
        # Its number if it ends well; counts from 1
        self.number = number
        self.times = times
        self.batch = batch
        self.buffers = buffers
        # Ids of parameters that its unsynchronized backwards have touched; they outlast a reducer
        self.used_before = set(used_before)

    @property
    def is_interrupted(self) -> bool:
        """Return whether a backward of this step began, and raised before it was completed."""
        return self.backward is not None and not self.backward.is_running

    def begin(self, backward: BackwardPass) -> None:
        """Note that a backward of it begins. Local."""
        self.backward = backward

    def end_backward(self) -> None:
        """Drop the backward under way, which has ended. Local."""
        self.backward = None

    def divide_by(self, divisor: int | None) -> None:
        """Divide its sums by so many ranks. Local; the same on every rank."""
        self.divisor = divisor

    def exchange_buffers(self, buffers: BufferSync) -> BufferSync:
        """Put another one in the place of its `buffers`, which are returned."""
        before, self.buffers = self.buffers, buffers
        return before
