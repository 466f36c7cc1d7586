"""What a wrapped module does around its steps: before a forward, in a window of micro-batches, beside joined ranks.

The wrapper, its windows (`accumulation`) and the shadows of joined ranks (`joining`) meet here. The wrapper is held
weakly: the parameters' hooks keep the reducer, and the reducer keeps this; if they kept the wrapper as well, wrapping
a module again would find both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from paceline.comm.collectives import device_for_metadata
from paceline.comm.gradient_group import group_for_pieces, on_one_host
from paceline.comm.peers import Peers
from paceline.ddp import conflicts, inputs_outputs
from paceline.ddp.buffers import Broadcast, Buffers
from paceline.ddp.forward_overlap import ForwardOverlap
from paceline.ddp.joining import JoinState, NextStep, agree_on_source, notify
from paceline.ddp.layout import ManagedParameters
from paceline.ddp.reducer import Reducer
from paceline.ddp.replicas import Description, verify
from paceline.ddp.setting import Setting
from paceline.ddp.skipping import Skipping
from paceline.ddp.weights import Weighing, WeightExchange
from paceline.reductions import Reduction

if TYPE_CHECKING:
    from paceline.ddp.accumulation import Window


class Wrapped(Protocol):
    """What a step asks of the wrapper: public attributes of torch's class, which users may set; and its own reducer."""

    module: Module
    training: bool
    parameters_to_ignore: set[str]
    require_backward_grad_sync: bool
    forward_sync_buffers: bool
    find_unused_parameters: bool
    static_graph: bool
    mixed_precision: Any

    _reducer_class: type[Reducer]

    def _take_over_optimizers(self) -> Callable[[Parameter], None] | None:
        """Find optimizers that step within backward: what to call for a parameter whose gradient is reduced."""


class StepCoordinator:
    """The group, peers, device, buffers and reducer of one wrapped module, and where its steps are.

    Args:
        wrapped: The wrapper.
        setting: How to reduce.
        name: Identifies the module in failure detection; the same on every rank.

    Attributes:
        reduce_groups: The process groups that carry gradients.
        window: Of micro-batches, while within one.
        join: What is known of ranks without batches.
        forward_overlap: What puts the end of steps off into the next forward, if anything does.
        skipping: What steps leave out, if they may.
    """

    def __init__(self, wrapped: Wrapped, setting: Setting, name: str) -> None:
        self._wrapped = weakref.ref(wrapped)
        self._module, self._ignored = wrapped.module, setting.ignored
        self.setting = setting
        self.process_group = setting.process_groups[0]
        self.reduce_groups = setting.process_groups
        self.device = setting.device
        self.peers = Peers(self.process_group, name, in_slices=self.device.type == "cpu")
        self.buffers = Buffers(self._module, self._ignored, self.process_group, self.peers)
        self.has_sync_batch_norm = any(isinstance(m, torch.nn.SyncBatchNorm) for m in self._module.modules())
        self.window: Window[Any] | None = None
        self.join = JoinState()
        self._number = int(name.rpartition("/")[-1])  # among the modules over this group
        self._frozen: list[Parameter] = []
        self.weighing = Weighing(self)
        self.forward_overlap: ForwardOverlap | None = None
        skips = bool(setting.droppable) or setting.skips_unused
        self.skipping = Skipping(self._module, setting.droppable, setting.skips_unused) if skips else None
        self.reducer: Reducer

    @property
    def wrapped(self) -> Wrapped:
        """The wrapper, which is alive wherever a step begins."""
        wrapped = self._wrapped()
        assert wrapped is not None, "a step of a wrapper that is gone"
        return wrapped

    # ---- the model, on all ranks

    def verify(self, managed: ManagedParameters, *more: tuple[str, object]) -> list[bool]:
        """Make sure that all ranks wrap the same module, with the same arguments. Collective; blocks.

        Args:
            managed: The parameters to synchronize.
            more: Names and values of further arguments.

        Returns:
            For each rank whether it has the module on a CPU.

        Raises:
            ReplicaMismatchError: They do not; on every rank.
        """
        frozen = [
            (name, p)
            for name, p in self._module.named_parameters()
            if name not in self._ignored and not p.requires_grad
        ]
        wrapped, setting = self.wrapped, self.setting
        options: list[tuple[str, object]] = [
            ("bucket caps", setting.described_caps()),
            ("number of process groups", len(setting.process_groups)),
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
        description = Description.of(managed, frozen, self.buffers.named().items(), self._ignored, options)
        words_on = device_for_metadata(self.process_group, self.device)
        on_cpu, self._number = verify(
            description, self.process_group, self.peers, words_on, self.device.type == "cpu", self._number
        )
        return on_cpu

    def broadcast_model(self, source: int, with_buffers: bool) -> None:
        """Give all ranks the parameters, and buffers if asked for, of rank `source`. Collective; blocks."""
        named = self._module.named_parameters()
        tensors: list[Tensor] = [p for name, p in named if name not in self._ignored]
        if with_buffers:
            tensors += self.buffers.named().values()
        self.broadcast_tensors(tensors, source, f"receiving rank {source}'s model")

    def broadcast_tensors(self, tensors: Iterable[Tensor], source: int, doing: str) -> None:
        """Give all ranks the tensors of rank `source`. Collective; blocks."""
        if self.process_group.size() > 1:
            Broadcast(tensors, self.process_group, source).finish(self.peers, doing)

    # ---- the reducer

    def build_reducer(self, managed: ManagedParameters) -> None:
        """Reduce the gradients of these parameters from now on. Local."""
        wrapped, setting = self.wrapped, self.setting
        setting.find_unused_parameters = wrapped.find_unused_parameters
        setting.static_graph = wrapped.static_graph
        self.reducer = wrapped._reducer_class(
            managed, setting, self.skipping, self.reduce_groups, self.peers, self.buffers
        )
        self.reducer.synchronizes = self._synchronizes
        self.reducer.verdict.control.module_number = self._number
        self.reducer.forward_overlap = self.forward_overlap
        self._frozen = [p for p in setting.parameters if not p.requires_grad]

    def overlap_forward(self, wanted: bool | str, managed: ManagedParameters) -> None:
        """Make what puts the end of steps off into the next forward, where that may pay. Collective if `wanted`."""
        is_forced = wanted in ("always", "debug")
        if not wanted or self.process_group.size() == 1 or (on_one_host() and not is_forced):
            return
        self.forward_overlap = ForwardOverlap(
            self._module,
            managed.parameters,
            self.process_group,
            group_for_pieces(self.process_group),
            self.peers,
            is_forced,
            poisons=wanted == "debug",
        )

    def check_outputs(self, outputs: Iterable[Tensor]) -> None:
        """Debug: see `ForwardOverlap.check_outputs`. Local."""
        if self.forward_overlap is not None:
            names = {id(p): name for name, p in self.reducer.managed.named().items()}
            self.forward_overlap.check_outputs(outputs, lambda parameter: names[id(parameter)])

    def rebuild_reducer(self, managed: ManagedParameters) -> None:
        """Put another reducer in the place of the one that there is. Local."""
        setting, timings, num_steps = self.setting, self.reducer.timings, self.reducer.num_steps
        if self.forward_overlap is not None:
            self.forward_overlap.follow(self._module, managed.parameters)
        setting.reduction.prepare(managed.named(), self.process_group)
        self.reducer.arrivals.stop()
        self.build_reducer(managed)
        self.reducer.timings, self.reducer.num_steps = timings, num_steps

    def let_go(self) -> None:
        """The wrapper is gone: leave the parameters alone, and keep nothing of the module alive."""
        self.reducer.arrivals.stop()
        self.reducer.synchronizes = _always

    def reduce_by(self, reduction: Reduction) -> None:
        """Combine gradients so from now on. Local; before the first backward."""
        self.setting.reduction = self.reducer.reduction = reduction

    def move_to(self, process_group: ProcessGroup) -> None:
        """Reduce over another process group from now on. Local; every member must do so in the same step."""
        self.process_group = process_group
        self._number = 0  # a rank that joins now does not know it
        self.setting.process_groups = self.reduce_groups = [process_group]
        self.setting.choose_caps()  # the default depends on the number of ranks
        self.peers = Peers(
            process_group, f"group {process_group.group_name}", in_slices=self.device.type == "cpu"
        )
        self.buffers.move_to(process_group, self.peers)
        self.rebuild_reducer(self.reducer.managed)

    # ---- before a step

    def prepare_forward(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a forward of these arguments that may be differentiated.

        Contract:
            Collective if its backward will synchronize: buffers; parameters that were unfrozen; joined ranks.
        """
        self.reducer.prepare()
        self._follow_changes()
        self.reducer.open_forwards.begin(counts=self.wrapped.training)
        if not self.reducer.cuts.has_followed:
            is_weighed = self.weighing.is_on()
            self.reducer.unweighed_size = 0 if is_weighed else inputs_outputs.batch_size(inputs, kwargs)
        if self.window is not None:
            self.window.note_forward()
            return
        will_synchronize = self.wrapped.require_backward_grad_sync
        weighing = self.weighing
        if weighing.is_on() and self.wrapped.training:
            weighing.weigh_plain(inputs, kwargs)
        with weighing.wait():
            notify(self, NextStep(will_synchronize, opens_window=weighing.plain is not None))
            self._synchronize_buffers(will_synchronize)

    def open_window(self, weight: float, num_micro_steps: int) -> WeightExchange:
        """What a window of micro-batches communicates before its first forward. Collective."""
        self.reducer.prepare()
        self._follow_changes()
        with self.weighing.wait():
            notify(self, NextStep(synchronizes=False, opens_window=True))
            exchange = self.weighing.exchange(weight, num_micro_steps, begins_step=True)
            self.buffers.are_in_line = False  # all ranks begin it together
            self._synchronize_buffers(will_synchronize=True)
        return exchange

    def close_window(self) -> None:
        """What follows is a step of its own again. Local."""
        self.window = None
        self.wrapped.require_backward_grad_sync = True
        self.reducer.weight, self.reducer.share = 1.0, None
        self.buffers.source = 0

    def _follow_changes(self) -> None:
        """Take in what was done to the parameters since the last forward. Collective if some were unfrozen."""
        if any(parameter.requires_grad for parameter in self._frozen):
            managed = self.setting.managed(self._module)
            self.verify(managed)
            conflicts.check_linear(managed, self.setting.reduction)
            self.rebuild_reducer(managed)
        self.reducer.on_reduced = self.wrapped._take_over_optimizers()

    def has_synchronized_buffers(self) -> bool:
        return self.wrapped.forward_sync_buffers and bool(self.buffers.named())

    def _synchronize_buffers(self, will_synchronize: bool) -> None:
        """Before the forwards of a step that will be synchronized: all ranks take rank 0's buffers. Collective."""
        is_training, joins = self.wrapped.training, self.join.is_enabled(self.wrapped)
        synchronizes = will_synchronize and is_training and self.has_synchronized_buffers()
        hook = self.buffers.hook
        if synchronizes and hook is None and not (self.buffers.are_in_line and not joins):
            self.buffers.synchronize(agree_on_source(self, is_candidate=True) if joins else 0)
            self.buffers.are_in_line = True
        elif synchronizes and hook is not None and hook.runs_before_forward:
            self.buffers.run_hook()
        if is_training:  # an evaluation on one rank must not change what this rank's backward does
            self.buffers.come_at_end = synchronizes and hook is None and not joins

    # ---- a step

    def watch(self, output_nodes: Sequence[Any]) -> None:
        """A forward has returned what these nodes made: begin as soon as a backward reaches one of them."""
        self.reducer.watch(output_nodes)
        hook = self.buffers.hook
        if hook is not None and not hook.runs_before_forward and self.has_synchronized_buffers():
            self.buffers.run_hook()

    def _synchronizes(self) -> bool:
        """Whether the backward that begins now does."""
        return self._begins_plain_step() if self.window is None else self.window.note_backward()

    def _begins_plain_step(self) -> bool:
        return self._says_the_wrapper() and (self.weighing.plain is None or self.weighing.exchange_plain())

    def _says_the_wrapper(self) -> bool:
        return (wrapped := self._wrapped()) is None or wrapped.require_backward_grad_sync

    def synchronize_gradients(self) -> None:
        """Reduce what earlier backwards have left in `.grad`. Collective; blocks."""
        self.reducer.prepare()
        come_at_end, self.buffers.come_at_end = self.buffers.come_at_end, False
        self.reducer.run_without_autograd()
        self.buffers.come_at_end = come_at_end  # with the backward of a forward that is still open

    def take_final_model(self, is_last_joiner: bool) -> None:
        """After `join`: all ranks take the model of a rank that trained to the end. Collective; blocks."""
        self.join.authoritative_rank = agree_on_source(self, is_candidate=is_last_joiner)
        self.reducer.num_averaged = None
        self.broadcast_model(self.join.authoritative_rank, with_buffers=self.wrapped.forward_sync_buffers)


def _always() -> bool:
    return True
