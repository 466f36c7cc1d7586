"""The settings of one module's reduction, made of the constructor's checked arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from paceline.comm.gradient_group import on_one_host
from paceline.ddp import arguments, mixed_precision
from paceline.ddp.droppable import Unit, units_of
from paceline.ddp.layout import ManagedParameters
from paceline.ddp.replicas import tell_of_refusal
from paceline.ddp.step_shares import StepShares
from paceline.ddp.tensor_parallel import make_shards_local
from paceline.planning.bucket_assignment import BucketCaps
from paceline.reductions import Mean, Reduction
from paceline.reductions.hook import is_users_hook


@dataclass
class Setting:
    """The settings of one module's reduction."""

    process_groups: list[ProcessGroup]  # over whom; several take turns, bucket by bucket
    ignored: set[str]  # names of parameters and buffers that stay each rank's own
    parameters: list[Parameter]  # of the module, without those to ignore; frozen ones included
    delayed: list[Parameter]  # parameters that are reduced after all others
    droppable: tuple[Unit, ...]  # what steps may skip
    skips_unused: bool  # what no rank's backward reaches is not reduced
    find_unused_parameters: bool  # look for unused parameters when backward begins, from the first one on
    # Every backward touches the same parameters equally often; learn how often from the first one.
    static_graph: bool
    reduction: Reduction  # what combining means
    given_caps: BucketCaps | None  # when a bucket is full, as the caller said; None: a default
    overlaps_forward: bool  # the next forward waits for what is reduced
    # What this rank's batch counts, by the forward's inputs, in steps outside of windows.
    weight: Callable[..., float] | None
    shares: StepShares | None  # connects the module with its batches' sampler
    # Whether any rank, as far as this one knows, has its parameters on a CPU.
    any_on_cpu: bool = field(init=False)
    any_on_accelerator: bool = field(init=False)  # ... or on an accelerator
    caps: BucketCaps = field(init=False)  # when a bucket is full

    def __post_init__(self) -> None:
        self.learn_devices([self.device.type == "cpu"])

    @classmethod
    def of(cls, module: Module, given: Any) -> Setting:
        """Check the constructor's arguments, in torch's order, say what they come to; make sharded parameters local.

        Raises RuntimeError or ValueError in torch's words where torch does, else ConfigurationError. Local where all is
        good. If not, and with `init_sync`, the other ranks, which are wrapping theirs, are told.
        """
        process_groups = arguments.choose_process_groups(given.process_group, given.device_mesh)
        try:
            return cls._checked(module, given, process_groups)
        except (RuntimeError, ValueError) as error:
            if given.init_sync:
                parameters = module.parameters() if isinstance(module, Module) else ()
                with suppress(RuntimeError):  # a group that carries nothing of this rank's
                    tell_of_refusal(error, process_groups[0], next(iter(parameters), torch.empty(0)).device)
            raise

    @classmethod
    def _checked(cls, module: Module, given: Any, process_groups: list[ProcessGroup]) -> Setting:
        arguments.check_delayed(given.delay_all_reduce_named_params, given.param_to_hook_all_reduce)
        make_shards_local(module, given.device_mesh)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        parameters = [p for name, p in module.named_parameters() if name not in ignored]
        arguments.check_not_wrapped(module)
        arguments.check_module(parameters)
        arguments.choose_devices(parameters, given.device_ids, given.output_device)
        arguments.check_device(parameters, process_groups)
        given_caps = BucketCaps.from_arguments(given.bucket_cap_mb, given.bucket_cap_mb_list)
        delayed = [p for _, p in given.delay_all_reduce_named_params or ()]
        units = units_of(module, given.droppable)
        managed = ManagedParameters.of(module, ignored, delayed, units)
        reduction = arguments.choose_reduction(given.reduction, given.compression, given.mixed_precision)
        arguments.check_linear(managed, reduction)
        if units or given.skip_all_reduce_unused_params:
            is_static = given.static_graph and bool(units)
            arguments.check_skipping(
                units, reduction, overlap_forward=given.overlap_forward, static_graph=is_static
            )
        if given.overlap_forward:
            arguments.check_forward_overlap(module, managed, process_groups, reduction, given)
        low = given.mixed_precision
        if low is not None and low.param_dtype is not None:
            mixed_precision.check(module, low.param_dtype, low.buffer_dtype)
        reduction.prepare(managed.named(), process_groups[0])
        device = parameters[0].device
        shares = arguments.choose_shares(given.batch_sampler, given.balance, process_groups[0], device)
        return cls(
            process_groups=process_groups,
            ignored=ignored,
            parameters=parameters,
            delayed=delayed,
            droppable=units,
            skips_unused=given.skip_all_reduce_unused_params,
            find_unused_parameters=given.find_unused_parameters,
            static_graph=given.static_graph,
            reduction=reduction,
            given_caps=given_caps,
            overlaps_forward=bool(given.overlap_forward),
            weight=given.weight,
            shares=shares,
        )

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter."""
        return self.parameters[0].device

    def managed(self, module: Module, kept: Iterable[Parameter] = ()) -> ManagedParameters:
        """Return the parameters that are synchronized now: none added since wrapping; frozen ones only if `kept`."""
        known = set(map(id, self.parameters))
        added = {name for name, parameter in module.named_parameters() if id(parameter) not in known}
        left_out, kept_ids = self.ignored | added, set(map(id, kept))
        return ManagedParameters.of(module, left_out, self.delayed, self.droppable, kept_ids)

    def choose_caps(self) -> None:
        """Take the caps that were given; else the default for these groups, hosts and devices. Local."""
        size_bytes = sum(p.numel() * p.element_size() for p in self.parameters if p.requires_grad)
        num_ranks = self.process_groups[0].size()
        default = BucketCaps.default(
            size_bytes, self.any_on_cpu, on_one_host(unknown=True), num_ranks, self.overlaps_forward
        )
        self.caps = self.given_caps or default

    def learn_devices(self, are_on_cpu: Sequence[bool]) -> None:
        """Note for each rank whether it has its parameters on a CPU. Local."""
        self.any_on_cpu, self.any_on_accelerator = any(are_on_cpu), not all(are_on_cpu)
        self.choose_caps()

    def move_to(self, process_groups: list[ProcessGroup]) -> None:
        """Reduce over these from now on; default caps depend on the number of ranks. Local."""
        self.process_groups = process_groups
        self.choose_caps()

    def reduce_by(self, reduction: Reduction) -> None:
        """Combine gradients so from now on. Local; before the first backward."""
        self.reduction = reduction

    def expect(self, find_unused_parameters: bool, static_graph: bool) -> None:
        """Take over the wrapper's attributes, which users may set. Local; between backwards."""
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph

    def described_caps(self) -> str:
        """Return the caps that were asked for. They are equal on all ranks, also where defaults depend on the rank."""
        place = "one host" if on_one_host(unknown=True) else "several hosts"
        return str(self.given_caps or f"default on {place}")

    def for_a_copy(self) -> Setting:
        """Return what survives pickling: all but groups, and a hook, which the wrapper registers again."""
        kept = copy.copy(self)
        kept.process_groups = []
        kept.reduction = Mean() if is_users_hook(self.reduction) else self.reduction
        return kept

    def begin_copy(self, module: Module, process_group: ProcessGroup) -> None:
        """Train a copied module over this group from now on. Local."""
        self.move_to([process_group])
        self.reduction.prepare(self.managed(module).named(), process_group)
        if self.shares is not None:
            self.shares.begin(process_group.rank(), process_group.size(), self.device)
