"""The work of a wrapped module around its steps: before a forward, in a window, beside joined ranks.

The wrapper, its windows (`accumulation`) and the shadows of joined ranks (`torch_surface`) meet here. From here the
reducer gets each backward's `BackwardPlan`. The wrapper is held weakly, because the parameters' hooks keep the
reducer, and the reducer keeps this. A strong reference would keep a dropped wrapper alive. Wrapping its module again
would then reduce twice.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import device_for_metadata
from paceline.comm.device import is_accelerator
from paceline.comm.gradient_group import check_carries_pieces, group_for_pieces, knows_beside, on_one_host
from paceline.comm.peers import Peers
from paceline.data import GlobalBatch
from paceline.ddp import arguments, inputs_outputs, sync_batch_norm
from paceline.ddp.buffers import Broadcast, Buffers, BufferSync, parts_of
from paceline.ddp.forward_overlap import ForwardOverlap
from paceline.ddp.gradient_sync import SyncFactory
from paceline.ddp.joining import Joining, NextStep
from paceline.ddp.layout import ManagedParameters
from paceline.ddp.membership import FaultHandler, Groups, Members, Membership
from paceline.ddp.module_contents import ModuleContents
from paceline.ddp.open_forwards import OpenForwards, Owner
from paceline.ddp.reducer import Reducer, StepSource
from paceline.ddp.replicas import Description, Verified, verify
from paceline.ddp.setting import Setting
from paceline.ddp.skipping import Skipping
from paceline.ddp.step import BackwardPlan, Step
from paceline.ddp.step_shares import DataPosition, StepShares
from paceline.ddp.weights import StepWeights, Weighing, WeightExchange
from paceline.errors import ConfigurationError, PeerLostError, ProtocolError
from paceline.observe import StepTimings
from paceline.observe.run_records import RunHeader
from paceline.recording.model_facts import BatchCounts, range_of
from paceline.recording.recorder import OurSteps
from paceline.reductions import Reduction
from paceline.reductions.ordered_mean import LogicalMean
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.diagnosis import Diagnosis


class StepCoordinator:
    """The membership, buffers and reducer of one wrapped module, and where its steps are: a `membership.Model`.

    `wrapped` is the wrapper, `window` an `accumulation.Window`; both know this class, so their types stay unsaid here.
    """

    def __init__(self, wrapped: Any, setting: Setting, name: str) -> None:
        self._wrapped = weakref.ref(wrapped)
        self._module, self._ignored = wrapped.module, setting.ignored
        self.setting = setting
        # Who reduces together
        self.membership = Membership(setting.process_groups, name, setting.device, self)
        self.buffers = Buffers(self._module, self._ignored, self.membership)
        self.has_sync_batch_norm = any(isinstance(m, torch.nn.SyncBatchNorm) for m in self._module.modules())
        # Whether its layers may still talk over the gradients' group.
        self._separates_batch_norm = self.has_sync_batch_norm
        self.window: Any = None  # of micro-batches, while within one
        self._handler: FaultHandler | None = None  # makes up for lost ranks
        self.joining = Joining(self.membership)  # what is known of ranks without batches
        self.timings = StepTimings()
        group = self.membership.process_group
        # What is kept of the last steps, and written to a run folder if there is one
        self.recording = OurSteps(setting.device.type, group.rank(), group.size())
        self._frozen: list[Parameter] = []
        self.weighing = Weighing(setting, self.membership, self.timings, self._fail)
        # What defers the end of steps into the next forward, if anything does
        self.forward_overlap: ForwardOverlap | None = None
        skips = bool(setting.droppable) or setting.skips_unused
        # What steps leave out, if they may
        self.skipping = Skipping(self._module, setting.droppable, setting.skips_unused) if skips else None
        self.reducer: Reducer
        self.contents: ModuleContents

    @property
    def wrapped(self) -> Any:
        """Return the wrapper, which is alive wherever a step begins."""
        wrapped = self._wrapped()
        assert wrapped is not None, "a step of a wrapper that is gone"
        return wrapped

    @property
    def managed(self) -> ManagedParameters:
        """Return the parameters whose gradients are reduced now."""
        return self.reducer.managed

    # ---- the model, on all ranks

    def verify(self, managed: ManagedParameters, *more: tuple[str, object]) -> Verified:
        """Raise ReplicaMismatchError, on all ranks, unless all wrap the same with the same arguments. Collective."""
        members, groups = self.membership, self.setting.process_groups
        num_groups = ("number of process groups", len(groups))
        verified = self._verify(managed, groups, members.peers, members.number, num_groups, *more)
        members.set_number(verified.number)
        return verified

    def _verify(
        self,
        managed: ManagedParameters,
        groups: Sequence[ProcessGroup],
        peers: Peers,
        number: int,
        *more: tuple[str, object],
    ) -> Verified:
        described = self.describe(managed, *more)
        return verify(described, groups[0], peers, self.membership.device, number, knows_beside(groups))

    def describe(self, managed: ManagedParameters, *more: tuple[str, object]) -> Description:
        """Describe all that has to be equal on all ranks. Local."""
        named = self._module.named_parameters()
        frozen = [(name, p) for name, p in named if name not in self._ignored and not p.requires_grad]
        wrapped, setting = self.wrapped, self.setting
        options: list[tuple[str, object]] = [
            ("bucket caps", setting.described_caps()),
            ("reduction", repr(setting.reduction)),
            ("weight", setting.weight is not None),
            ("balance", None if setting.shares is None else repr(setting.shares.balance)),
            ("droppable", [unit.name for unit in setting.droppable]),
            ("skip_all_reduce_unused_params", setting.skips_unused),
            ("find_unused_parameters", wrapped.find_unused_parameters),
            ("static_graph", wrapped.static_graph),
            ("forward_sync_buffers", wrapped.forward_sync_buffers),
            ("mixed_precision", wrapped.mixed_precision),
            *more,
        ]
        return Description.of(managed, frozen, self.buffers.named().items(), self._ignored, options)

    def facts(self) -> Sequence[tuple[str, str]]:
        return self.describe(self.managed).lines

    def broadcast_model(self, source: int, with_buffers: bool) -> None:
        """Give all ranks the parameters, and buffers if asked for, of rank `source`. Collective; blocks."""
        named = self._module.named_parameters()
        tensors: list[Tensor] = [p for name, p in named if name not in self._ignored]
        if with_buffers:
            tensors += self.buffers.named().values()
        self.broadcast_tensors(tensors, source, f"receiving rank {source}'s model")

    def broadcast_tensors(self, tensors: Iterable[Tensor], source: int, doing: str) -> None:
        """Give all ranks the tensors of rank `source`. Collective; blocks."""
        members = self.membership
        if members.size > 1:
            every = list(tensors)
            parts = ([every[index] for index in part] for part in parts_of(every))
            Broadcast(parts, members.process_group, source).finish(members.peers, doing)

    def separate_batch_norm(self) -> None:
        """Let layers that talk over the gradients' group talk over one of their own. Collective at the first call."""
        if self._separates_batch_norm:
            self._separates_batch_norm, members = False, self.membership
            own = sync_batch_norm.separate_group(self._module, members.process_group, members.peers)
            members.set_group(for_batch_norm=own)

    # ---- the reducer

    def build_reducer(
        self, managed: ManagedParameters, step: Step | None = None, open_forwards: OpenForwards | None = None
    ) -> None:
        """Reduce these gradients from now on, in this `step` and for these forwards; None: the first ones. Local."""
        wrapped, setting, members = self.wrapped, self.setting, self.membership
        setting.expect(wrapped.find_unused_parameters, wrapped.static_graph)
        syncs: SyncFactory = self.forward_overlap or self.skipping or SyncFactory()
        contents = ModuleContents(self._module, managed, setting.parameters, self._ignored)
        if step is None:
            step = Step(1, self.timings.under_way, BatchCounts(), BufferSync(self.buffers))
        forwards = open_forwards or OpenForwards()
        source = StepSource(forwards, self._plan, self._next_step, contents.check_tensors)
        make = wrapped._paceline_reducer_class
        self.reducer = make(managed, setting, syncs, members, self.timings, step, source)
        self.contents = contents
        kept = set(map(id, managed.parameters))
        self._frozen = [p for p in setting.parameters if not p.requires_grad and id(p) not in kept]

    def overlap_forward(self, wanted: bool | str) -> None:
        """Set up forward overlap where it may pay. Collective if `wanted`."""
        is_forced = wanted == "always"
        members = self.membership
        if not wanted:
            return
        if members.size == 1 or (on_one_host(unknown=False) and not is_forced):
            why = "there is one rank" if members.size == 1 else "all ranks are on one host"
            reason = f"off, because {why}, so no gradient crosses a link"
            self.timings.decide("overlap_forward", reason, not is_forced and members.rank == 0)
            return
        piece_group = group_for_pieces(members.process_group, members.device, members.peers)
        members.set_group(for_pieces=piece_group)
        agree_over = members.groups.for_numbers or members.process_group
        self.forward_overlap = ForwardOverlap(self._module, agree_over, piece_group, members.peers, is_forced)

    def rebuild_reducer(self, managed: ManagedParameters) -> None:
        """Replace the reducer by a new one. Local."""
        self.setting.reduction.prepare(managed.named(), self.membership.process_group)
        step, before = self.reducer.step, set(map(id, self.managed.parameters))
        # What a parameter has gathered before it was managed is this rank's own: no hook has seen it.
        own = {id(p) for p in managed.parameters if p.grad is not None}
        step.used_before.update(own - before)
        former = self.reducer
        former.retire()
        self.build_reducer(managed, step, former.open_forwards)
        former.pass_on_to(self.reducer)

    def let_go(self) -> None:
        """Leave the parameters alone, because the wrapper is gone. Keep nothing of the module alive."""
        self.reducer.let_go()
        if self.forward_overlap is not None:
            self.forward_overlap.let_go()

    # ---- other members

    @property
    def num_steps(self) -> int:
        return self.reducer.num_steps

    @property
    def sends_pieces(self) -> bool:
        return self.forward_overlap is not None

    def check_rebuild(self, process_group: ProcessGroup) -> None:
        if self.window is not None or ((backward := self.reducer.step.backward) and backward.is_running):
            raise ConfigurationError(
                "rebuild() within a window of model.accumulate, or within a backward: leave it first. A window that "
                "raises leaves itself."
            )
        if self.joining.is_enabled(self.wrapped):
            raise ConfigurationError(
                "rebuild() within model.join(): torch's Join goes on with the ranks that it began with. Leave it first."
            )
        if why := self.setting.reduction.why_not_over(process_group):
            raise ConfigurationError(why)
        if self.sends_pieces:
            check_carries_pieces(process_group, self.membership.device)

    def complete_step(self) -> None:
        if self.forward_overlap is not None:
            self.forward_overlap.drain()

    def data_position(self) -> DataPosition:
        shares = self.setting.shares
        return DataPosition() if shares is None else shares.data_position(self.timings.last)

    def verify_over(self, process_group: ProcessGroup, peers: Peers, number: int) -> Verified:
        overlaps = ("overlap_forward", self.sends_pieces)
        return self._verify(self.managed, [process_group], peers, number, overlaps)

    def follow_data(self, rank: int, shares: GlobalBatch | None, new: Members) -> None:
        if self.setting.shares is not None and shares is not None:
            limits = [data_position.limit for data_position in new.data_positions]
            self.setting.shares.follow(shares, rank, new.told.data_position, limits)

    def follow(self, before: Groups, new: Members, verified: Verified) -> None:
        members, setting, managed, step = self.membership, self.setting, self.managed, self.reducer.step
        times, batch = step.times, step.batch
        if self.reducer.has_failed or step.backward is not None:
            self.reducer.drop_gradients()
            times, batch = self.timings.begin_step(), BatchCounts()
        setting.move_to(members.groups.asked_for)
        setting.learn_devices(verified.are_on_cpu)
        setting.reduction.follow(managed.named(), members.process_group, new.are_alike)
        self.joining.begin_again()
        self.buffers.take_layout()
        self._separates_batch_norm = False
        if self.has_sync_batch_norm:
            own, moved = members.groups.for_batch_norm, [*before.asked_for, before.for_batch_norm]
            peers = None if own is None else members.peers
            sync_batch_norm.move(self._module, moved, own or members.process_group, peers)
        if self.forward_overlap is not None and members.groups.for_pieces is not None:
            agree_over = members.groups.for_numbers or members.process_group
            self.forward_overlap.move_to(agree_over, members.groups.for_pieces, members.peers)
        self.reducer.retire()
        self.build_reducer(
            managed, Step(new.told.num_steps + 1, times, batch, BufferSync(self.buffers), step.used_before)
        )

    # ---- before a step

    def prepare_forward(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Prepare a forward that may be differentiated. Collective if its backward will synchronize."""
        if not_finite := self.reducer.prepare():
            self.recording.recorder.note_health(not_finite=not_finite)
        self._follow_changes()
        self.reducer.open_forwards.begin(counts=(wrapped := self.wrapped).training)
        self.recording.name_buckets(self.reducer.buckets, self._names_of_buckets)
        self.recording.begin_forward(self.reducer.step.batch, self._module, inputs, kwargs)
        is_weighed = self.weighing.is_on if self.window is None else self.window.has_weights
        if not self.reducer.cuts.has_followed:
            self.reducer.cuts.note_batch(0 if is_weighed else inputs_outputs.batch_size(inputs, kwargs))
        if self.window is not None:
            self.window.note_forward()
            return
        will_synchronize = self.will_synchronize
        if is_weighed and wrapped.training:
            if self._handler is not None:
                raise ConfigurationError(
                    "a step of paceline.Elastic outside of a window: if a rank is lost, only a window can be left, and "
                    "its step repeated. Train each step within `with model.accumulate(batches) as micro_batches:`."
                )
            weight = self.weighing.weigh_plain(inputs, kwargs, will_synchronize)
            self.reducer.open_forwards.weigh_last(weight)
        since_s = time.perf_counter()
        if joins := self.joining.is_enabled(wrapped):
            self._notify(NextStep(will_synchronize, opens_window=is_weighed and wrapped.training))
        if will_synchronize and wrapped.training:
            self._synchronize_buffers(joins)
        self.weighing.note_wait(since_s)

    def _notify(self, next_step: NextStep) -> None:
        """Tell joined ranks what follows, and set the divisor that the ranks agree on."""
        self.reducer.step.divide_by(self.joining.notify(self.wrapped, next_step).divisor)

    def doctor(self) -> Diagnosis:
        """Compare the last steps of all ranks. Collective; blocks for two all-gathers, of text."""
        from paceline.diagnosis import diagnose  # noqa: PLC0415  few ask
        from paceline.observe.run_reading import run_of  # noqa: PLC0415  as above

        members, recorder = self.membership, self.recording.recorder
        group, doing = members.process_group, "exchanging what was recorded of the last steps"
        place = device_for_metadata(group, members.device)
        own = recorder.lines()
        length = torch.tensor([len(own)], device=place)
        longest = max(map(int, members.peers.rows_of_all(length, group, doing)))
        padded = torch.frombuffer(bytearray(own.ljust(longest, b"\n")), dtype=torch.uint8).to(place)
        rows = members.peers.rows_of_all(padded, group, doing)
        files = {f"rank {rank}": bytes(row.cpu().numpy().tobytes()) for rank, row in enumerate(rows)}
        return diagnose(run_of(RunHeader(recorder.header.run_id, (), time.time(), __version__), files))

    def _names_of_buckets(self) -> list[str]:
        names = list(self.managed.named())
        return [range_of(names[member] for member in bucket.members) for bucket in self.reducer.buckets]

    def _follow_changes(self) -> None:
        """Take in unfrozen parameters and make a copy's groups (collective); raises as `ModuleContents.check`."""
        self.contents.check()
        if self._frozen and any(parameter.requires_grad for parameter in self._frozen):
            # A layer that was frozen meanwhile may have gradients of this step, which only some ranks have.
            managed = self.setting.managed(self._module, self.managed.parameters)
            self._check_may_unfreeze(managed)
            self.verify(managed)
            arguments.check_linear(managed, self.setting.reduction)
            self.rebuild_reducer(managed)
        if self.wrapped.training:  # a copy, which is made without a collective
            self.separate_batch_norm()
        self.reducer.step_within_backward(self.wrapped._paceline_take_over_optimizers())

    def _check_may_unfreeze(self, managed: ManagedParameters) -> None:
        """Raise ConfigurationError if parameters were unfrozen within a window, or others swapped. Local."""
        self.contents.check_tensors(range(len(self.managed)))
        if self.window is not None:
            known = self.managed.named()
            name = next(name for name in managed.named() if name not in known)
            raise ConfigurationError(
                f"{name} was unfrozen within a window of model.accumulate. The ranks have to agree on it, but they may "
                "have different numbers of micro-batches. Freeze and unfreeze between windows."
            )

    def has_synchronized_buffers(self) -> bool:
        return self.wrapped.forward_sync_buffers and self.buffers.exist()

    def _synchronize_buffers(self, joins: bool) -> None:
        """Give all ranks one rank's buffers, before the forwards of a synchronized step that trains. Collective."""
        if not self.wrapped.forward_sync_buffers:
            return
        hook = self.buffers.hook
        if hook is None:
            source_of = functools.partial(self.joining.agree_on_source, is_candidate=True) if joins else int
            self.reducer.step.buffers.broadcast_once(source_of, joins)
        elif hook.runs_before_forward and self.buffers.exist():
            self.reducer.step.buffers.run_hook()

    # ---- lost ranks

    @property
    def reduction(self) -> Reduction:
        return self.setting.reduction

    @property
    def shares(self) -> StepShares | None:
        return self.setting.shares

    @property
    def has_droppable(self) -> bool:
        return bool(self.setting.droppable)

    def reduce_by(self, reduction: Reduction) -> None:
        self.setting.reduce_by(reduction)

    def handle_faults(self, handler: FaultHandler) -> None:
        self._handler = handler
        if is_accelerator(self.membership.device):
            self.buffers.hold_indices_back()

    def is_recoverable(self, error: Exception) -> bool:
        """Return whether the step under way is computed again, as ranks were lost; then it is abandoned here."""
        if self._handler is None or not self._handler.is_recoverable(error):
            return False
        self.reducer.abandon(error)
        return True

    @property
    def repeats_step(self) -> bool:
        """Return whether the step under way is computed again, as ranks were lost."""
        return self._handler is not None and self._handler.repeats_step

    def decide(self, option: str, words: str) -> None:
        self.timings.decide(option, words, is_told=False)

    def complete_window(self) -> None:
        """Tell the handler of lost ranks that a window has ended well on this host. Collective."""
        if self._handler is not None:
            self._handler.complete_window()

    # ---- windows of micro-batches

    @property
    def will_synchronize(self) -> bool:
        """Return whether the next backward does, outside of windows; not within `no_sync`."""
        return (wrapped := self._wrapped()) is None or wrapped.require_backward_grad_sync

    def let_synchronize(self, wanted: bool) -> None:
        """Set whether the next backward synchronizes. Local."""
        self.wrapped._paceline_let_synchronize(wanted)

    def open_window(self, weight: float, num_micro_steps: int) -> WeightExchange:
        """Exchange weights and buffers before a window's first forward. Collective."""
        if not_finite := self.reducer.prepare():
            self.recording.recorder.note_health(not_finite=not_finite)
        self._follow_changes()
        since_s = time.perf_counter()
        if joins := self.joining.is_enabled(self.wrapped):
            self._notify(NextStep(synchronizes=False, opens_window=True))
        self.reducer.step.exchange_buffers(BufferSync(self.buffers))  # all ranks begin it together
        exchange = self.weighing.exchange(weight, num_micro_steps, True, self.reducer.step.buffers)
        if self.wrapped.training:
            self._synchronize_buffers(joins)
        self.weighing.note_wait(since_s)
        return exchange

    def enter_window(self, window: Any) -> None:
        self.window = window

    @property
    def logical(self) -> LogicalMean | None:
        reduction = self.setting.reduction
        return reduction if isinstance(reduction, LogicalMean) else None

    @property
    def waits_in_forward(self) -> bool:
        """Return whether a forward waits for all ranks in a layer."""
        can_wait = self.has_sync_batch_norm and self.membership.size > 1
        return can_wait and sync_batch_norm.are_in_use(self._module)

    @property
    def is_made_up_for(self) -> bool:
        """Return whether the other ranks compute a step again that this rank has left."""
        return self._handler is not None

    def lost_behind(self, error: Exception) -> PeerLostError | None:
        """Return the error that names ranks which have left or died, if this one of a window may come from that."""
        lost = self.membership.peers.lost_behind(error, "within a window of micro-batches")
        if lost is not None:
            self.reducer.abandon(lost)
        return lost

    def leave(self, error: Exception) -> None:
        """Take no part any more, because of this error: the other ranks wait where this rank does not come. Local."""
        why = f"left its step with {type(error).__name__}, see its output"
        self.reducer.abandon(ProtocolError(why))
        self.membership.peers.leave(why)

    def close_window(self) -> None:
        self.window = None
        if self.logical is not None:
            self.logical.forget_parts()
        self.let_synchronize(True)
        self.reducer.step.buffers.set_source(0)

    def match_window(self, weights: StepWeights) -> None:
        """Match the other ranks' last backward, contributing nothing; none if nothing counts. Collective."""
        weights.raise_if_refused(self.membership.rank)
        if weights.total > 0:
            self.run_without_autograd(share=0.0)

    def will_drop_gradient(self, parameter: Tensor) -> bool:
        """Return whether the parameter's gradient is under way, to be dropped on arrival. Local; does not wait."""
        return self.forward_overlap is not None and self.forward_overlap.will_drop_gradient(parameter)

    # ---- a step

    def _next_step(self, ended: Step, ended_well: bool) -> Step:
        """Record a step that has ended well, and return the next one. Local."""
        times = self.timings.begin_step()
        step = Step(ended.number + ended_well, times, BatchCounts(), BufferSync(self.buffers))
        if ended_well:
            self.recording.end_step(ended.times, ended.batch)
        return step

    def watch(self, output_nodes: Sequence[Any]) -> None:
        """Begin as soon as a backward reaches one of these nodes of a forward's outputs."""
        self.contents.watch(output_nodes)
        self.reducer.watch(output_nodes)
        hook = self.buffers.hook
        if hook is not None and not hook.runs_before_forward and self.has_synchronized_buffers():
            self.reducer.step.buffers.run_hook()

    def _fail(self, error: Exception) -> None:
        self.reducer.abandon(error)

    def _plan(self, owner: Owner | None) -> BackwardPlan:
        """Return whether the backward that begins now synchronizes, and its weight in the mean."""
        if owner is not None and self.contents.added:  # it may have passed no output that was found
            self.contents.refuse_gradients()
        if self.window is not None:
            plan: BackwardPlan = self.window.note_backward()
            return plan
        if not self.will_synchronize:
            return BackwardPlan(synchronizes=False)
        step, forward = self.reducer.step, None if owner is None else owner.forward
        if forward is None or forward.weight is None:
            return BackwardPlan(divisor=step.divisor)
        return self.weighing.plan_of_forward(forward.weight, forward.begin_step(), step.divisor, step.buffers)

    def synchronize_gradients(self) -> None:
        """Reduce what earlier backwards have left in `.grad`. Collective; blocks."""
        self.reducer.prepare()
        self._follow_changes()
        kept = self.reducer.step.exchange_buffers(BufferSync(self.buffers))  # of a forward that is still open
        self.run_without_autograd()
        self.reducer.step.exchange_buffers(kept)

    def run_without_autograd(self, share: float | None = None) -> None:
        """Run a synchronized backward of the gradients in `.grad`. Collective; blocks."""
        self.reducer.run_without_autograd(BackwardPlan(share=share, divisor=self.reducer.step.divisor))

    # ---- ranks without batches

    def take_final_model(self, is_last_joiner: bool) -> None:
        """Give all ranks, after `join`, the model of a rank that trained to the end. Collective; blocks."""
        source = self.joining.end(is_last_joiner)
        if self.has_synchronized_buffers():
            self.buffers.agree()
        self.broadcast_model(source, with_buffers=self.wrapped.forward_sync_buffers)
