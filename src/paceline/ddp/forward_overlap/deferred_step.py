"""The life of a step that is deferred: backward has ended, its gradients are under way, the next forward runs.

Rules
1. What is exchanged is the same on every rank: from the step on in which the ranks agree, gradients are sent in pieces,
   in the agreed order, and the status words apart from them. When a rank waits is its own affair: flushing early, or
   at once, never changes what it sends.
2. No parameter is stepped before every rank's backward is known to have ended well: backward itself waits for the
   status words. So a rank that raised is reported before any parameter is touched.
3. Calls while gradients are under way (`optimizer.step`, `zero_grad`) are noted. As buckets arrive, they are repeated
   bucket by bucket, in their order, with the settings and modes of torch that they were made with.
4. Parameters change on the thread that asks for them, where it asks: before a module's forward, or at a read
   (`outstanding`). The one exception is a dropped wrapper: its step is completed when Python notices.
5. A process that is forked from this one has no threads that gradients could arrive on. So steps are completed before.
6. A parameter is outstanding until its step is whole. If its bucket does not arrive, or the optimizer raises, it stays
   so, and every read raises. So a half-stepped model is not saved by mistake.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from paceline.comm.opened_groups import close
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket
from paceline.ddp.forward_overlap import outstanding
from paceline.ddp.forward_overlap.agreement import Agreement
from paceline.ddp.forward_overlap.open_step import (
    Action,
    DeferredStep,
    Moment,
    NaNMask,
    outside_transforms,
    zero_gradients,
)
from paceline.ddp.forward_overlap.outstanding import FirstUseTimes, install, lock
from paceline.ddp.forward_overlap.piece_sync import HALF_STEPPED, PieceSync
from paceline.ddp.gradient_sync import SyncFactory
from paceline.ddp.layout import ManagedParameters
from paceline.ddp.membership import Groups
from paceline.ddp.open_forwards import OpenForwards
from paceline.ddp.step import BackwardPass, GradientSync
from paceline.errors import PeerLostError, ProtocolError
from paceline.observe import StepTimings
from paceline.planning.forward_overlap import Gain

if TYPE_CHECKING:
    from paceline.optim.behind_forward import BehindForward

GRACE_S = 1.0  # for sums under way when the program ends with an error


class ForwardOverlap(SyncFactory):
    """The factory of syncs whose end is deferred into the next forward, for one module on one rank.

    The ranks agree over the script's `process_group`; `piece_group` carries only pieces. `is_idle` means that nothing
    is outstanding or to be measured. Optimizers know it as `optim.overlap.Defers` and `optim.behind_forward.Overlap`.
    """

    lock = lock

    def __init__(
        self,
        module: Module,
        process_group: ProcessGroup,
        piece_group: ProcessGroup,
        peers: Peers,
        is_forced: bool = False,
    ) -> None:
        super().__init__()
        self._piece_group: ProcessGroup | None = piece_group
        self._agreement = Agreement(process_group, peers, is_forced)
        self._tells = process_group.rank() == 0 and not is_forced
        self._has_optimizer = False  # without one, backward waits for its gradients
        self.is_idle = False
        self._step: DeferredStep | None = None
        self._failure: BaseException | None = None
        self._needs = FirstUseTimes()
        self._warned: set[str] = set()
        self._cover = NaNMask()
        self._module = module
        self._timings = StepTimings()  # of the reducer that it follows
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._sync: PieceSync | None = None  # the last one
        self._holders: list[BehindForward] = []  # mark and complete parameters in place of gradients
        _alive.add(self)

    @property
    def is_on(self) -> bool | None:
        """Return whether steps are deferred; None as long as the ranks measure; False is for good. Local."""
        return self._agreement.is_on

    @property
    def gain(self) -> Gain | None:
        """Return the gain that was predicted before overlap was on. Local."""
        return self._agreement.gain

    @property
    def seen(self) -> Gain | None:
        """Return the measured step with and without overlap, once it was on; None before, and with "always". Local."""
        return self._agreement.seen

    # ---- for the reducer: the syncs of its backwards

    def follow(
        self,
        managed: ManagedParameters,
        groups: Groups,
        peers: Peers,
        open_forwards: OpenForwards,
        timings: StepTimings,
    ) -> None:
        """Reduce these parameters from now on. Local; flushes."""
        self.flush()
        super().follow(managed, groups, peers, open_forwards, timings)
        self._timings = timings
        for hook in self._hooks:
            hook.remove()
        self._hooks = install(self._module, self, managed.parameters)
        self._agreement.start_again()

    def move_to(self, process_group: ProcessGroup, piece_group: ProcessGroup, peers: Peers) -> None:
        """Use these groups of a new membership. Local; nothing is outstanding."""
        self._piece_group = piece_group
        self._agreement.move_to(process_group, peers)

    def begin(self, backward: BackwardPass, buckets: Sequence[Bucket]) -> GradientSync:
        """Return the sync of a backward, which needs the buffers: flush first. Collective when ranks agree."""
        self.flush()
        if not backward.plan.synchronizes:
            return super().begin(backward, buckets)
        defers = self._agreement.defers(
            buckets, backward.step.number - 1, self._timings, backward.step.times.last_forward_s, self._needs
        )
        if self._agreement.verdict:
            self._timings.decide("overlap_forward", self._agreement.verdict, self._tells)
        if not defers:
            if self._agreement.is_off and not self._holders:
                self.stop()
            else:
                self.is_idle = False  # hooks note what forward needs when
            self._needs.begin()
            return super().begin(backward, buckets)
        self.is_idle = True
        assert self._piece_group is not None, "the wrapper is gone"
        over = backward.reduction, self._piece_group, self._peers
        self._sync = PieceSync(buckets, self._agreement.pieces, *over, self._times(), self._defer)
        return self._sync

    def _defer(self, sync: PieceSync, backward: BackwardPass) -> bool:
        """Complete each bucket of this sync when it is needed, if an optimizer takes part. Return whether one does."""
        if not self._has_optimizer:
            self._warn(
                "optimizer",
                "overlap_forward has no optimizer that it could defer, so backward waits for all gradients. Write "
                "`optimizer = paceline.optim.overlap(optimizer, model)`.",
            )
            return False
        with lock:
            self._step = DeferredStep(sync, backward, set(range(len(sync.buckets))))
            self._needs.begin()
            for bucket in sync.buckets:
                outstanding.mark(bucket.parameters, self, bucket.index)
            self.is_idle = False
        return True

    # ---- for what holds parameters in place of gradients (`optim.behind_forward`)

    @property
    def holders(self) -> Sequence[BehindForward]:
        return self._holders

    def take_over(self, holder: BehindForward) -> None:
        """Let this holder mark and complete parameters. No gradients are sent in pieces any more. Local; flushes."""
        self.flush()
        self._agreement.stop()
        self._holders.append(holder)
        self.is_idle = False

    def hold(self, parameters: Iterable[Parameter], holder: BehindForward, index: int) -> None:
        outstanding.mark(parameters, holder, index)

    def release(self, parameters: Iterable[Parameter]) -> None:
        outstanding.unmark(parameters)

    # ---- for optimizers and zero_grad (rule 3)

    def take_optimizer(self) -> None:
        self._has_optimizer = True

    def is_outstanding(self, parameter: Tensor) -> bool:
        return outstanding.is_outstanding(parameter)

    def under_way(self, parameters: Iterable[Tensor]) -> list[ForwardOverlap]:
        owners = dict.fromkeys(outstanding.owner_of(p) for p in parameters if self.is_outstanding(p))
        return [owner for owner in owners if isinstance(owner, ForwardOverlap)]

    @property
    def has_outstanding(self) -> bool:
        return self._step is not None or any(holder.has_outstanding for holder in self._holders)

    def later(self, action: Action) -> None:
        """Repeat this action with each bucket's parameters on arrival. Local; something is outstanding."""
        with lock:
            assert self._step is not None, "nothing is outstanding"
            if not self._step.actions:
                self._step.hide(self._cover)
            self._step.actions.append((Moment.now(), action))

    def zero_grad_of(self, parameters: Sequence[Tensor], set_to_none: bool) -> None:
        """Drop the gradients of these. Those under way are dropped once they have been used. Local."""
        with lock:
            zero_gradients([p for p in parameters if not self.is_outstanding(p)], set_to_none)
            if self._step is not None:
                ids = set(map(id, parameters))
                self.later(lambda arrived: zero_gradients([p for p in arrived if id(p) in ids], set_to_none))
                self._step.drop(ids)

    def will_drop_gradient(self, parameter: Tensor) -> bool:
        """Return whether the gradient is under way, and zero_grad was called since. Local; does not wait."""
        step = self._step
        if outstanding.owner_of(parameter) in self._holders:
            return True  # its step has taken it
        return self.is_outstanding(parameter) and step is not None and id(parameter) in step.dropped

    # ---- completing (rule 4)

    def need(self, parameters: Sequence[Parameter], evaluates: bool) -> None:
        """Complete the buckets of these parameters, which a module is about to use.

        In evaluation, all of them. Torch's attention and transformer layers then read the parameters of their parts.
        If one of these is of a class of its own, they take a slower way with other rounding.
        """
        if evaluates:
            self.flush()
            return
        self._needs.note(parameters)
        if self._step is not None or self._holders:
            for parameter in parameters:
                outstanding.complete(parameter)

    def flush(self) -> None:
        """Complete everything that is outstanding: parameters, gradients, the optimizer's state. Local: waits.

        Raises PeerLostError if a rank died or hangs, ProtocolError if one did earlier.
        """
        with lock:
            while self._step is not None:
                self.complete(min(self._step.left), reads_gradient=False)
            for holder in self._holders:
                holder.flush()

    def drain(self) -> None:
        """Flush, and wait until a device has sent all pieces. A closed group may not send them any more."""
        self.flush()
        if self._sync is not None and self._sync.arrived is not None:
            self._sync.arrived.block()

    def complete(self, index: int, reads_gradient: bool) -> None:
        """Complete the bucket of this index; raises as `flush`. A gradient is read, or something else."""
        step = self._step
        if step is None or index not in step.left:
            return
        if self._failure is not None:
            is_of_peers = isinstance(self._failure, (PeerLostError, ProtocolError))
            what = "communication failed" if is_of_peers else "the optimizer raised"
            raise ProtocolError(
                f"this parameter's last step was not completed, because {what}: "
                f"{str(self._failure) or type(self._failure).__name__}"
            ) from self._failure
        bucket = step.buckets[index]
        if reads_gradient and not step.sync.progress[index].has_ended:
            self._warn(
                "reader",
                "a gradient was read before it had been reduced, so this step waits for it. Clipping by the global "
                "norm, GradScaler and logging norms need all gradients before the first step. They leave nothing to "
                "overlap with the next forward, so leave out overlap_forward. (To drop gradients, use zero_grad() of "
                "the optimizer or the model, which need not wait.)",
            )
        try:
            self._await(step, bucket)
        except Exception as error:
            self._failure = error
            raise
        try:
            step.apply(bucket)
            outstanding.unmark(bucket.parameters)  # last: no other thread sees it half made (rule 6)
        except BaseException as error:  # an interrupt, too, has left half a step
            self._failure = error
            raise
        step.left.discard(index)
        if not step.left:
            self._step = None
            self.is_idle = self.is_on is not None
            step.backward.conclude(step.waited_s)

    def _await(self, step: DeferredStep, bucket: Bucket) -> None:
        before_s = time.perf_counter()
        with outside_transforms(), Moment.plain().again():  # a reduction may compute in it
            step.sync.wait_for(bucket, HALF_STEPPED if step.actions else None)
        after_s = time.perf_counter()
        step.note_wait(after_s - before_s)
        self._needs.note_wait(before_s, after_s)
        self._timings.under_way.note_wait(before_s, after_s)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, UserWarning, stacklevel=2)

    # ---- the end

    def stop(self) -> None:
        """Flush, and wait for nothing from now on."""
        self.flush()
        self._agreement.stop()
        self.is_idle = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()

    def end_with_program(self) -> None:
        """Complete the last step, because other ranks need this rank's part; not if this program has failed."""
        if not self.has_outstanding or self._failure is not None:
            return
        if _has_failed():
            if self._step is not None:
                self._step.sync.give_up(GRACE_S)
        else:
            self.flush()

    def let_go(self) -> None:
        """Complete the last step of a wrapper that is gone, and close its group.

        The garbage collector may call this on any thread. A network thread must not wait for itself.
        """
        if self._failure is not None or _has_failed():
            return
        if isinstance(threading.current_thread(), threading._DummyThread):
            threading.Thread(target=self._end, name="paceline-flush").start()
        else:
            self._end()

    def _end(self) -> None:
        self.stop()
        self.drain()
        for holder in self._holders:
            holder.close()
        group, self._piece_group = self._piece_group, None
        if group is not None:
            close(group)


def _has_failed() -> bool:
    """Return whether this program ends, or an interactive one has gone on, after an uncaught error."""
    return getattr(sys, "last_value", None) is not None


_alive: weakref.WeakSet[ForwardOverlap] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for overlap in list(_alive):
        overlap.end_with_program()


def _flush_before_fork() -> None:
    """Complete steps (rule 5). No other thread may complete one while the process is forked."""
    lock.acquire()
    for overlap in list(_alive):
        with contextlib.suppress(Exception):  # kept: each read of the parameter raises it
            overlap.flush()


def _go_on_forked() -> None:
    _alive.clear()
    lock.release()


os.register_at_fork(before=_flush_before_fork, after_in_parent=lock.release, after_in_child=_go_on_forked)
