"""`DistributedDataParallel`: a module whose backward leaves every rank with the same gradients.

The gradient's way from here: `forward` arms (`Reducer.prepare`, `watch`), backward wakes the reducer (`reducer.py`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.utils import _to_kwargs
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.comm.peers import next_name
from paceline.compression import Compressor
from paceline.data import Balance, GlobalBatches
from paceline.ddp import arguments, inputs_outputs, sync_batch_norm
from paceline.ddp.accumulation import Batch, Window
from paceline.ddp.coordinator import StepCoordinator
from paceline.ddp.forward_overlap import ForwardOverlap
from paceline.ddp.membership import Membership
from paceline.ddp.mixed_precision import LowPrecision, cast_buffers
from paceline.ddp.reducer import Reducer
from paceline.ddp.setting import Setting
from paceline.ddp.torch_compat.dynamo import (
    may_compile,
    run_uncompiled_if_compiling,
    runs_module,
    skip_package,
)
from paceline.ddp.torch_compat.torch_surface import (
    TorchSurface,
    restore_names,
    take_back_names,
    without_group,
)
from paceline.errors import ConfigurationError
from paceline.observe import StepTimings
from paceline.recording.model_facts import is_finite
from paceline.reductions import Reduction

if TYPE_CHECKING:
    from paceline.diagnosis import Diagnosis


class DistributedDataParallel(TorchSurface, TorchDDP):  # type: ignore[misc, override]
    """Data parallelism over any c10d process group, in place of `torch.nn.parallel.DistributedDataParallel`.

    Every rank wraps the same module and trains on its own part of the batch. After a backward outside `no_sync`, every
    parameter's `.grad` is, bitwise the same on all ranks, the mean of the ranks' gradients.

    `docs/reference/differences.md` lists what differs from torch's. The first difference: `.grad` is always a view into
    a buffer that the next step writes again. Clone its views, `.data` and NumPy arrays to keep them.

    Args:
        module: The module; its parameters and buffers are overwritten by rank 0's.
        device_ids: The one device of a CUDA module, so that inputs are moved to it; None otherwise.
        output_device: Kept for its signature; outputs are not moved.
        dim: For `scatter` and `gather`.
        broadcast_buffers: Deprecated; use `forward_sync_buffers`.
        init_sync: Compare the ranks' modules and copy rank 0's values. False: no collective in the constructor.
        process_group: Over whom; a list of groups with the same ranks takes turns, bucket by bucket.
        bucket_cap_mb: MiB that make a bucket full; default 25 and 1 for the first, other for CPUs of several hosts.
        find_unused_parameters: Look for unused parameters from the first step on.
        check_reduction: Deprecated and ignored.
        gradient_as_bucket_view, batched_grad_copy: Always so; the arguments are accepted.
        static_graph: Every step uses the same parameters equally often.
        delay_all_reduce_named_params: (name, parameter) pairs that are reduced after all others.
        param_to_hook_all_reduce: Accepted with it; they leave when backward has ended.
        mixed_precision: Torch's `_MixedPrecision`: dtypes for computing, reducing and buffers. Works on the CPU too.
        device_mesh: A one-dimensional mesh, in place of a process group.
        skip_all_reduce_unused_params: Buckets that no rank uses in a step are not reduced, whichever these are; the
            ranks agree on them as backward begins. Not with everything: see `droppable`.
        bucket_cap_mb_list: Caps of the first, second, ... bucket; the last one repeats.
        forward_sync_buffers: Give all ranks rank 0's buffers before a step's first forward that will be synchronized.
        lazy_bucket_allocation: Of torch 2.15; warned about and ignored: gradients are the buckets, never a second copy.
        reduction: What combining the ranks' gradients means, by name or as an object; None is the mean. Not torch's.
        overlap_forward: Let the next forward run while gradients are still under way. Backward returns when autograd is
            done on all ranks. A module's forward waits for its own parameters only. For an optimizer that went through
            `paceline.optim.overlap`, on CPUs of several hosts, over Gloo; used where it is predicted to shorten a step.
            "always": without asking. Not torch's.
        compression: Send fewer bytes for the mean: "fp16", "bf16", "int8", "onebit", "topk", "randomk", "powersgd", a
            `paceline.compression.Compressor`, or a reduction that compresses. "auto": only if that shortens a step.
            Not torch's.
        weight: What this rank's batch counts in the mean over ranks, as a function of the forward's arguments: its
            samples, tokens, unmasked targets. For steps of one forward in training mode, outside of `accumulate`; of
            several forwards before a backward the last one's. When backward begins, the ranks exchange 8 bytes each.
            None: every rank counts the same. Not torch's.
        batch_sampler: The loader's `GlobalShuffle` or `TokenShuffle`, or a `GlobalStream`, whose `steps` are trained.
            Samples, or tokens, count alike then without `weight`, and shares may change between steps. Not torch's.
        droppable: Modules, parameters or names that steps may `skip`, each entry as a whole, such as `list(net.blocks)`
            or `[net.backbone]`: they get buckets of their own. Not with reductions that need every bucket, a static
            graph and `overlap_forward`. Not torch's.
        balance: "auto": move samples of `batch_sampler` from slow ranks to fast ones; or a `paceline.data.Balance`.
            Not torch's.

    Contract:
        Collective: the constructor without `init_sync=False`, a forward that will be synchronized (buffers), and the
        end of its backward. Ranks must run equally many of these, in the same order.

    Raises:
        ReplicaMismatchError: The ranks wrap different modules; on every rank, with the same message.
        RuntimeError, ValueError: What torch raises for the same mistake, in its words.

    Source:
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
    """

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        lazy_bucket_allocation: bool = False,
        reduction: Reduction | str | None = None,
        compression: Compressor | Reduction | str | None = None,
        weight: Callable[..., float] | None = None,
        batch_sampler: GlobalBatches | None = None,
        balance: Balance | str | None = None,
        overlap_forward: bool | str = False,
        droppable: Any = None,
    ) -> None:
        given = SimpleNamespace(**locals())  # the arguments, by name
        Module.__init__(self)
        Joinable.__init__(self)
        self._paceline_error: dict[str, Any] = {}
        self._paceline_setting = Setting.of(module, given)
        self._paceline_name_as_torch(given)
        self.forward_sync_buffers, init_sync_buffers = arguments.choose_buffer_policy(
            broadcast_buffers, forward_sync_buffers
        )
        self.overlaps_forward = bool(overlap_forward)
        arguments.warn_of_ignored(
            check_reduction, static_graph, find_unused_parameters, lazy_bucket_allocation
        )
        self._paceline_set_up(init_sync, init_sync_buffers, overlap_forward)

    def _paceline_set_up(
        self, init_sync: bool, init_sync_buffers: bool, overlap_forward: bool | str = False
    ) -> None:
        """Set up all that depends on the process group and cannot be pickled. Collective if `init_sync`."""
        self._paceline_init_torch_surface()
        setting = self._paceline_setting
        managed = setting.managed(self.module)
        name = next_name(self.process_group, init_sync)
        self._paceline_coordinator = steps = StepCoordinator(self, setting, name)
        if steps.has_sync_batch_norm:
            sync_batch_norm.adopt(self.module)
        more = (("broadcast_buffers", init_sync_buffers), ("overlap_forward", overlap_forward))
        if init_sync:
            verified = steps.verify(managed, *more)
            setting.learn_devices(verified.are_on_cpu)
            steps.membership.open_gradient_groups(verified)
            steps.broadcast_model(source=0, with_buffers=init_sync_buffers)
            steps.separate_batch_norm()
        if self.mixed_precision is not None and self.mixed_precision.buffer_dtype is not None:
            cast_buffers(self.module, self.mixed_precision.buffer_dtype)
        if init_sync or not steps.buffers.named():
            steps.buffers.take_layout()
        self._paceline_low_precision: LowPrecision | None = None
        if self.mixed_precision is not None and self.mixed_precision.param_dtype is not None:
            self._paceline_low_precision = LowPrecision(self.module, self.mixed_precision.param_dtype)
        steps.overlap_forward(overlap_forward)
        steps.build_reducer(managed)
        weakref.finalize(self, steps.let_go)
        self._paceline_initial_bucket_sizes = [bucket.size_bytes for bucket in self.reducer.buckets]
        self._register_load_state_dict_pre_hook(restore_names, with_module=True)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(take_back_names)  # type: ignore[no-untyped-call]

    @property
    def membership(self) -> Membership:
        """Return the ranks that train the module together, with their groups. Its `rebuild` replaces them by others."""
        return self._paceline_coordinator.membership

    @property
    def forward_overlap(self) -> ForwardOverlap | None:
        """Return the state of forward overlap: `is_on`, `gain`. None without `overlap_forward`.

        `timings.decisions["overlap_forward"]` says in words whether it is on, and why.
        """
        return self._paceline_coordinator.forward_overlap

    def flush(self) -> None:
        """Complete the steps that `overlap_forward` has deferred: every gradient arrives, every parameter is stepped.

        Each read of a parameter or a gradient waits for it anyway. This is for reads that torch does not see, and for
        measuring. Local: waits for what the ranks have launched. Raises PeerLostError if a rank died or hangs; the
        model cannot be used any more then.
        """
        if self.forward_overlap is not None:
            self.forward_overlap.flush()

    @property
    def reducer(self) -> Reducer:  # type: ignore[override]
        """Return the reducer in use. It is another one after parameters were unfrozen."""
        return self._paceline_coordinator.reducer

    # ---- forward

    @runs_module
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Its backward, unless under `no_sync`, will reduce gradients."""
        with record_function("DistributedDataParallel.forward") if _profiler_enabled() else nullcontext():
            began_s = time.perf_counter()
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            output = self._run_ddp_forward(*inputs, **kwargs)
            output = self._post_forward(output)
            self.reducer.note_forward(time.perf_counter() - began_s)
            return output

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if _trains():
            self._paceline_coordinator.prepare_forward(inputs, kwargs)
        elif torch._C._functorch.peek_interpreter_stack() is None:
            self.reducer.prepare_evaluation()
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            copies_beside = self.use_side_stream_for_tensor_copies
            moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, copies_beside)
            return moved_inputs[0], moved_kwargs[0]
        return inputs, kwargs

    @runs_module
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._paceline_check_not_within(TorchDDP._active_ddp_module)
        if (overlap := self._paceline_coordinator.forward_overlap) is not None:
            run_uncompiled_if_compiling(overlap.flush)  # what dynamo makes of a module may not run its hooks
        outer, TorchDDP._active_ddp_module = TorchDDP._active_ddp_module, self
        try:
            if self._paceline_low_precision is not None:
                return self._paceline_low_precision.forward(inputs, kwargs)
            return self._paceline_call_module(*inputs, **kwargs)
        finally:
            TorchDDP._active_ddp_module = outer

    @may_compile
    def _paceline_call_module(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        if _trains():
            begin = self.reducer.open_forwards.begin_of_last
            nodes = inputs_outputs.find_nodes(output, self.module, begin)
            self._paceline_coordinator.watch(nodes)
            if self._paceline_low_precision is not None:
                self._paceline_low_precision.keep_for_backward(nodes)
        return output

    # ---- when to synchronize

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate local gradients in backwards that begin in this context. The next one outside reduces the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def accumulate(
        self, batches: Sequence[Batch], weight: Callable[[Batch], float] | None = None
    ) -> Window[Batch]:
        """Accumulate the micro-batches of one optimizer step, each counted by its weight, over all ranks.

        Within `with model.accumulate(batches, weight=...) as micro_batches:` iterate over `micro_batches`; each turn
        runs forward and backward of its micro-batch's *mean* loss. Afterwards `.grad` is sum(w g) / sum(w) over the
        micro-batches of all ranks, as `docs/guide/accumulation.md` shows. Only the last backward communicates.

        Args:
            batches: This rank's micro-batches. Ranks may have different numbers of them, or none.
            weight: What a micro-batch counts: its number of samples or tokens. None: each counts the same, or, in a
                model that was given its `batch_sampler`, its samples. One of weight 0 is left out. A reduction other
                than the mean is given gradients that are multiplied by their weight relative to the average rank's.

        Contract:
            Collective: entering, and the last backward (leaving, on a rank without micro-batches).
            If nothing counts on any rank, `.grad` stays None everywhere, and an optimizer changes nothing.

        Raises:
            PeerOutOfMemoryError: A rank ran out of memory. Not raised with `balance`: the window's `repeats` is True
                then, there are no gradients, and `steps` hands out the same samples again, in other shares.
            PeerAbortedError: Another rank raised within its window; no rank has gradients. The guide lists more.
        """
        return Window(self._paceline_coordinator, batches, weight)

    def sync_gradients(self) -> None:
        """Reduce what backwards under `no_sync` have accumulated, without another forward and backward.

        Contract:
            Collective: every rank.  Blocks: yes.  Mutates: `.grad` of all parameters.
        """
        self._paceline_coordinator.synchronize_gradients()

    def skip(self, *what: Module | torch.nn.Parameter | str | Iterable[Any]) -> AbstractContextManager[None]:
        """Make no gradients of these parts in backwards that begin in this context. Their buckets are not reduced.

        Their `.grad` stays what it was, as that of any parameter that no rank has used. Contexts add up. Within
        `no_sync` or a window nothing is lost: what an earlier micro-batch of the step has used is reduced.

        Args:
            what: Modules, parameters or names; entries of `droppable`. The same on every rank: draw from one seed.

        Contract:
            Local; every synchronized backward of a model with `droppable` compares what the ranks skip, in a small sum
            while autograd runs. A backward raises, on every rank, with all parameters untouched:

        Raises:
            SkipError: The ranks skip different layers, which it names; or a gradient was made of what is skipped (the
                other ranks then get a PeerAbortedError).
            ConfigurationError: What is no entry of `droppable`, nor several; at once.
        """
        if self._paceline_coordinator.skipping is None:
            raise ConfigurationError(
                "skip(): this model was not told what may be skipped. All ranks have to know that from the start: give "
                "DistributedDataParallel(..., droppable=list(net.blocks))."
            )
        return self._paceline_coordinator.skipping.skip(*what)

    @property
    def reduction(self) -> Reduction:
        """Return the reduction of the ranks' gradients. Its `state_dict()` is this rank's own; every rank saves it.

        A step that `overlap_forward` has deferred is completed first: as `flush`.
        """
        self.flush()
        return self._paceline_setting.reduction

    def balance_report(self) -> dict[str, Any]:
        """Return what `balance` has learnt and done, for JSON; empty without it. Local; the same on every rank."""
        shares = self._paceline_setting.shares
        if shares is None or shares.balance is None:
            return {}
        return shares.balance.report(shares.sampler.batch)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as torch's; those that are still under way once they have been used."""
        overlap = self.forward_overlap
        if overlap is not None and overlap.has_outstanding:
            overlap.zero_grad_of(self._paceline_setting.parameters, set_to_none)
        else:
            super().zero_grad(set_to_none)

    def gradients_are_finite(self) -> bool:
        """Return whether all gradients are finite. If not, skip the optimizer's step, on all ranks alike.

        Contract:
            Local, or collective if each rank has parts of the gradients (`paceline.optim.shard` between hosts). After a
            synchronized backward the same on every rank.
        """
        gradients = self._paceline_gradients()
        if self._paceline_norm_of_parts is not None:
            return bool(self._paceline_norm(gradients, float("inf")).isfinite())
        return all(map(is_finite, gradients.values()))

    @property
    def _paceline_norm_of_parts(self) -> Callable[[dict[torch.nn.Parameter, Tensor], float], Tensor] | None:
        """Return the norm of a reduction that leaves each rank a part of the gradients; None of any other."""
        return getattr(self._paceline_setting.reduction, "norm_of_parts", None)

    def _paceline_norm(self, gradients: dict[torch.nn.Parameter, Tensor], norm_type: float) -> Tensor:
        norm_of_parts = self._paceline_norm_of_parts
        if norm_of_parts is None:
            return torch.nn.utils.get_total_norm(list(gradients.values()), norm_type)
        try:
            return norm_of_parts(gradients, norm_type)
        except RuntimeError as error:
            self.membership.peers.fail(error, "computing the norm of all ranks' gradients")

    def _paceline_gradients(self) -> dict[torch.nn.Parameter, Tensor]:
        """Return this rank's part of each gradient."""
        has_parts = self._paceline_norm_of_parts is not None
        with torch._C.DisableTorchFunctionSubclass() if has_parts else nullcontext():
            return {p: p.grad for p in self._paceline_setting.parameters if p.grad is not None}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm, as that of one vector, is at most `max_norm`. Return the norm before.

        Contract:
            Local, or collective if each rank has parts of the gradients (`paceline.optim.shard` between hosts). After a
            synchronized backward the same on every rank.  Mutates: gradients.
        """
        gradients = self._paceline_gradients()
        total = self._paceline_norm(gradients, norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch's
        for gradient in gradients.values():
            gradient.detach().mul_(factor.to(gradient.device))
        return total

    @property
    def timings(self) -> StepTimings:
        """Return when each bucket of the last steps was ready, launched and done, and how long backward waited."""
        return self.reducer.timings

    def doctor(self) -> Diagnosis:
        """Say which rank or link delayed the last steps, why, and the step without it; `words` is for people.

        The last 256 steps of every rank are compared. Not seen: what `paceline doctor` samples besides, such as other
        processes on a core.

        Contract:
            Collective: every rank, between steps.  Blocks: yes.  Afterwards: the same answer on every rank.
        """
        return self._paceline_coordinator.doctor()

    # ---- uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return torch's context in which ranks may have different numbers of batches, with torch's arguments."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        left_out = {"_paceline_coordinator", "logger", "device_mesh", "_paceline_low_precision"}
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        state["_load_state_dict_pre_hooks"] = type(self._load_state_dict_pre_hooks)()
        state["_load_state_dict_post_hooks"] = type(self._load_state_dict_post_hooks)()
        state["_comm_hooks"] = [(hook, without_group(held)) for hook, held in self._comm_hooks]
        state["_paceline_setting"] = self._paceline_setting.for_a_copy()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        Module.__setstate__(self, state)
        hooks, hook_name, buffer_hook = self._comm_hooks, self._paceline_hook_name, self.buffer_hook
        self._paceline_setting.begin_copy(self.module, dist.distributed_c10d._get_default_group())
        self._paceline_set_up(init_sync=False, init_sync_buffers=False)
        self._paceline_register_again(hooks, hook_name, buffer_hook)


def _trains() -> bool:
    """Return whether a backward may follow. `torch.func` transforms differentiate by themselves, without `.grad`."""
    return torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None


# Dynamo compiles the wrapped module and leaves alone what runs around it; all of that has been imported by now.
runs_module(LowPrecision.forward)
for _package in ("paceline.ddp", "paceline.reductions", "paceline.observe"):
    skip_package(_package)
