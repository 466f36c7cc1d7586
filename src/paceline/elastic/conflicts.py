"""Checks before elastic training: what cannot outlive a lost rank, and what a new rank must have in common."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from paceline.comm.collectives import backend_of
from paceline.comm.device import is_accelerator
from paceline.comm.device_steps import why_not_voted
from paceline.comm.device_vote import why_not_left
from paceline.data import GlobalShuffle
from paceline.ddp import DistributedDataParallel
from paceline.elastic.agent_connection import RESUME
from paceline.errors import ConfigurationError
from paceline.optim import ExchangingOptimizer
from paceline.optim.shard import is_sharded, why_not_among_others
from paceline.reductions import Mean

_BACKENDS = ("gloo", "paceline")
_CAPS = "argument bucket caps"
_MOST_CHARACTERS, _NUM_DIGESTS = 20_000, 100  # of a card, which is one message


def check(
    model: object,
    optimizers: Sequence[object],
    states: Sequence[object],
    sampler: object,
    is_deterministic: bool,
) -> None:
    """Raise ConfigurationError for what could not go on with other ranks. Local; the same on every rank."""
    if not isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            f"Elastic(model={type(model).__name__}): give the model that paceline.DistributedDataParallel wraps."
        )
    for reason in (
        *_of_accelerate([model, *optimizers, *states]),
        *_of_sampler(model, sampler),
        *_of_group(model),
        *_of_model(model, any(map(is_sharded, optimizers))),
        *_of_optimizers(optimizers, is_accelerator(model.membership.device)),
        *(_of_determinism(model) if is_deterministic else ()),
    ):
        raise ConfigurationError(f"Elastic: {reason}")
    for each in states:
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigurationError(
                f"Elastic(scheduler={type(each).__name__}): a rank that comes must receive it. Give an object with "
                "state_dict() and load_state_dict(), or leave it out."
            )


def _of_accelerate(given: Sequence[object]) -> Iterator[str]:
    for each in given:
        if getattr(each, "_is_accelerate_prepared", False):
            yield (
                f"{type(each).__name__} was prepared by Accelerate, which counts the ranks once, as it begins. Wrap "
                "the model yourself and write the loop without Accelerator: docs/guide/from-accelerate.md."
            )


def _of_sampler(model: DistributedDataParallel, sampler: object) -> Iterator[str]:
    shares = model.membership.model.shares
    if not isinstance(sampler, GlobalShuffle):
        given = None if sampler is None else type(sampler).__name__
        yield (
            f"sampler={given} cannot move a lost rank's samples to the others. Give a paceline.data.GlobalShuffle or "
            "TokenShuffle; a GlobalStream is read in order, without going back."
        )
    elif shares is None or shares.sampler is not sampler:
        yield (
            "the model was not given this sampler, so it does not know the samples of its steps. Write "
            "DistributedDataParallel(net, batch_sampler=sampler) and Elastic(..., sampler=sampler)."
        )


def _of_group(model: DistributedDataParallel) -> Iterator[str]:
    members = model.membership
    if members.process_group is not dist.group.WORLD or len(members.groups.asked_for) > 1:
        yield (
            "the model trains over a group of its own, and only the job's default group is replaced when ranks "
            "change. Leave out process_group=."
        )
    elif is_accelerator(members.device):
        yield from _of_device(model, members.process_group, members.device)
    elif backend_of(members.process_group) not in _BACKENDS:
        yield (
            f"the backend is {backend_of(members.process_group)!r} and the model on {members.device.type!r}. A wait "
            f"for a lost rank on the CPU can be ended over {' or '.join(_BACKENDS)} only."
        )


def _of_device(
    model: DistributedDataParallel, group: dist.ProcessGroup, device: torch.device
) -> Iterator[str]:
    yield from why_not_left(group, device)
    if len({each.device for each in model.module.parameters()}) > 1:
        yield "the module is on several devices of this process, and one of them votes. Put it on one."
    if any("_in_backward_optimizers" in vars(each) for each in model.module.parameters()):
        yield (
            "an optimizer steps within backward, before the devices have voted on the step. Step it behind the window."
        )


def _of_model(model: DistributedDataParallel, is_sharded: bool) -> Iterator[str]:
    steps = model.membership.model
    if why := steps.reduction.why_not_over(None):
        yield why
    if (why := model.membership.why_together) and not is_sharded:
        yield f"{why}. Train without it, or restart from checkpoints (torchrun --max-restarts)."
    if model.forward_overlap is not None or model.overlaps_forward:
        yield (
            "overlap_forward steps parameters while the next step runs, so a lost rank leaves some stepped and others "
            "not. Leave it out."
        )
    if steps.has_droppable:
        yield (
            "droppable= leaves out what the script draws in each step, by a generator that a rank which comes has not "
            "drawn from. Leave it out."
        )
    groups = [*model.membership.groups.asked_for, model.membership.groups.for_batch_norm, None]
    norms = [each for each in model.module.modules() if isinstance(each, torch.nn.SyncBatchNorm)]
    if any(each.process_group not in groups for each in norms):
        yield (
            "synchronized batch normalisation over a group of its own, which ends when ranks change. Leave out its "
            "process_group."
        )


def _of_optimizers(optimizers: Sequence[object], on_device: bool) -> Iterator[str]:
    for each in optimizers:
        if not isinstance(each, Optimizer):
            yield f"optimizer={type(each).__name__} is no torch optimizer. Give the object itself, or a list of them."
        elif isinstance(each, ExchangingOptimizer):
            yield (
                f"{type(each).__name__} communicates in its step, or trains several steps apart: ranks cannot say "
                "where a lost one was. Use an optimizer that steps on this rank alone."
            )
        elif (is_sharded(each) and (why := why_not_among_others(each))) or (
            on_device and (why := why_not_voted(each))
        ):
            yield why


def _of_determinism(model: DistributedDataParallel) -> Iterator[str]:
    words, steps = "deterministic=True: ", model.membership.model
    if type(steps.reduction) is not Mean:
        yield f"{words}gradients are folded as they are. Leave out compression= and reduction=."
    if steps.shares is not None and steps.shares.balance is not None:
        yield f"{words}shares that follow measured times are no fixed ones. Leave out balance=."
    for name, each in model.module.named_modules():
        if isinstance(each, torch.nn.SyncBatchNorm):
            yield f"{words}{name or type(each).__name__} normalises over the ranks that there are. Use GroupNorm."
        if getattr(each, "track_running_stats", False):
            yield (
                f"{words}{name or type(each).__name__} keeps running statistics of what rank 0 has seen, which depends "
                "on the number of ranks. Use GroupNorm, or track_running_stats=False."
            )
        if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and each.sparse:
            yield f"{words}{name} has sparse gradients, which are summed as they come. Leave out sparse=True."
    if any(each.is_complex() for each in model.module.parameters()):
        yield f"{words}gradients of complex parameters are not folded. Hold their real and imaginary parts."


def check_given(
    checkpoint: object, notice: object, shadow: object = 0, optimizers: Sequence[object] = ()
) -> None:
    """Raise ConfigurationError if `checkpoint` or `notice` is neither path nor function, or `shadow` lacks a folder.

    A sharded optimizer needs a shadow.
    """
    if not (checkpoint is None or callable(checkpoint) or isinstance(checkpoint, (str, os.PathLike))):
        raise ConfigurationError(
            f"Elastic(checkpoint={checkpoint!r:.60}): give a folder, or a function without arguments that saves a "
            'checkpoint, such as lambda: torch.save(net.state_dict(), "last.pt").'
        )
    if not (notice is None or callable(notice) or isinstance(notice, (str, os.PathLike))):
        raise ConfigurationError(
            f"Elastic(notice={notice!r:.60}): give the path of a file that appears when this machine is told to "
            "go, or a function that returns something true then."
        )
    if shadow not in (0, 1):
        raise ConfigurationError(
            f"Elastic(shadow={shadow!r:.20}): a job has one shadow, or none. Give 1 or 0."
        )
    if shadow and not (isinstance(checkpoint, (str, os.PathLike)) or os.environ.get(RESUME)):
        raise ConfigurationError(
            'Elastic(shadow=1): a shadow needs a folder to write into. Pass Elastic(..., checkpoint="checkpoints", '
            "shadow=1)."
        )

    if not shadow and any(map(is_sharded, optimizers)):
        raise ConfigurationError(
            "Elastic: an optimizer is sharded, so a lost rank takes its part of the state with it. A shadow holds all "
            'of it: pass Elastic(..., checkpoint="checkpoints", shadow=1).'
        )


def card(
    model: DistributedDataParallel,
    optimizers: Sequence[Optimizer],
    states: Sequence[Any],
    sampler: GlobalShuffle,
) -> str:
    """Return the facts that must be equal on all ranks, one per line. Local."""
    lines = [f"torch {torch.__version__.partition('+')[0]}"]
    # What ranks compare when they meet, and raise if it differs: one that comes shall not end the others by that.
    # How many hosts there are, which decides on default caps, it knows only then.
    lines += [
        f"{title}: {fact.partition(' on ')[0] if title == _CAPS else fact}"
        for title, fact in model.membership.model.facts()
    ]
    lines += [
        f"optimizer {type(each).__name__} with {[len(group['params']) for group in each.param_groups]} parameters"
        for each in optimizers
    ]
    lines += [f"state of {type(each).__name__}" for each in states]
    lines.append(f"{type(sampler).__name__} of {sampler.num_samples} samples")
    return "\n".join(shortened(lines))


def shortened(lines: Sequence[str]) -> list[str]:
    """Shorten these facts to fit into a message between a rank and its agent: several become one, by a digest."""
    if sum(map(len, lines)) <= _MOST_CHARACTERS:
        return [*lines]
    size = math.ceil(len(lines) / _NUM_DIGESTS)
    found = []
    for begin in range(0, len(lines), size):
        text = "\n".join(lines[begin : begin + size])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        found.append(f"{lines[begin][:80]} ... (facts {begin + 1} to {begin + size}, digest {digest})")
    return found
