"""Variants of data-parallel training that the time studies compare: wrapper, bucket cap, precision, process groups.

Sides: `ours` and `torch` are the two wrappers. `after` is one all-reduce of everything when backward is done, as in the
mLSTM study. `none` computes alone. Bucket caps are those of the model before its bytes were divided by `scale`, so the
number of buckets stays.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.ddp import DistributedDataParallel as OurDDP
from paceline.planning.bucket_assignment import MEBIBYTE, BucketCaps
from paceline_lab.bench.layer_profile import Profile
from paceline_lab.bench.sides import bucket_bytes
from paceline_lab.bench.timed_model import SleepingOptimizer, TimedModel, gradient_bytes
from paceline_lab.doubles.round_robin import RoundRobin

SIDES = ("ours", "torch", "after", "none")
TORCH_CAPS_MB = (1.0, 25.0)
PAPERS_CAP_MB = 25.0  # torch's default, so the paper's
_SO_MAX_PACING_RATE = 47  # Linux; not in Python's socket module
_NO_CAP = 2**64 - 1
EXACT, HALF = 1e-6, 2e-3  # how far a mean may be from the exact one, relative


@dataclass(frozen=True)
class Variant:
    """The settings of one line of a study.

    Attributes:
        side: Side of SIDES.
        num_ranks: Number of ranks that train; the job's other ranks wait.
        cap_mb: Bucket cap, in MiB of the unscaled model; None: the side's defaults for several hosts.
        half: Whether gradients are reduced in 16 bits.
        sync_every: Micro-steps of which the last one synchronizes.
        num_groups: Process groups that take buckets in turn (`RoundRobin`).
        flow_bytes_per_s: Rate of one TCP connection; None: the link's.
        first_rank_slowness: Factor of rank 0's computing time.
    """

    side: str
    num_ranks: int
    cap_mb: float | None = None
    half: bool = False
    sync_every: int = 1
    num_groups: int = 1
    flow_bytes_per_s: float | None = None
    first_rank_slowness: float = 1.0

    def __post_init__(self) -> None:
        assert self.side in SIDES, self.side
        assert self.num_ranks >= 1
        assert self.sync_every >= 1

    @property
    def tolerance(self) -> float:
        return HALF if self.half else EXACT


@dataclass
class Phases:
    """Wall seconds of every timed step; communication only where it is a phase of its own."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    communication_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)

    def totals_s(self) -> list[float]:
        """Return the length of each step."""
        phases = (self.forward_s, self.backward_s, self.communication_s, self.optimizer_s)
        return [sum(step) for step in zip(*phases, strict=True)]


class VariantTrainee:
    """A variant at work on this rank.

    Args:
        variant: Variant to train.
        profile: Times of the layers, and their shapes.
        scale: Divides the gradients' bytes.
        groups: The process groups of its ranks; as many as it uses.

    Contract:
        Made by all ranks of the groups together, and stepped together.
    """

    def __init__(
        self, variant: Variant, profile: Profile, scale: float, groups: Sequence[dist.ProcessGroup]
    ) -> None:
        self.variant, self.group = variant, groups[0]
        if dist.get_rank() == 0 and variant.first_rank_slowness != 1:
            profile = profile.taking((profile.forward_s + profile.backward_s) * variant.first_rank_slowness)
        self.module = TimedModel(profile, dist.get_rank(), scale)
        self.model = self._wrap(profile, scale, groups)
        self.optimizer = SleepingOptimizer(self.module.parameters(), profile.optimizer_s)

    def _wrap(self, profile: Profile, scale: float, groups: Sequence[dist.ProcessGroup]) -> Any:
        if self.variant.side in ("after", "none"):
            return self.module
        wrapper: Any = OurDDP if self.variant.side == "ours" else TorchDDP
        caps = bucket_caps_mb(self.variant, gradient_bytes(profile))
        model = wrapper(
            self.module,
            process_group=groups[0] if self.variant.num_groups == 1 else RoundRobin(groups),
            init_sync=False,  # parameters of timed models are never read
            bucket_cap_mb_list=[cap / scale for cap in caps],
        )
        if self.variant.half:
            model.register_comm_hook(groups[0], fp16_compress_hook)
        return model

    def step(self, phases: Phases | None = None) -> None:
        """Train a step of `sync_every` micro-steps behind a barrier; phases are means over the micro-steps.

        Contract:
            Collective within the variant's group.
        """
        dist.barrier(self.group)
        forward_s = backward_s = 0.0
        self.module.zero_grad(set_to_none=True)
        num_micro_steps = self.variant.sync_every
        for micro_step in range(num_micro_steps):
            start_s = time.perf_counter()
            with self._sync(micro_step == num_micro_steps - 1):
                loss = self.model(torch.zeros(1, requires_grad=True)).sum()
                forward_s += (after_forward_s := time.perf_counter()) - start_s
                loss.backward()
            backward_s += time.perf_counter() - after_forward_s
        start_s = time.perf_counter()
        if self.variant.side == "after":
            self._reduce_after()
        after_communication_s = time.perf_counter()
        self.optimizer.step()
        end_s = time.perf_counter()
        if phases is not None:
            phases.forward_s.append(forward_s / num_micro_steps)
            phases.backward_s.append(backward_s / num_micro_steps)
            phases.communication_s.append((after_communication_s - start_s) / num_micro_steps)
            phases.optimizer_s.append((end_s - after_communication_s) / num_micro_steps)

    def _sync(self, wanted: bool) -> AbstractContextManager[None]:
        if wanted or self.variant.side in ("after", "none"):
            return nullcontext()
        context: AbstractContextManager[None] = self.model.no_sync()
        return context

    def _reduce_after(self) -> None:
        """Everything in one flat tensor, summed, then divided (the study's way; in 16 bits the sum overflows first)."""
        gradients = self.gradients()
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        if self.variant.half:
            flat = flat.half()
        dist.all_reduce(flat, group=self.group)
        flat /= self.group.size()
        torch._foreach_copy_(
            gradients,
            [
                piece.view_as(gradient)
                for piece, gradient in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)
            ],
        )

    def gradients(self) -> list[torch.Tensor]:
        """Return those that are there now."""
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def error(self) -> float:
        """Return how far the last step's gradients are from the known mean, relative."""
        if self.variant.side == "none":
            return 0.0
        each = [gradient / self.variant.sync_every for gradient in self.gradients()]
        return self.module.expected_error(each, self.variant.num_ranks)

    def num_buckets(self) -> int:
        """Return into how many buckets the gradients were cut; 0 where there are none."""
        if self.variant.side in ("after", "none"):
            return 0
        return len(bucket_bytes(self.model))


def bucket_caps_mb(variant: Variant, num_bytes: int) -> Sequence[float]:
    """Return the caps that a variant uses for a model of so many bytes, in MiB.

    Counted from the first bucket, as arguments are: ours by default is cut from the last one, in buckets of that size.
    """
    if variant.cap_mb is not None:
        return (variant.cap_mb,)
    if variant.side == "torch":
        return TORCH_CAPS_MB
    default = BucketCaps.default(num_bytes, any_on_cpu=True, on_one_host=False, num_ranks=variant.num_ranks)
    return (TORCH_CAPS_MB[0], default.caps_bytes[-1] / MEBIBYTE)


def cap_flows(bytes_per_s: float | None) -> int:
    """Let the kernel pace every TCP connection of this process, to other addresses than its own, at a rate.

    Args:
        bytes_per_s: Rate of each connection; None lifts the cap.

    Returns:
        How many connections there are.
    """
    rate = struct.pack("=Q", _NO_CAP if bytes_per_s is None else int(bytes_per_s))
    num_flows = 0
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                    continue
                if connection.getpeername()[0] != connection.getsockname()[0]:
                    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
                    num_flows += 1
    return num_flows
