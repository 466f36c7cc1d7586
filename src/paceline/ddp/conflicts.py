"""Checks of options that exclude each other, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from paceline.ddp import sync_batch_norm
from paceline.ddp.droppable import Unit
from paceline.ddp.forward_overlap import outstanding
from paceline.ddp.layout import ManagedParameters
from paceline.errors import ConfigurationError
from paceline.reductions import Mean, NarrowMean, Reduction

_MOST_NAMED = 3


def _refuse(option: str, beside: Mapping[str, object], advice: str) -> None:
    """Raise ConfigurationError, naming what is there of what the option is not possible with."""
    if found := [what for what, is_there in beside.items() if is_there]:
        named = "; nor with ".join(found[:_MOST_NAMED])
        raise ConfigurationError(f"{option} is not possible with {named}{advice}")


def check_linear(managed: ManagedParameters, reduction: Reduction) -> None:
    """Refuse sparse gradients beside a reduction that is not linear: they are always averaged."""
    sparse = [name for name, is_sparse in zip(managed.names, managed.sparse, strict=True) if is_sparse]
    if sparse and not reduction.is_linear:
        raise ConfigurationError(
            f"{reduction!r} combines dense gradients only, and {', '.join(sparse)} would have sparse ones, which are "
            "averaged. Build the embedding with sparse=False, or leave out reduction."
        )


def check_skipping(units: Sequence[Unit], reduction: Reduction, **given: object) -> None:
    """Refuse to leave buckets out beside what needs every bucket, such as these arguments, by name."""
    not_here = {f"{name}={value!r}": value for name, value in given.items()}
    not_here[f"gradients combined by {reduction!r}"] = reduction.needs_all_buckets
    option = "droppable" if units else "skip_all_reduce_unused_params"
    _refuse(option, not_here, ": that needs every bucket in every step. Use one of them.")


def check_forward_overlap(
    module: Module,  # the whole
    managed: ManagedParameters,
    process_groups: Sequence[ProcessGroup],  # over which they are reduced
    reduction: Reduction,
    given: Any,  # the constructor's arguments, as attributes
) -> None:
    """Refuse `overlap_forward` beside what it is not exact for."""
    wanted = given.overlap_forward
    if wanted not in (True, "always"):
        raise ConfigurationError(
            f'overlap_forward={wanted!r} must be True, False or "always" (without asking whether it pays).'
        )
    parts = list(module.modules())
    named = managed.named()
    for parameter in managed.parameters:
        outstanding.complete(parameter)  # it may have been wrapped before
    takers = "only the mean, or BoundedLoss without servers"
    not_here = {
        "a module on several devices": len({p.device for p in managed.parameters}) > 1,
        "init_sync=False (it opens a process group)": not given.init_sync,
        "several process groups": len(process_groups) > 1,
        f"gradients combined by {reduction!r} ({takers})": not reduction.pieces_at_once,
        f"gradients on an accelerator combined by {reduction!r} (only the mean)": type(reduction) is not Mean
        and managed.parameters[0].device.type != "cpu",
        "mixed_precision (it reads all parameters before forward; torch.autocast does not)": given.mixed_precision,
        "sparse gradients": any(managed.sparse),
        "a compiled or scripted part": any(
            isinstance(part, torch.jit.ScriptModule)
            or part._compiled_call_impl is not None
            or hasattr(part, "_orig_mod")
            for part in parts
        ),
        **{
            f"{name}, a {type(p).__name__} (only torch.nn.Parameter)": type(p) is not Parameter
            for name, p in named.items()
        },
    }
    advice = ". Leave out overlap_forward, or the other. `paceline explain is not possible with` says more."
    _refuse("overlap_forward", not_here, advice)


def check_join(model: Any, throws_early: bool) -> None:
    """Raise ConfigurationError if the model needs something that a rank without batches cannot do.

    With `throws_early`, all ranks leave the context as soon as one has no more batches.
    """
    if model.process_group.size() > 1 and not throws_early and sync_batch_norm.are_in_use(model):
        raise ConfigurationError(
            "join() and synchronized batch normalisation: each forward of these layers waits for all ranks, but a rank "
            "without batches runs none. Pass throw_on_early_termination=True, use BatchNorm, or give all ranks equally "
            "many batches."
        )
    if why := model.membership.why_together:
        raise ConfigurationError(
            f"join() is not possible: {why}, and a rank without batches makes no steps. Give all ranks equally many "
            "batches."
        )
    if model.forward_overlap is not None:
        raise ConfigurationError(
            "join() and overlap_forward: a rank without batches has no forward to overlap with, and would keep the "
            "others waiting. Leave out overlap_forward, or give all ranks equally many batches."
        )


def check_comm_hook(reduction: Reduction, overlaps_forward: bool) -> None:
    """Refuse a communication hook beside what it would replace or disturb. Raises torch's RuntimeError."""
    if not isinstance(reduction, Mean | NarrowMean):
        raise RuntimeError(  # noqa: TRY004  torch's class
            f"register_comm_hook: gradients are combined by reduction={reduction!r}, which the hook would "
            "replace. Leave out one of them."
        )
    if overlaps_forward:
        raise RuntimeError(
            "register_comm_hook and overlap_forward: pieces of buckets are summed, which the hook would replace. Leave "
            "out one of them."
        )
