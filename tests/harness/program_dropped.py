"""Random programs that wrap a model again and again, among groups of the script's; nothing is left of any wrapper."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from harness.held import held_at_rest, settled
from harness.program_comparison import Comparison, take
from harness.program_kinds import train_on
from harness.program_model import bare, make_net, wrap
from harness.program_overlapped import OPTIMIZERS
from harness.random_programs import Program
from paceline.optim import overlap


def dropped(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Check that each new wrapped model trains as one process, and that dropped ones leave no resources. Collective."""
    in_part = "part" in program.options and num_ranks > 2
    members = list(range(num_ranks - 1 if in_part else num_ranks))
    group = dist.new_group(members)
    job = _Job(program, rank, members, group, compare) if rank in members else None
    groups: list[Any] = []
    for name, seed in [*program.operations, ("drop", -1)]:
        compare.where = f"{name} ({seed})"
        if name == "open a group":
            groups.append(dist.new_group(members))
            dist.all_reduce(torch.zeros(1))  # new_group has no barrier: who closes breaks who connects
        elif name == "close a group":
            if groups and job is not None:
                dist.destroy_process_group(groups[0])
            del groups[:1]
        elif job is not None:
            job.perform(name, seed)
    if job is None:
        return
    while groups:
        dist.destroy_process_group(groups.pop())
    job.check()
    dist.destroy_process_group(group)


class _Job:
    """The run of one member: the current wrapped model, and its reference in one process."""

    def __init__(
        self, program: Program, rank: int, members: Sequence[int], group: Any, compare: Comparison
    ) -> None:
        self.program = replace(
            program,
            num_ranks=len(members),
            options={name: given for name, given in program.options.items() if name != "part"},
        )
        self.rank, self.members, self.group, self.compare = rank, members, group, compare
        self.net = make_net(program)
        self.alone = copy.deepcopy(self.net)
        self.model: Any = None
        self.ours: Any = None
        self.theirs: Any = None
        compare.group = group
        self.begin()
        self.train(-2)
        self.let_go()
        self.before = held_at_rest()
        self.begin()

    def perform(self, name: str, seed: int) -> None:
        """Perform an operation of the program."""
        if name == "train":
            self.train(seed)
        elif name == "collect":
            gc.collect()
        else:
            self.let_go()
            if name == "drop, collect":
                gc.collect()
            self.compare.parameters(self.net, self.alone)
            self.begin()

    @property
    def defers(self) -> bool:
        return "overlap_forward" in self.program.options

    def begin(self) -> None:
        """Wrap the current model."""
        self.model = wrap(self.program, self.net, self.group)
        self.net = bare(self.model)
        make = OPTIMIZERS["SGD"]
        self.theirs, self.ours = make(self.alone.parameters()), make(self.net.parameters())
        if self.defers:
            overlap(self.ours, self.model)

    def train(self, seed: int) -> None:
        """Train a step."""
        train_on(self.program, "train", seed, self.model, [self.rank], whole=False)
        train_on(self.program, "train", seed, self.alone, self.members, whole=True)
        if not self.defers:
            self.compare.gradients(self.model, take(self.net), [p.grad for p in self.alone.parameters()])
        self.ours.step()
        self.theirs.step()
        if not self.defers:
            with torch.no_grad():
                for p, q in zip(self.net.parameters(), self.alone.parameters(), strict=True):
                    q.copy_(p)

    def let_go(self) -> None:
        """Drop the wrapper and its optimizer. The last step may still be under way."""
        self.model = self.ours = self.theirs = None
        self.compare.forget_codecs()

    def check(self) -> None:
        """Check that all dropped models leave no more than the first, and members have the same bits. Collective."""
        self.let_go()
        now = settled(self.before)
        if not now.within(self.before):
            self.compare.fail(f"dropped models leave {now}; after the first one there were {self.before}")
        bits: list[Any] = [None] * len(self.members)
        dist.all_gather_object(bits, self.compare.bits, group=self.group)
        if any(others != bits[0] for others in bits):
            self.compare.fail("members are not bitwise equal")
        self.compare.bits.clear()  # who is no member has none
