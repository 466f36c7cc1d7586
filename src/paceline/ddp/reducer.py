"""The reducer: one backward, from autograd's first gradient until every parameter has its reduced one.

Rules
1. Buckets are launched in order of index, on every rank, each at most once a backward. A bucket that is full waits for
   the ones before it.
2. The last bucket leaves when backward has ended: it carries how each rank's ended (control words, `verdict`).
3. Every backward outside `no_sync` reduces every bucket. What a rank did not use counts as zero. So the sequence of
   collectives depends on the number of synchronized backwards alone, never on which parameters they touched. Where
   buckets that no rank needs are left out, it depends on what the ranks have agreed on in that backward (`skipping`).
4. By linearity a second backward before `zero_grad` is right too: the mean of (old + new) is old + mean(new), because
   old is the same on every rank.
5. A gradient that arrives after its bucket has left is kept apart and reduced once more, on all ranks.
6. Where one backward runs through several modules on one process group, only the one that began first launches before
   the end: how their buckets would interleave depends on what a rank used.
7. No collective outside a synchronized backward, except in the constructor, for buffers before a forward, under
   `join`, after a parameter was unfrozen, and to complete a backward that raised.

The stations of a gradient: autograd -> `Bucket.enter` or `collect` -> `Reduction.launch` -> `attach` -> `.grad`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.backward import Backward
from paceline.comm.peers import Peers
from paceline.ddp.arrivals import Arrivals
from paceline.ddp.bucket import Bucket, Scales
from paceline.ddp.bucket_cuts import BucketCuts
from paceline.ddp.buffers import Buffers
from paceline.ddp.flight import Flight
from paceline.ddp.forward_overlap import ForwardOverlap
from paceline.ddp.forward_overlap.piece_flight import PieceFlight
from paceline.ddp.layout import ManagedParameters
from paceline.ddp.open_forwards import Owner
from paceline.ddp.recovery import Recovery
from paceline.ddp.setting import Setting
from paceline.ddp.skipping import Skipping, collect_late
from paceline.ddp.verdict import Status, Verdict
from paceline.errors import PeerAbortedError, ProtocolError, SkipError
from paceline.observe import StepTiming, StepTimings
from paceline.observe.stations import station


class Reducer:
    """Reduces the gradients of one module on one rank. The methods stand in the order in which they are called.

    Attributes:
        recovery: Which backward is under way, and what happens if it raises.
        verdict: Whether every rank's ended well.
        open_forwards: Which forwards wait for a backward, and to which one a backward belongs.
        arrivals: Which bucket is full.
        timings: The last steps.
        num_steps: Synchronized backwards that ended well.
        num_averaged: What to divide by, if not all ranks (`join` leaves some out).
        weight: Of this rank's gradients in the mean; over the ranks, weights average to 1.
        share: This rank's fraction of all that counts in the step; None: it is not weighed.
        unweighed_size: Samples of this rank's batch, to be compared with rank 0's in the first step; 0: not known, or
            their number is accounted for by weights.
        out_of_memory: In the last backward that this rank gave up: who ran out of memory, if nothing else went wrong.
        synchronizes: Asked when a backward begins: whether it reduces gradients.
        on_reduced: Called for every parameter once its gradient is reduced (optimizers that step in backward).
        cuts: How gradients are cut into buckets, and when anew.
        forward_overlap: Puts the end of steps off into the next forward; None: backward waits for its gradients.
    """

    def __init__(
        self,
        managed: ManagedParameters,
        setting: Setting,
        skipping: Skipping | None,
        process_groups: Sequence[ProcessGroup],
        peers: Peers,
        buffers: Buffers,
    ) -> None:
        self.managed = managed
        self.setting = setting
        self.process_groups = list(process_groups)
        self.reduction = setting.reduction
        self.timings = StepTimings()
        self.forward_s = 0.0
        self.num_steps = 0
        self.num_averaged: int | None = None
        self.weight = 1.0
        self.share: float | None = None
        self.unweighed_size = 0
        self.out_of_memory: tuple[int, ...] = ()
        self.synchronizes: Callable[[], bool] = lambda: True
        self.on_reduced: Callable[[Parameter], None] | None = None
        self.forward_overlap: ForwardOverlap | None = None

        self._peers = peers
        self._buffers = buffers
        self._skipping = skipping
        group = self.process_groups[0]
        self._num_ranks = group.size()
        self._used_before: set[int] = set()  # touched without synchronization since the last one
        self.verdict = Verdict(group.rank(), self._num_ranks, list(managed.named().items()))
        self.open_forwards = self.verdict.open_forwards
        self.recovery = Recovery(self, managed.parameters, self._used_before)
        self.arrivals = Arrivals(managed, setting, self._take, self._on_full)
        if skipping is not None:
            skipping.follow(managed, self.process_groups, peers, self.open_forwards)
        self.cuts = BucketCuts(managed, setting, self.arrivals, self.verdict, group, peers)
        self.buckets = self.cuts.cut()
        self.arrivals.record_order()

    # ---- before a backward

    def prepare(self) -> None:
        """Before a forward that will be differentiated; raises and communicates as `Recovery.check`."""
        self.recovery.check()
        self.verdict.confirm_suspicion()

    def watch(self, output_nodes: Sequence[Any]) -> None:
        """Begin as soon as a backward reaches one of these, the `grad_fn`s of the outputs of the last forward."""
        open_forwards = self.open_forwards
        forward = open_forwards.end(has_outputs=bool(output_nodes))
        owner = Owner(is_recomputed=forward.is_recomputed)

        def on_output(_: tuple[Tensor, ...]) -> None:
            open_forwards.close(forward)
            if self.recovery.current() is None and self.arrivals.expected.is_backward():
                self.begin(owner)

        for node in output_nodes:
            node.register_prehook(on_output)

    # ---- a backward begins

    def begin(self, owner: Owner | None = None) -> Backward:
        """Backward has reached the module: decide whether it synchronizes, and be told when it ends.

        Args:
            owner: The forward of the wrapper to which it belongs; without one it stays local.
        """
        if self.recovery.is_interrupted:
            self.recovery.recover()
        synchronizes = self.synchronizes()
        if owner is not None:
            self.open_forwards.note_backward()
        elif synchronizes:
            synchronizes = False
            self.verdict.warn_of_local_backward()
        ends_with_inner = owner is not None and owner.is_recomputed
        backward = Backward(synchronizes, self._end, ends_with_inner=ends_with_inner)
        torch.autograd.Variable._execution_engine.queue_callback(backward.end)
        self.arm(backward)
        return backward

    def arm(self, backward: Backward) -> None:
        """Make ready for a backward: its scales, its flight, how many gradients each bucket waits for."""
        with station("started"):
            self.recovery.watch(backward)
            self._by_autograd = backward.by_autograd
            pieces = self.forward_overlap and self._new_pieces(self.forward_overlap, backward.synchronizes)
            self._flight = pieces or Flight(self.reduction, self.process_groups, self._peers)
            self._goes_first = self.recovery.is_first_over_its_groups()
            num_averaged = self.num_averaged or self._num_ranks
            if backward.synchronizes:
                self.reduction.begin_step()
                if self.share is not None:
                    self.reduction.weigh(self.share)
            self._scales = Scales(
                input=self.weight * self.reduction.input_scale(num_averaged), mean=self.weight / num_averaged
            )
            self.arrivals.expected.begin()
            if self._skipping is not None:
                self._skipping.begin(backward, self.arrivals.expected, self._used_before, self._goes_first)
            self.arrivals.arm(backward.synchronizes, backward.started_s)

    def _new_pieces(self, overlap: ForwardOverlap, synchronizes: bool) -> PieceFlight | None:
        return overlap.new_flight(synchronizes, self.buckets, self.num_steps, self.timings, self.forward_s)

    def _begin_unseen(self) -> Backward:
        """A gradient is there, and the backward has passed no output that is watched."""
        return self.begin(self.open_forwards.owner_of_running_backward())

    # ---- a gradient is there

    def _take(self, bucket: Bucket, slot: int, parameter: Parameter) -> None:
        """Autograd has finished a large gradient; the small ones it has added into the buffer itself."""
        backward = self.recovery.current() or self._begin_unseen()
        if not self.arrivals.has_foreign_hooks(parameter) and bucket.expected:
            if backward.synchronizes:
                bucket.enter(slot, self._scales.input)
            else:
                bucket.accumulate(slot)

    def _on_full(self, bucket: Bucket) -> None:
        backward = self.recovery.current()
        if backward is None:
            backward = self._begin_unseen()
            if len(bucket.touched) != bucket.expected:
                return
        if bucket.launched or not backward.synchronizes:
            return
        if not self.arrivals.is_full(bucket):
            return  # one parameter twice, another not yet: this bucket leaves when backward has ended
        with station("ready"):
            bucket.ready_s = time.perf_counter()
        if not self.arrivals.has_foreign_hooks(bucket.touched[-1]):
            self._launch_ready()  # otherwise with the next full bucket: those hooks want to see `.grad`

    def _launch_ready(self) -> None:
        last = len(self.buckets) - 1 if self._goes_first else 0
        if self._skipping is not None:
            with self.recovery.failing_for_good:
                if not self._skipping.lets_launch(self.buckets):
                    return
        while (place := self._flight.num_launched) < last and self.buckets[place].ready_s:
            self._launch(self.buckets[place])

    def _launch(self, bucket: Bucket) -> None:
        if bucket.left_out:
            assert isinstance(self._flight, Flight), "skipping is refused beside forward overlap"
            self._flight.leave_out(bucket)
            return
        with station("launched"):
            if not bucket.launched:
                bucket.collect(self._scales, self._used_before, has_ended=False)
            is_last = all(later.left_out for later in self.buckets[bucket.index + 1 :])
            try:
                self._flight.launch(bucket, is_last)
            except Exception as error:
                self.recovery.fail(error)
                raise

    # ---- backward has ended

    def _end(self, backward: Backward) -> None:
        """Called by autograd when it has nothing left to do."""
        if self.recovery.current() is not backward or backward.waits_for_outer_end():
            return
        try:
            if backward.synchronizes:
                self._finish(backward)
                if self.cuts.may_change and self.cuts.is_due(self.timings, self.unweighed_size):
                    self.buckets = self.cuts.cut()
            else:
                self._end_unsynchronized()
        except (PeerAbortedError, SkipError):
            self.recovery.drop_gradients()
            raise
        except Exception as error:
            self.recovery.fail(error)
            raise
        finally:
            self.rest()

    def _end_unsynchronized(self) -> None:
        for bucket in self.buckets:
            self._used_before.update(bucket.members[slot] for slot in bucket.slots_with_gradients())
            bucket.drop_installed()

    def _finish(self, backward: Backward) -> None:
        """Reduce what is left, wait for everything, give every parameter its gradient.

        Contract:
            Collective: every rank, once a synchronized backward.  Blocks: yes.  Mutates: `.grad` of all parameters.
            Afterwards: bitwise equal on all ranks.

        Raises:
            PeerAbortedError: Another rank's backward raised; gradients are undefined on all ranks.
            PeerLostError: A rank died or hangs; gradients are undefined.
            SkipError: What is skipped differs between ranks, or was used; gradients are dropped.
        """
        ended_s = time.perf_counter()
        self._buffers.are_in_line = False
        unused = self._complete(self._status())
        waited_s = time.perf_counter() - ended_s
        try:
            has_late = self.verdict.reach(self.num_steps + 1, self.reduction)
        except ProtocolError:
            self._land()
            self.recovery.drop_gradients()
            raise
        if backward.by_autograd and (unused or self.setting.find_unused_parameters):
            self._note_unused(unused)
        self.arrivals.expected.learn(self.buckets)
        self.num_steps += 1
        self._peers.note_step(self.num_steps)
        self._used_before.clear()
        record = functools.partial(self._record, self._flight, self.num_steps, backward.started_s, ended_s)
        overlap = self.forward_overlap
        may_put_off = backward.by_autograd and self.on_reduced is None and not has_late
        if overlap is not None and may_put_off and overlap.may_take_over(self._flight):
            overlap.take_over(lambda bucket: bucket.attach(self.verdict.control.is_used), record)
            return
        self._land()
        if has_late:
            self._reduce_late()
        self._attach(unused)
        self.verdict.suspect_first_not_finite(self.num_steps, self.cuts.order)
        record(waited_s)

    def _status(self) -> Status:
        """How this rank's backward has ended. Raises SkipError, once the others know, if it has used what it skips."""
        if self._skipping is not None:
            self._skipping.agree(self.buckets)
            if error := self._skipping.error_of_used(self.buckets):
                self._complete(Status.ABORTED)
                raise error
        if not any(bucket.has_late_gradients() for bucket in self.buckets):
            return Status.GOOD
        self.arrivals.expected.defer()
        self.verdict.warn_of_late_gradients()
        return Status.LATE_GRADIENTS

    def _record(
        self, flight: Flight | PieceFlight, step: int, started_s: float, ended_s: float, waited_s: float
    ) -> None:
        """All gradients of a step have arrived, and it has waited so long for them."""
        buckets = flight.timings()
        exposed_s = min(waited_s, sum(bucket.waited_s for bucket in buckets))
        timing = StepTiming(step, self.forward_s, started_s, ended_s - started_s, exposed_s, buckets)
        self.timings.add(timing)
        self.reduction.end_step(timing)

    def _land(self) -> None:
        """Wait for what may be put off, but is not."""
        if not self._flight.is_awaited_at_end:
            self._flight.wait()

    def _complete(self, status: Status) -> list[int]:
        """Launch the remaining buckets, the last with control words, and wait for all. Returns unused parameters."""
        if self._skipping is not None:
            self._skipping.agree(self.buckets)
        remaining = self.buckets[self._flight.num_launched :]
        for bucket in remaining:
            if not bucket.ready_s:
                with station("ready"):
                    bucket.ready_s = time.perf_counter()
            if not bucket.left_out:
                bucket.collect(self._scales, self._used_before, has_ended=True)
        unused = [index for bucket in self.buckets for index in bucket.untouched_members()]
        num_open = self.open_forwards.word(self._by_autograd)
        not_finite = [bucket.not_finite for bucket in self.buckets if bucket.not_finite is not None]
        self.verdict.control.write(unused, status, num_open, not_finite)
        for bucket in remaining:
            self._launch(bucket)
        if self._buffers.come_at_end and self.reduction.carries_words:
            self._buffers.launch(self._buffers.source)  # else later: a hook may be starting collectives
        is_awaited = self._flight.is_awaited_at_end
        if is_awaited or status is Status.ABORTED:
            self._flight.wait()
        last = self.buckets[-1]
        if not (is_awaited and self.reduction.carries_words) or last.left_out or last.words is None:
            self.verdict.exchange(self.process_groups[0], self._peers)
        if self._buffers.are_awaited:
            self._buffers.end_step()
        return unused

    def _reduce_late(self) -> None:
        """Sum what arrived after its bucket had left, or in one that was left out, on all ranks (rule 5)."""
        for bucket in self.buckets:
            if bucket.left_out:
                collect_late(bucket)
            pending = bucket.launch_late(self._scales.mean, self._flight.group_of(bucket))
            self._peers.wait(pending, "reducing late gradients")

    def _attach(self, unused: list[int]) -> None:
        """Give every parameter its reduced gradient; those that no rank used get what they had."""
        with station("attached"):
            is_used = self.verdict.control.is_used
            for bucket in self.buckets:
                bucket.attach(is_used)
            if unused_everywhere := [index for index in unused if not is_used(index)]:
                self.reduction.withdraw([self.managed.parameters[index] for index in unused_everywhere])
            if self.on_reduced is not None:
                for parameter in self.managed.parameters:
                    self.on_reduced(parameter)

    def _note_unused(self, unused: list[int]) -> None:
        looks = self.setting.find_unused_parameters
        if self._skipping is not None:
            unused = [] if self._skipping.looks else self._skipping.undeclared(unused)
        if unused:
            self.arrivals.expected.predicts = True
            if not (looks or self.setting.static_graph):
                self.verdict.warn_of_unused(unused)
        elif looks and self.num_steps == 0 and self.verdict.control.all_used_everywhere():
            self.verdict.warn_of_none_unused()

    def rest(self) -> None:
        """No backward is under way any more."""
        self.recovery.forget()
        self.arrivals.rest()

    # ---- besides

    def run_without_autograd(self) -> None:
        """A synchronized backward that touches nothing here: `sync_gradients`, or the shadow of a joined rank.

        Contract:
            Collective: matches the other ranks' backward.
        """
        backward = Backward(True, self._end, by_autograd=False)
        self.arm(backward)
        backward.end()

    def complete_aborted(self, status: Status) -> None:
        """Perform what is left of the last backward's collectives, and tell the other ranks that it raised."""
        self.arrivals.expect_nothing()
        self._buffers.are_in_line = False
        self.out_of_memory = ()
        with suppress(SkipError):  # the other ranks raise it; nothing was launched
            self._complete(status)
            self.out_of_memory = self.verdict.only_out_of_memory()
