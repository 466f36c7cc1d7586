"""When a bucket leaves: the life of one backward, from autograd's first gradient to the last rank's answer.

Rules
1. Buckets are launched in order of index, on every rank, each at most once a backward. A bucket that is full waits for
   the ones before it.
2. The last bucket leaves when backward has ended: it carries the ranks' word on how theirs ended (`control`).
3. Every backward outside `no_sync` reduces every bucket. What a rank did not use counts as zero. So the sequence of
   collectives depends on the number of synchronized backwards alone, never on which parameters they touched.
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
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import allocate_zeros, launch_sum
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket, Scales
from paceline.ddp.buffers import Buffers
from paceline.ddp.control import NOT_COUNTED, ControlWords, Status
from paceline.ddp.expectations import NEVER, Expectations
from paceline.ddp.flight import Flight
from paceline.ddp.layout import GradientMemory, ManagedParameters
from paceline.ddp.listener import Listener
from paceline.ddp.plan import BucketCaps
from paceline.ddp.ready_order import ReadyOrder, hook_gradient
from paceline.ddp.remarks import Remarks
from paceline.errors import PeerAbortedError, ProtocolError
from paceline.observe import StepTiming, StepTimings
from paceline.reductions import Mean, Reduction


@dataclass(frozen=True)
class ReducerOptions:
    """The caller's choices.

    Attributes:
        caps: When a bucket is full.
        find_unused_parameters: Look for unused parameters when backward begins, from the first one on.
        static_graph: Every backward touches the same parameters equally often; learn how often from the first one.
    """

    caps: BucketCaps
    find_unused_parameters: bool
    static_graph: bool


class Backward:
    """One backward under way. The autograd engine owns it: if it is gone and was never ended, backward raised."""

    def __init__(self, synchronizes: bool, end: Callable[[Backward], None], by_autograd: bool = True) -> None:
        self.synchronizes = synchronizes
        self.by_autograd = by_autograd
        self.started_s = time.perf_counter()
        self._end = end

    def end(self) -> None:
        self._end(self)


class _Forward:
    """A forward whose backward is still to come."""

    def __init__(self) -> None:
        self.is_open = True


_under_way: list[Reducer] = []
"""Reducers in a synchronized backward, in the order in which they began; the engine may run through several."""


class Reducer:
    """Reduces the gradients of one module on one rank."""

    def __init__(
        self,
        managed: ManagedParameters,
        options: ReducerOptions,
        process_groups: Sequence[ProcessGroup],
        peers: Peers,
        buffers: Buffers,
    ) -> None:
        self.managed = managed
        self.options = options
        self.process_groups = list(process_groups)
        self.reduction: Reduction = Mean()
        self.timings = StepTimings()
        self.forward_s = 0.0
        self.num_steps = 0  # synchronized backwards that ended well
        self.num_averaged: int | None = None  # what to divide by, if not all ranks (`join` leaves some out)
        self.weight = 1.0  # of this rank's gradients in the mean; over the ranks, weights average to 1
        self.synchronizes: Callable[[], bool] = lambda: True
        self.synchronizes_buffers = False
        self.on_reduced: Callable[[Parameter], None] | None = (
            None  # called for each parameter, gradient attached
        )
        self.has_rebuilt_buckets = False

        self._peers = peers
        self._buffers = buffers
        self._rank, self._num_ranks = self.process_groups[0].rank(), self.process_groups[0].size()
        self._control = ControlWords(len(managed), self._num_ranks, self._rank)
        self._memory = GradientMemory(
            managed, options.caps, self._control, functools.partial(allocate_zeros, self.process_groups[0])
        )
        self.expectations = Expectations(managed, options.find_unused_parameters, options.static_graph)
        self._remarks = Remarks(self._rank, managed.names)
        self._hooks: list[Any] = []

        self._backward: weakref.ref[Backward] | None = None
        self._failure: Exception | None = None
        self._forward: _Forward | None = None  # the last one, until its outputs are known
        self._num_open_forwards = 0
        self._counts_forwards = True
        self._used_before: set[int] = set()  # touched without synchronization since the last one
        self._unused_last: set[int] = set()  # by the last synchronized backward, on this rank
        self._futures: list[torch.futures.Future[Any]] = []  # of buffer hooks; awaited when backward ends

        self._cut(range(len(managed) - 1, -1, -1))
        self.ready_order = ReadyOrder(managed.parameters)

    # ---- buckets and hooks

    def _cut(self, order: Sequence[int]) -> None:
        self._order = list(order)
        for hook in self._hooks:
            hook.remove()
        self.buckets = self._memory.cut(self._order)
        self._listeners = [Listener(bucket, self._on_full) for bucket in self.buckets]
        self._hooks = [
            hook_gradient(parameter, self._make_hook(bucket, slot))
            for bucket in self.buckets
            for slot, parameter in enumerate(bucket.parameters)
        ]

    def _make_hook(self, bucket: Bucket, slot: int) -> Callable[[Tensor], None]:
        listener = self._listeners[bucket.index]
        if slot >= bucket.num_large:
            return listener.on_last_small if slot == len(bucket.members) - 1 else listener.on_small
        touched = bucket.touched
        touch = touched.append

        def on_large_gradient(parameter: Any) -> None:
            touch(parameter)
            backward = self._current() or self.begin()
            if not self._has_foreign_hooks(parameter):
                if backward.synchronizes:
                    bucket.enter(slot, self._scales.input)
                else:
                    bucket.settle(slot)
            if len(touched) == bucket.expected:
                self._on_full(bucket)

        return on_large_gradient

    def remove_hooks(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.ready_order.stop()

    # ---- before a backward

    def prepare(self, opens_step: bool = False) -> None:
        """Before a forward that will be differentiated.

        Args:
            opens_step: Whether a backward should follow, on every rank.

        Contract:
            Local, unless this rank's last backward raised: then it completes that backward's collectives, for which
            the other ranks are waiting, and tells them.

        Raises:
            ProtocolError: Communication has failed for good.
        """
        if self._failure is not None:
            raise ProtocolError(
                f"communication of this module failed earlier: {self._failure}"
            ) from self._failure
        if self._backward is not None and self._backward() is None:
            self._recover()
        if opens_step:
            self._forward = _Forward()
            self._num_open_forwards += 1

    def _recut(self, order: list[int]) -> None:
        """Lay the buckets out in the order observed; gradients that are alive move along."""
        alive = [
            (p, p.grad.clone())
            for p in self.managed.parameters
            if p.grad is not None and not p.grad.is_sparse
        ]
        for parameter, _ in alive:
            parameter.grad = None
        self._cut(order)
        for bucket in self.buckets:
            bucket.disarm()
        gradients = {id(parameter): gradient for parameter, gradient in alive}
        for bucket in self.buckets:
            bucket.take_over(gradients)

    def watch(self, output_nodes: Sequence[Any]) -> None:
        """Begin as soon as a backward reaches one of these, the `grad_fn`s of the outputs of the last forward."""
        forward, self._forward = self._forward, None

        def on_output(_: tuple[Tensor, ...]) -> None:
            self._close(forward)
            if self._current() is None and self.expectations.is_backward():
                self.begin()

        for node in output_nodes:
            node.register_prehook(on_output)
        if forward is not None and not output_nodes:
            self._counts_forwards = False  # its backward will come unseen

    def _close(self, forward: _Forward | None) -> None:
        if forward is not None and forward.is_open:
            forward.is_open = False
            self._num_open_forwards -= 1

    # ---- during a backward

    def _current(self) -> Backward | None:
        return None if self._backward is None else self._backward()

    def begin(self) -> Backward:
        """Backward has reached the module: decide whether it synchronizes, and be told when it ends."""
        if self._backward is not None:
            self._recover()
        backward = Backward(self.synchronizes(), self._end)
        torch.autograd.Variable._execution_engine.queue_callback(backward.end)
        self._arm(backward)
        return backward

    def _arm(self, backward: Backward) -> None:
        self._backward = weakref.ref(backward)
        self._was_synchronizing, self._by_autograd = backward.synchronizes, backward.by_autograd
        self._flight = Flight(self.reduction, self.process_groups, self._peers)
        self._launches_early = not any(map(self._shares_group_with, _under_way))
        if backward.synchronizes:
            _under_way.append(self)
        num_averaged = self.num_averaged or self._num_ranks
        if backward.synchronizes:
            self.reduction.begin_step()
        self._scales = Scales(
            input=self.weight * self.reduction.input_scale(num_averaged), mean=self.weight / num_averaged
        )
        expected = self.expectations.touches if backward.synchronizes else lambda _: NEVER
        self.expectations.begin()
        for bucket, listener in zip(self.buckets, self._listeners, strict=True):
            first_touches = list(bucket.touched)  # of the hook that called us, when no output was watched
            bucket.arm(expected(bucket.members))
            bucket.touched.extend(first_touches)
            if bucket.expected == 0:
                bucket.ready_s = backward.started_s
            if bucket.expected in (NEVER, len(bucket.members)) and not self.ready_order.is_listening:
                listener.listen_quickly()

    def _shares_group_with(self, other: Reducer) -> bool:
        is_active = other is not self and other._current() is not None
        return is_active and any(a is b for a in self.process_groups for b in other.process_groups)

    def _on_full(self, bucket: Bucket) -> None:
        backward = self._current()
        if backward is None:
            backward = self.begin()
            if len(bucket.touched) != bucket.expected:
                return
        if bucket.launched or not backward.synchronizes:
            return
        if not self.expectations.counted and not bucket.is_complete():
            return  # one parameter twice, another not yet: this bucket leaves when backward has ended
        bucket.ready_s = time.perf_counter()
        if not self._has_foreign_hooks(bucket.touched[-1]):
            self._launch_ready()  # otherwise with the next full bucket: those hooks want to see `.grad`

    def _has_foreign_hooks(self, parameter: Any) -> bool:
        return len(parameter._post_accumulate_grad_hooks) > 1 + self.ready_order.is_listening

    def _launch_ready(self) -> None:
        last = len(self.buckets) - 1 if self._launches_early else 0
        while (place := self._flight.num_launched) < last and self.buckets[place].ready_s:
            self._launch(self.buckets[place])

    def _launch(self, bucket: Bucket) -> None:
        if not bucket.launched:
            bucket.collect(self._scales, self._used_before, has_ended=False)
        try:
            self._flight.launch(bucket, is_last=bucket is self.buckets[-1])
        except Exception as error:
            self._failure = error
            raise

    # ---- end of a backward

    def _end(self, backward: Backward) -> None:
        if self._current() is not backward:
            return
        try:
            if backward.synchronizes:
                self._finish(backward)
                self._rebuild_once()
            else:
                self._end_unsynchronized()
        except Exception as error:
            if not isinstance(error, PeerAbortedError):
                self._failure = error
            raise
        finally:
            self._rest()

    def _rebuild_once(self) -> None:
        """After the first synchronized backward: lay the buckets out in the order that rank 0 observed."""
        if self.has_rebuilt_buckets:
            return
        order = self.ready_order.agree(
            self._order, self._control.words.device, self.process_groups[0], self._peers
        )
        self.has_rebuilt_buckets = True
        if order != self._order:
            self._recut(order)

    def _rest(self) -> None:
        self._backward = None
        if self in _under_way:
            _under_way.remove(self)
        for bucket, listener in zip(self.buckets, self._listeners, strict=True):
            bucket.disarm()
            listener.listen_carefully()

    def _end_unsynchronized(self) -> None:
        for bucket in self.buckets:
            self._used_before.update(bucket.members[slot] for slot in bucket.touched_slots())
            bucket.drop_installed()

    def _finish(self, backward: Backward) -> None:
        """Reduce what is left, wait for everything, give every parameter its gradient.

        Contract:
            Collective: every rank, once a synchronized backward.  Blocks: yes.  Mutates: `.grad` of all parameters.
            Afterwards: bitwise equal on all ranks.

        Raises:
            PeerAbortedError: Another rank's backward raised; gradients are undefined on all ranks.
            PeerLostError: A rank died or hangs; gradients are undefined.
        """
        ended_s = time.perf_counter()
        status = self._note_late()
        unused = self._complete(status)
        self._unused_last = set(unused)
        waited_s = time.perf_counter() - ended_s
        self._control.read()
        self._raise_if_aborted()
        self._raise_if_out_of_step()
        if late := self._control.ranks_with(Status.LATE_GRADIENTS):
            self._raise_if_not_linear(late[0])
            self._reduce_late()
        self._attach(unused)
        if backward.by_autograd:
            self._remark_on(unused)
        self.expectations.learn(self.buckets)
        self.num_steps += 1
        self._used_before.clear()
        buckets = self._flight.timings()
        exposed_s = min(waited_s, sum(bucket.waited_s for bucket in buckets))
        timing = StepTiming(
            step=self.num_steps,
            forward_s=self.forward_s,
            started_s=backward.started_s,
            backward_s=ended_s - backward.started_s,
            exposed_s=exposed_s,
            buckets=buckets,
        )
        self.timings.add(timing)
        self.reduction.end_step(timing)

    def _note_late(self) -> Status:
        if not any(bucket.has_late_gradients() for bucket in self.buckets):
            return Status.GOOD
        self.expectations.surprise()
        self._remarks.late_gradients()
        return Status.LATE_GRADIENTS

    def _complete(self, status: Status) -> list[int]:
        """Launch the remaining buckets, the last with our words, and wait for all. Returns the unused parameters."""
        remaining = self.buckets[self._flight.num_launched :]
        for bucket in remaining:
            bucket.ready_s = bucket.ready_s or time.perf_counter()
            bucket.collect(self._scales, self._used_before, has_ended=True)
        unused = [index for bucket in self.buckets for index in bucket.untouched_members()]
        counts = self._counts_forwards and self._by_autograd
        self._control.write(unused, status, self._num_open_forwards if counts else NOT_COUNTED)
        for bucket in remaining[:-1]:
            self._launch(bucket)
        self._launch(remaining[-1])
        if self.synchronizes_buffers and self.reduction.carries_words:
            self._buffers.launch()
        self._flight.wait()
        if not self.reduction.carries_words or self.buckets[-1].words is None:
            self._exchange_words()
        if self.synchronizes_buffers and not self.reduction.carries_words:
            self._buffers.launch()  # not earlier: a hook's callbacks may have been starting collectives
        self._buffers.finish()
        torch.futures.wait_all(self._futures)
        self._futures = []
        return unused

    def _exchange_words(self) -> None:
        if self._num_ranks > 1:
            words = launch_sum(self._control.words, self.process_groups[0])
            self._peers.wait(words, "waiting for the ranks' statuses")

    def _raise_if_aborted(self) -> None:
        aborted = self._control.ranks_with(Status.ABORTED)
        if aborted:
            self.drop_gradients()
            raise PeerAbortedError(
                f"rank {self._rank}: the backward of rank {aborted[0]} raised an exception in step "
                f"{self.num_steps + 1}. This step's gradients are undefined on every rank and were dropped; "
                "parameters are untouched. Look at that rank's output for the cause; training may go on with "
                "the next batch."
            )

    def _raise_if_out_of_step(self) -> None:
        counts = self._control.open_forwards()
        if len(set(counts.values())) <= 1:
            return
        self.drop_gradients()
        self._num_open_forwards = 0
        most = max(counts, key=counts.__getitem__)
        least = min(counts, key=counts.__getitem__)
        raise PeerAbortedError(
            f"rank {self._rank}: the ranks are not in the same step: rank {most} has run {counts[most]} forward(s) in "
            f"training mode without a backward, rank {least} {counts[least]}. Either rank {most} skipped a backward or "
            "caught an exception before its backward reached the module, so that its batches are one ahead of the "
            "others'; or it ran a forward by itself, which belongs under torch.no_grad() or in evaluation mode. The "
            f"gradients of step {self.num_steps + 1} were dropped on every rank; parameters are untouched."
        )

    def _raise_if_not_linear(self, late: int) -> None:
        if self.reduction.is_linear:
            return
        self.drop_gradients()
        raise PeerAbortedError(
            f"rank {self._rank}: gradients of rank {late} arrived after their bucket had left, which "
            f"{self.reduction!r} cannot add afterwards. This step's gradients were dropped on every rank; parameters "
            "are untouched. Pass static_graph=True if every step uses the same graph. Otherwise go on with the next "
            "batch: from now on that rank's buckets wait for the end of backward."
        )

    def _reduce_late(self) -> None:
        """Sum what arrived after its bucket had left, on all ranks (rule 5)."""
        for bucket in self.buckets:
            pending = bucket.launch_late(self._scales.mean, self._flight.group_of(bucket))
            self._peers.wait(pending, "reducing late gradients")
            bucket.add_late()

    def _attach(self, unused: list[int]) -> None:
        used_somewhere = self._control.is_used() if unused else []
        for bucket in self.buckets:
            bucket.attach(used_somewhere.__getitem__)
        if unused_everywhere := [index for index in unused if not used_somewhere[index]]:
            self.reduction.withdraw([self.managed.parameters[index] for index in unused_everywhere])
        if self.on_reduced is not None:
            for parameter in self.managed.parameters:
                self.on_reduced(parameter)

    def _remark_on(self, unused: list[int]) -> None:
        looks = self.options.find_unused_parameters
        if unused:
            self.expectations.predicts = True
            if not (looks or self.options.static_graph):
                self._remarks.unused(unused)
        elif looks and self.num_steps == 0 and self._control.all_used_everywhere():
            self._remarks.none_unused()

    # ---- backwards without autograd

    def _recover(self) -> None:
        """This rank's last backward raised: complete its collectives, tell the others, drop its gradients."""
        self._backward = None
        if self._was_synchronizing:
            for bucket in self.buckets:
                bucket.expected = NEVER
            try:
                self._complete(Status.ABORTED)
            except Exception as error:
                self._failure = error
                raise
            self.drop_gradients()
        self._rest()

    @property
    def is_interrupted(self) -> bool:
        """Whether a backward began and, once autograd has returned, was not completed."""
        return self._backward is not None

    @property
    def has_failed(self) -> bool:
        """Whether communication has failed for good."""
        return self._failure is not None

    def fail(self, error: Exception) -> None:
        """Communication beside the buckets has failed for good: refuse to begin another step."""
        self._failure = error

    def abort(self) -> None:
        """Give up this step: complete its collectives, tell the other ranks, drop this rank's gradients.

        Contract:
            Collective: matches the other ranks' synchronized backward, whether this rank's has begun or not.
        """
        if not (self.is_interrupted and self._was_synchronizing):
            self._rest()
            self._arm(Backward(True, self._end, by_autograd=False))
        self._recover()
        self._num_open_forwards = 0

    def run_without_autograd(self) -> None:
        """A synchronized backward that touches nothing here: `sync_gradients`, or the shadow of a joined rank.

        Contract:
            Collective: matches the other ranks' backward.
        """
        backward = Backward(True, self._end, by_autograd=False)
        self._arm(backward)
        backward.end()

    def wait_at_end(self, futures: list[torch.futures.Future[Any]]) -> None:
        """Wait for these, too, when the next synchronized backward ends."""
        self._futures += futures

    def set_static_graph(self) -> None:
        """As the option `static_graph`, before the first step."""
        if self.num_steps > 0 or self._used_before:
            raise RuntimeError(
                f"_set_static_graph() was called after {self.num_steps} synchronized steps. The first backward is the "
                "one that counts a static graph, so call it before, or pass static_graph=True to the constructor."
            )
        self.options = replace(self.options, static_graph=True)
        self.expectations.expect_static_graph()

    def check_finished(self) -> None:
        """Raise if a backward began and was not completed."""
        if self._backward is not None:
            raise ProtocolError(
                "Expected to have finished reduction in the prior iteration before starting a new one: "
                "the last backward raised before all gradients were there."
            )

    def _get_local_used_map(self) -> Tensor:
        """Torch's name: 1 for every parameter that the last step used on this rank."""
        unused = self._unused_last
        if self._used_before:
            unused = set(range(len(self.managed))) - self._used_before
        return torch.tensor(
            [int(index not in unused) for index in range(len(self.managed))], dtype=torch.int32
        )

    def _ddp_graph_static(self) -> bool:
        """Torch's name: whether the graph has looked static so far."""
        return not self.expectations.predicts and not self.expectations.defers

    # Torch's names: what Lightning calls itself where a training step runs its own backwards within forward.

    def _rebuild_buckets(self) -> bool:
        """Not needed: buckets are laid out anew when the first synchronized backward ends."""
        return False

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Watch these outputs of a forward that has not returned yet; without any, the first gradient tells."""
        if outputs:
            self.watch([tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None])

    def _delay_all_reduce(self) -> None:
        """Not needed: the first step of a static graph is reduced when its backward ends, not afterwards."""

    def drop_gradients(self) -> None:
        """Forget all gradients of this rank."""
        for parameter in self.managed.parameters:
            parameter.grad = None
        self._used_before.clear()
