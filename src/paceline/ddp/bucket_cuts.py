"""When buckets are cut anew: once in the order that rank 0 has observed, and while other caps are tried."""

from __future__ import annotations

import functools

from paceline.comm.collectives import allocate_zeros
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket
from paceline.ddp.cap_search import CapSearch
from paceline.ddp.layout import GradientMemory, ManagedParameters
from paceline.ddp.membership import Groups
from paceline.ddp.ready_tracking import ReadyTracker
from paceline.ddp.setting import Setting
from paceline.ddp.verdict import Verdict
from paceline.observe import StepTimings


class BucketCuts:
    """How the gradients of one module are cut into buckets; the same on every rank."""

    def __init__(
        self,
        managed: ManagedParameters,  # whose gradients
        setting: Setting,  # how large a bucket may become, and whether other caps are tried
        tracker: ReadyTracker,  # told of the buckets
        verdict: Verdict,  # whose status words lie behind the last one
        groups: Groups,  # the ranks agree over that for numbers; buffers are in the memory that the others prefer
        peers: Peers,
    ) -> None:
        group = groups.numbers
        self._tracker, self._verdict, self._group, self._peers = tracker, verdict, group, peers
        allocate = functools.partial(allocate_zeros, groups.for_gradients[0])
        self._memory = GradientMemory(managed, setting.caps, verdict.status, allocate)
        is_searched = setting.searches_caps and group.size() > 1
        # Tries caps; None: they stay as they are.
        self.search = CapSearch(setting.caps, self._memory.size_bytes) if is_searched else None
        # Of the parameters, by index, as their gradients become ready
        self.order = list(range(len(managed) - 1, -1, -1))
        # Whether that is the observed order, and not the reverse one of registration.
        self.has_followed = False
        self.may_change = True  # whether `is_due` has to be asked
        self._batch_size = 0

    def note_batch(self, size: int) -> None:
        """This rank's batch has so many samples, to be compared with rank 0's; 0: not known, or they are weighed."""
        self._batch_size = size

    def cut(self) -> list[Bucket]:
        """Return the buckets for the order and the caps of now. Local; old buckets are worthless afterwards."""
        buckets = self._memory.cut(self.order)
        self._tracker.listen_to(buckets)
        return buckets

    def is_due(self, timings: StepTimings) -> bool:
        """Whether buckets are to be cut anew, after a good backward. Collective as `CapSearch.after_step`."""
        is_due = self._tries_others(timings) if self.has_followed else self._follow()
        self.may_change = self.search is not None and self.search.best_mb is None
        return is_due

    def _tries_others(self, timings: StepTimings) -> bool:
        assert self.search is not None
        device = self._verdict.status.words.device
        caps = self.search.after_step(timings, device, self._group, self._peers)
        if caps is not None:
            self._memory.cap(caps)
        return caps is not None

    def _follow(self) -> bool:
        """Take the order that rank 0 has observed; whether it is another one."""
        device = self._verdict.status.words.device
        batch_size = self._batch_size
        order, first_size = self._tracker.agree_on_order(
            self.order, batch_size, device, self._group, self._peers
        )
        if batch_size and first_size and batch_size != first_size:
            self._verdict.warn_of_unequal_batches(batch_size, first_size)
        self.has_followed = True
        is_another = order != self.order
        self.order = order
        return is_another
