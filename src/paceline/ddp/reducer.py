"""The reducer: one backward, from autograd's first gradient until every parameter has its reduced one.

Rules
1. Buckets are launched in order of index, on every rank, each at most once a backward. A bucket that is full waits for
   the ones before it.
2. The last bucket leaves when backward has ended: it carries how each rank's ended (status words, `verdict`).
3. Every backward outside `no_sync` reduces every bucket. What a rank did not use counts as zero. So the sequence of
   collectives depends on the number of synchronized backwards alone, never on which parameters they touched. A sync
   may leave out buckets, if all ranks have agreed in that backward that none of them needs these.
4. By linearity a second backward before `zero_grad` is right too. The mean of (old + new) is old + mean(new), because
   old is the same on every rank.
5. A gradient that arrives after its bucket has left is kept apart and reduced once more, on all ranks.
6. Where one backward runs through several modules on one process group, only the one that began first launches before
   the end: how their buckets would interleave depends on what a rank used.
7. No collective outside a synchronized backward. The exceptions are the constructor, buffers before a forward, `join`,
   an unfrozen parameter, and a backward that raised and has to be completed. A copy with synchronized batch
   normalisation communicates in its first forward.
8. A backward whose token autograd has dropped, and that was never ended, has raised. This rank's gradients go at once.
   The other ranks wait for its collectives: they are completed, and the others told, at this rank's next forward,
   window, evaluation or synchronization. Nothing may communicate while an exception is on its way. Gradients that a
   user has set meanwhile stay. A window that raises launches them at once, if that is all, and only waits later.
9. A failure of communication is for good: no step begins after it, until another reducer takes the place.

The stations of a gradient: autograd -> `Bucket.copy_in` or `make_message` -> `Reduction.launch` -> `set_gradients`.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.backward import Backward
from paceline.comm.collectives import device_for_metadata
from paceline.ddp.bucket import Bucket
from paceline.ddp.gradient_sync import SyncFactory
from paceline.ddp.layout import ManagedParameters
from paceline.ddp.membership import Membership
from paceline.ddp.open_forwards import OpenForwards, Owner, accumulates_everywhere
from paceline.ddp.ready_tracking import BucketCuts, ReadyTracker
from paceline.ddp.setting import Setting
from paceline.ddp.step import BackwardPass, BackwardPlan, Step
from paceline.ddp.verdict import Status, StatusVector, Verdict
from paceline.errors import ConfigurationError, ProtocolError, ReplicaMismatchError, StepDroppedError
from paceline.observe import StepTimings
from paceline.observe.timings import profiler_range
from paceline.reductions import StepEnd


@dataclass(frozen=True)
class StepSource:
    """The forwards that the reducer knows, and the functions that give it its plans and steps."""

    # Which forwards wait for a backward. Those of the reducer before this one are among them.
    open_forwards: OpenForwards

    # Called when a backward begins, with the forward that owns it.
    plan: Callable[[Owner | None], BackwardPlan]
    # Called with a step that has ended, and whether it ended well. Returns the next one.
    next_step: Callable[[Step, bool], Step]
    # Called with indices of unused parameters: raises ConfigurationError if one is another tensor than before.
    check_tensors: Callable[[Sequence[int]], None]


class Reducer:
    """Reduces the gradients of one module on one rank. The methods stand in the order in which they are called."""

    def __init__(
        self,
        managed: ManagedParameters,  # whose gradients
        setting: Setting,
        syncs: SyncFactory,  # how the buckets of each backward travel
        members: Membership,  # the ranks that take part
        timings: StepTimings,  # the last steps, also those of the reducer before this one
        step: Step,  # the one under way
        source: StepSource,
    ) -> None:
        groups, peers = members.groups, members.peers
        self.managed = managed
        self.setting = setting
        self.process_groups = list(groups.for_gradients)
        self.timings = timings
        self.step = step
        self._next_step, self._check_tensors = source.next_step, source.check_tensors

        self._plan = source.plan
        self._syncs = syncs
        self._peers = peers
        self._group_for_numbers = group = groups.numbers
        self._num_ranks = group.size()
        apart_on = device_for_metadata(group, setting.device) if setting.any_on_accelerator else None
        self._on_reduced: Callable[[Parameter], None] | None = None
        # By the last synchronized backward in which some were, or were looked for
        self.unused: list[int] | None = None
        self._is_retired = False
        self._successor: Reducer | None = None  # of the same ranks, while this one is retired
        # Why communication has failed for good, in words: the error holds the graph, whose hooks lead back here.
        self._failure: str | None = None
        self._trained_by = threading.get_ident()

        # Whether every rank's ended well
        self.verdict = Verdict(
            group.rank(),
            list(managed.named().items()),
            StatusVector(len(managed), self._num_ranks, group.rank(), members.number, apart_on),
            source.open_forwards,
        )
        # Which forwards wait for a backward, and to which one a backward belongs.
        self.open_forwards = source.open_forwards
        self.tracker = ReadyTracker(managed, setting, self._take, self._on_full)  # which bucket is full
        syncs.follow(managed, groups, peers, self.open_forwards, timings)
        # How gradients are cut into buckets, and when anew
        self.cuts = BucketCuts(managed, setting, self.tracker, self.verdict, groups, peers)
        self.buckets = self.cuts.cut()
        self.tracker.record_order()
        _reducers.add(self)

    def let_go(self) -> None:
        """Leave the parameters alone from now on, and keep nothing of the module alive."""
        self.tracker.stop()
        self._plan = _refuse_backward

    def retire(self) -> None:
        """Make room for another reducer. Backwards of this one's forwards begin at its successor, if at all. Local.

        An old graph may still refer to this, so groups and the gradients' memory are let go.
        """
        self.tracker.stop()
        self.tracker.listen_to([])
        self._is_retired = True
        _reducers.discard(self)
        self.process_groups.clear()
        self.buckets.clear()
        del self.step, self.cuts, self.verdict, self._syncs, self._peers, self._group_for_numbers

    def pass_on_to(self, successor: Reducer) -> None:
        """Let backwards of this reducer's forwards begin in its successor, for the same module and ranks."""
        self._successor = successor

    def _in_use(self) -> Reducer | None:
        """Return the reducer that took its place; None if that is of other ranks."""
        reducer: Reducer | None = self
        while reducer is not None and reducer._is_retired:
            reducer = reducer._successor
        return reducer

    @property
    def num_steps(self) -> int:
        """Return the number of synchronized backwards that ended well, also of earlier reducers."""
        return self.step.number - 1

    # ---- before a backward

    def prepare(self) -> str:
        """Complete the last backward, if it raised, before a forward that will be differentiated.

        Returns what `Verdict.confirm_suspicion` does. Local, unless that backward raised (rule 8). Raises ProtocolError
        if communication has failed for good.
        """
        self._trained_by = threading.get_ident()
        if self._failure is not None:
            raise ProtocolError(
                f"communication of this module failed earlier, and it cannot be trained any more: {self._failure}"
            )
        if self.step.is_interrupted:
            self._complete_interrupted(Status.ABORTED)
        return self.verdict.confirm_suspicion()

    def prepare_evaluation(self) -> None:
        """Prepare a forward without gradients. A module whose communication has failed may evaluate.

        On the thread that trains alone: an exception may be on its way there while another thread evaluates.
        """
        trains_here = threading.get_ident() == self._trained_by
        if trains_here and self.step.is_interrupted and not self.has_failed:
            with torch.inference_mode(mode=False), torch.enable_grad():
                self._complete_interrupted(Status.ABORTED)

    def step_within_backward(self, on_reduced: Callable[[Parameter], None] | None) -> None:
        """Set what to call for every parameter once its gradient is reduced (optimizers that step in backward)."""
        self._on_reduced = on_reduced

    def note_forward(self, forward_s: float) -> None:
        """Add the seconds of a forward that has ended."""
        if torch.is_grad_enabled():
            self.step.times.note_forward(forward_s)

    def watch(self, output_nodes: Sequence[Any]) -> None:
        """Begin as soon as a backward reaches one of these, the `grad_fn`s of the outputs of the last forward."""
        open_forwards = self.open_forwards
        forward = open_forwards.end(has_outputs=bool(output_nodes))
        owner = Owner(forward.is_recomputed, forward)
        could_train = any(parameter.requires_grad for parameter in self.managed.parameters)

        def on_output(counts_by_itself: bool, _: tuple[Tensor, ...]) -> None:
            open_forwards.close(forward)
            reducer = self._in_use() if self._is_retired else self
            if reducer is None or reducer._has_begun:
                return
            if reducer.tracker.pending.is_backward() or (counts_by_itself and accumulates_everywhere()):
                reducer.begin(owner)

        # An input that is returned beside real outputs has a graph of its own, which is not this module's.
        made_here = [node._sequence_nr() >= forward.begin for node in output_nodes]
        for node, is_made_here in zip(output_nodes, made_here, strict=True):
            counts_by_itself = could_train and (is_made_here or not any(made_here))
            node.register_prehook(functools.partial(on_output, counts_by_itself))

    # ---- a backward begins

    def begin(self, owner: Owner | None = None) -> BackwardPass:
        """Begin a backward that has reached the module. Without an `owner`, its forward, it is local."""
        if self.step.is_interrupted:
            self._complete_interrupted(Status.ABORTED)
        plan = self._plan(owner)
        if owner is not None:
            self.open_forwards.note_backward()
        elif plan.synchronizes:
            plan = BackwardPlan(synchronizes=False)
            self.verdict.warn_of_local_backward()
        ends_with_inner = owner is not None and owner.is_recomputed
        token = Backward(plan.synchronizes, self._end, ends_with_inner=ends_with_inner)
        torch.autograd.Variable._execution_engine.queue_callback(token.end)
        return self._arm(token, plan)

    def _arm(self, token: Backward, plan: BackwardPlan) -> BackwardPass:
        """Make ready for a backward: its scales, its sync, how many gradients each bucket waits for."""
        with profiler_range("started"):
            reduction, expected = self.setting.reduction, self.tracker.pending
            expected.begin()
            backward = BackwardPass(
                weakref.ref(token, self._note_raised),
                plan,
                self.step,
                reduction,
                self._launches_early(),
                expected.reached,
                self._record,
            )
            self.step.begin(backward)
            try:
                sync = self._syncs.begin(backward, self.buckets)  # the step before is over now
            except Exception as error:
                self.abandon(error)
                raise
            divisor = plan.divisor or self._num_ranks
            backward.start(sync, plan.weight, plan.weight / divisor)
            if plan.synchronizes:  # a reduction may refuse it: giving it up then needs the sync
                backward.scale_by(reduction.begin_step(divisor, plan.active_ratio, plan.share))
            self.tracker.arm(plan.synchronizes, token.started_s, sync.not_expected)
        return backward

    def _running(self) -> BackwardPass:
        """Return the backward under way. It begins here if it has made a gradient, but passed no watched output."""
        if (backward := self.step.backward) is None or backward.token() is None:
            return self.begin(self.open_forwards.owner_of_running_backward())
        return backward

    # ---- a gradient is there

    def _take(self, bucket: Bucket, slot: int, parameter: Parameter) -> None:
        """Take in a large gradient that autograd has finished. Small ones are in the buffer already."""
        backward = self._running()
        if not self.tracker.has_foreign_hooks(parameter) and bucket.num_expected:
            if backward.plan.synchronizes:
                bucket.copy_in(slot, backward.scale)
            else:
                bucket.accumulate(slot)

    def _on_full(self, bucket: Bucket) -> None:
        backward = self._running()
        if bucket.has_message or not backward.plan.synchronizes or not self.tracker.is_full(bucket):
            return
        with profiler_range("ready"):
            bucket.mark_ready(time.perf_counter())
        if not self.tracker.has_foreign_hooks(bucket.finished[-1]):
            self._launch_ready(backward)  # else with the next full bucket: those hooks want `.grad`

    def _launch_ready(self, backward: BackwardPass) -> None:
        last = len(self.buckets) - 1 if backward.launches_early else 0
        try:
            if not backward.sync.may_launch():
                return
        except Exception as error:
            self.abandon(error)
            raise
        while (place := backward.sync.num_launched) < last and self.buckets[place].ready_s:
            self._launch(backward, self.buckets[place])

    def _launch(self, backward: BackwardPass, bucket: Bucket) -> None:
        with profiler_range("launched"):
            if not bucket.has_message and backward.sync.is_needed(bucket):
                if (origins := self.tracker.origins) is not None:
                    origins.order()
                used_before = backward.step.used_before
                bucket.make_message(backward.scale, backward.mean_scale, used_before, has_ended=False)
            try:
                backward.sync.launch(bucket)
            except Exception as error:
                self.abandon(error)
                raise

    # ---- backward has ended

    def _end(self, token: Backward) -> None:
        """Called by autograd when it has nothing left to do."""
        backward = self.step.backward
        if backward is None or backward.token() is not token or token.waits_for_outer_end():
            return
        ended_well = False
        try:
            if backward.plan.synchronizes:
                self._finish(backward)
                ended_well = True
                if not self.cuts.has_followed and self.cuts.follow():
                    self.buckets = self.cuts.cut()
            else:
                self._end_unsynchronized()
                self.step.times.note_earlier_backward(time.perf_counter() - backward.started_s)
        except StepDroppedError:
            self.drop_gradients()
            raise
        except Exception as error:
            self.abandon(error)
            raise
        finally:
            self.step.end_backward()
            self.tracker.rest()
            if backward.plan.synchronizes and not self.has_failed:
                self.step = self._next_step(self.step, ended_well)

    def _end_unsynchronized(self) -> None:
        for bucket in self.buckets:
            self.step.used_before.update(
                id(bucket.parameters[slot]) for slot in bucket.slots_with_gradients()
            )
            bucket.drop_unwritten()

    def _finish(self, backward: BackwardPass) -> None:
        """Reduce the rest, wait for everything, and give every parameter its gradient.

        Collective: once a synchronized backward; blocks. Gradients are bitwise equal afterwards. They are undefined
        after an error. Raises StepDroppedError if another rank's backward raised or ranks disagree. Raises
        PeerLostError if a rank died or hangs.
        """
        ended_s = time.perf_counter()
        sync, step = backward.sync, backward.step
        if (error := sync.agree()) is not None:
            self._complete(backward, Status.ABORTED)
            raise error
        unused = self._complete(backward, Status.GOOD)
        waited_s = time.perf_counter() - ended_s
        try:
            asks_uses = bool(unused) or (self.setting.find_unused_parameters and step.number == 1)
            statuses = self.verdict.reach(step.number, self.setting.reduction, asks_uses)
            if statuses.buffers_have_changed:
                step.buffers.follow_change()
        except (ProtocolError, ReplicaMismatchError):
            sync.wait()  # the words came last: for Gloo, whose threads may end in another order
            self.drop_gradients()
            raise
        backward.note_statuses(unused, statuses)
        if backward.by_autograd and (unused or self.setting.find_unused_parameters):
            self._note_unused(backward)
        self.tracker.pending.learn(self.buckets)
        self._peers.note_step(step.number)
        last_gradient_s = max(bucket.ready_s for bucket in self.buckets)
        step.times.end_backward(backward.started_s, ended_s, last_gradient_s)
        has_late = bool(statuses.words) and bool(statuses.ranks_with(Status.LATE_GRADIENTS))
        # Gradients that are not finite are looked at before the next forward.
        is_whole = backward.by_autograd and self._on_reduced is None
        is_whole = is_whole and not has_late and not statuses.ranks_not_finite
        if is_whole and sync.defer(backward):
            return
        sync.wait()
        if has_late:
            self._reduce_late(backward)
        self._set_gradients(backward)
        self.verdict.suspect_first_not_finite(statuses, step.number, self.cuts.order)
        backward.conclude(waited_s)

    def _record(self, backward: BackwardPass, waited_s: float) -> None:
        """Record the step's times when all gradients have arrived; it waited `waited_s` for them."""
        sync, step, is_used = backward.sync, backward.step, backward.statuses.is_used
        unused_by_all = [self.managed.parameters[index] for index in backward.unused if not is_used(index)]
        buckets = sync.timings()
        exposed_s = min(waited_s, sum(bucket.waited_s for bucket in buckets))
        timing = step.times.record(step.number, exposed_s, buckets)
        self.timings.add(timing, sync.device_times())
        self.setting.reduction.end_step(StepEnd(timing, unused_by_all, self.timings.settled_last))

    def _complete(self, backward: BackwardPass, status: Status) -> list[int]:
        """Launch the remaining buckets, and wait for the ranks' status words. Returns unused parameters."""
        unused = self._launch_rest(backward, status)
        self._wait_for_status(backward)
        return unused

    def _launch_rest(self, backward: BackwardPass, status: Status) -> list[int]:
        """Launch the remaining buckets, the last with status words. Returns unused parameters."""
        sync, step = backward.sync, backward.step
        remaining = self.buckets[sync.num_launched :]
        for bucket in remaining:
            if not bucket.ready_s:
                with profiler_range("ready"):
                    bucket.mark_ready(time.perf_counter())
            if sync.is_needed(bucket):
                bucket.make_message(backward.scale, backward.mean_scale, step.used_before, has_ended=True)
        unused = [index for bucket in self.buckets for index in bucket.unused_members()]
        not_finite = [bucket.not_finite for bucket in self.buckets if bucket.not_finite is not None]
        if status is Status.GOOD and any(bucket.has_late_gradients() for bucket in self.buckets):
            status = Status.LATE_GRADIENTS
            self.tracker.pending.wait_for_end()
            self.verdict.warn_of_late_gradients()
        num_open = self.open_forwards.word(backward.by_autograd)
        self.verdict.status.write(unused, status, num_open, not_finite, step.buffers.have_changed())
        for bucket in remaining:
            self._launch(backward, bucket)
        step.buffers.launch_at_end(self.setting.reduction)
        return unused

    def _wait_for_status(self, backward: BackwardPass) -> None:
        if not backward.sync.wait_for_status():
            self.verdict.exchange(self._group_for_numbers, self._peers)
        backward.step.buffers.finish()

    def _reduce_late(self, backward: BackwardPass) -> None:
        """Sum late gradients over all ranks: those that arrived after their bucket was sent or left out (rule 5)."""
        for bucket in self.buckets:
            pending = backward.sync.launch_late(bucket, backward.mean_scale)
            self._peers.wait(pending, "reducing late gradients")

    def _set_gradients(self, backward: BackwardPass) -> None:
        """Give every parameter its reduced gradient; those that no rank used get what they had."""
        with profiler_range("attached"):
            for bucket in self.buckets:
                backward.set_gradients(bucket)
            if self._on_reduced is not None:
                for parameter in self.managed.parameters:
                    self._on_reduced(parameter)

    def _note_unused(self, backward: BackwardPass) -> None:
        self._check_tensors(backward.unused)
        self.unused = backward.unused
        looks = self.setting.find_unused_parameters
        if unused := backward.sync.unexplained(backward.unused):
            self.tracker.pending.look()
            if not (looks or self.setting.static_graph):
                self.verdict.warn_of_unused(unused)
        elif looks and backward.step.number == 1 and set(backward.statuses.uses) == {self._num_ranks}:
            self.verdict.warn_of_none_unused()

    def run_without_autograd(self, plan: BackwardPlan) -> None:
        """Run a synchronized backward that touches nothing here: `sync_gradients`, or a joined rank's. Collective."""
        token = Backward(True, self._end, by_autograd=False)
        self._arm(token, plan)
        token.end()

    # ---- several modules in one backward

    @property
    def _has_begun(self) -> bool:
        """Return whether a backward is under way here."""
        return self.step.backward is not None and self.step.backward.token() is not None

    def _launches_early(self) -> bool:
        """Return whether no other module over one of these groups is in a synchronized backward (rule 6)."""
        return len(_reducers) == 1 or not any(map(self._meets, _reducers))

    def _meets(self, other: Reducer) -> bool:
        backward = other.step.backward
        is_active = (
            other is not self and other._has_begun and backward is not None and backward.plan.synchronizes
        )
        return is_active and any(a is b for a in self.process_groups for b in other.process_groups)

    # ---- giving up a step

    @property
    def has_failed(self) -> bool:
        """Return whether communication has failed for good."""
        return self._failure is not None

    def abandon(self, error: Exception) -> None:
        """Drop this step: communication has failed for good (rule 9). Local."""
        self._failure = str(error)
        self.drop_gradients()

    def give_up(self, status: Status, waits: bool) -> tuple[int, ...]:
        """End this step on all ranks without gradients, whether its backward has begun or not.

        Returns the ranks that ran out of memory, if nothing else went wrong on any. Collective; blocks if it `waits`,
        or if launching the buckets does not tell the other ranks. Otherwise the next forward waits.
        """
        backward = self.step.backward
        if backward is None or not backward.plan.synchronizes:
            self.step.end_backward()
            self.tracker.rest()
            backward = self._arm(Backward(True, _never_ended, by_autograd=False), BackwardPlan())
        self.open_forwards.forget()
        if waits or not backward.sync.tells_by_launching:
            return self._complete_interrupted(status)
        self.tracker.expect_nothing()
        try:
            backward.sync.agree()
            self._launch_rest(backward, status)
        except Exception as error:
            self.abandon(error)
            raise
        self.drop_gradients()
        return ()

    def drop_step(self) -> None:
        """Replace the step under way by a new one, which takes over its buffers. Local.

        No rank may wait for collectives of the old one.
        """
        self.drop_gradients()
        if not self.has_failed:
            buffers, self.step = self.step.buffers, self._next_step(self.step, False)
            self.step.exchange_buffers(buffers)

    def drop_gradients(self) -> None:
        """Forget all gradients of this rank."""
        for parameter in self.managed.parameters:
            parameter.grad = None
        self.step.used_before.clear()

    def _note_raised(self, token: weakref.ref[Backward]) -> None:
        backward = self.step.backward
        if backward is not None and backward.token is token and backward.plan.synchronizes:
            self.drop_gradients()

    def _complete_interrupted(self, status: Status) -> tuple[int, ...]:
        """Complete the collectives of a backward that raised, tell the others this status, drop this rank's gradients.

        Returns as `give_up`. Collective if that backward synchronizes; blocks.
        """
        backward = self.step.backward
        assert backward is not None, "no backward was interrupted"
        self.step.end_backward()
        out_of_memory: tuple[int, ...] = ()
        if backward.plan.synchronizes:
            raised, parameters = backward.token() is None, self.managed.parameters
            set_since = [parameter.grad if raised else None for parameter in parameters]
            try:
                out_of_memory = self._complete_collectives(backward, status)
            except Exception as error:
                self.abandon(error)
                raise
            self.drop_gradients()
            for parameter, gradient in zip(parameters, set_since, strict=True):
                parameter.grad = gradient
            self.step = self._next_step(self.step, False)
        self.tracker.rest()
        return out_of_memory

    def _complete_collectives(self, backward: BackwardPass, status: Status) -> tuple[int, ...]:
        sync = backward.sync
        self.tracker.expect_nothing()
        with suppress(StepDroppedError):  # the other ranks raise it; nothing was launched
            if sync.num_launched < len(self.buckets):  # else `give_up` has not waited
                sync.agree()
                self._launch_rest(backward, status)
            self._wait_for_status(backward)
            sync.wait()  # as in `_finish`
            return self.verdict.status.read().only_out_of_memory
        return ()


def _refuse_backward(_: Owner | None) -> BackwardPlan:
    raise ConfigurationError(
        "the wrapper of this backward's forward is gone, so it cannot reduce gradients: keep the wrapped model "
        "in a variable until backward has returned."
    )


def _never_ended(_: Backward) -> None:
    """Ignore the end of a backward that is given up as soon as it has begun."""


_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
"""Of all wrapped modules: autograd may run through several in one backward."""
