"""Random programs of anything between two backwards, each rank's bare copy performing the same operations."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.program_comparison import Comparison, Taken, take
from harness.program_model import SIZE, StumbleError, bare, batch, branches, loss_of, make_net, wrap
from harness.random_programs import Program
from paceline.errors import PeerAbortedError


class Replica:
    """A model and the losses whose backward is still to come: the wrapped model, or a rank's bare copy."""

    def __init__(self, model: nn.Module, rank: int, program: Program) -> None:
        self.model, self.rank, self.program = model, rank, program
        self.pending: list[Tensor] = []

    def do(self, operation: str, seed: int) -> None:
        """Perform one operation that is the same on copies."""
        net, program = bare(self.model), self.program
        if operation == "forward":
            used = branches(program, seed, self.rank)
            loss = loss_of(self.model, batch(program, seed, self.rank), used)
            self.pending.append(loss)
        elif operation == "backward, keep the graph":
            self.pending[seed % len(self.pending)].backward(retain_graph=True)
        elif operation == "backward":
            self.pending.pop(seed % len(self.pending)).backward()
        elif operation == "train":
            net.zero_grad()
            self.do("forward", seed)
            self.pending.pop().backward()
        elif operation == "backward without synchronization":
            loss = self.pending.pop(seed % len(self.pending))
            with self.model.no_sync() if self.model is not net else contextlib.nullcontext():  # type: ignore[operator]
                loss.backward()
        elif operation.startswith("zero"):
            self.model.zero_grad(set_to_none=operation == "zero to None")
        elif operation == "evaluate":
            with torch.no_grad():
                net.find(self.model(torch.ones(2, SIZE, dtype=torch.float64)))
        elif operation == "around the wrapper":
            if random.Random(f"{program.seed} {seed} {self.rank}").random() < 0.5:
                loss_of(net, batch(program, seed, self.rank), {}).backward()
        elif operation in ("freeze", "unfreeze"):
            net.right.requires_grad_(requires_grad=operation == "unfreeze")
        elif operation == "sync_gradients" and self.model is not net:
            self.model.sync_gradients()  # type: ignore[operator]
        else:
            self._change_gradients(operation, net)

    def _change_gradients(self, operation: str, net: Any) -> None:
        for p in net.parameters():
            if p.grad is not None and operation == "scale":
                p.grad.mul_(0.5)
            elif p.grad is not None and operation == "clone":
                p.grad = p.grad.clone()
        if operation == "set":
            net.left.weight.grad = torch.full_like(net.left.weight, 0.25)


SYNCHRONIZES = ("backward", "backward, keep the graph", "sync_gradients", "train", "accumulate")
BEGINS = ("forward", "train", "accumulate")
NEEDS_NO_FORWARD = ("around the wrapper", "freeze", "unfreeze", "accumulate", "train")


def free(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Check that gradients are the mean of the copies' after every synchronization, after any operations."""
    trial = Trial(program, rank, num_ranks, compare)
    for operation, seed in program.operations:
        trial.do(trial.possible(operation), seed)


class Trial:
    """A wrapped model, and a bare copy for each rank."""

    def __init__(self, program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
        net = make_net(program)
        self.program, self.rank, self.num_ranks, self.compare = program, rank, num_ranks, compare
        self.copies = [Replica(copy.deepcopy(net), r, program) for r in range(num_ranks)]
        self.mine = Replica(wrap(program, net), rank, program)
        self.shares_buffers = program.options.get("broadcast_buffers", True)
        self.are_in_line = False  # buffers were broadcast since the last synchronization
        self.brings_buffers = False  # the next synchronization does
        self.had: set[int] = set()  # parameters with a gradient, on any rank, since the last synchronization

    def possible(self, operation: str) -> str:
        """Return this operation, or the one that has to come before it."""
        raises = operation.startswith("raise")
        if "backward" in operation and not raises and not self.mine.pending:
            return "forward"
        if self.mine.pending and (operation in NEEDS_NO_FORWARD or raises):
            return "backward"  # an open forward would be taken for theirs
        return _where_to_raise(self.program, operation) if raises else operation

    def do(self, name: str, seed: int) -> None:
        """Perform an operation on the wrapped model and on all copies, and compare."""
        self.compare.where = f"{name} ({seed})"
        raises = name.startswith("raise")
        if raises:
            _stumble(name, seed, self.mine, self.num_ranks, self.compare)
            self._find_out_buffers()
        begins, synchronizes = raises or name in BEGINS, raises or name in SYNCHRONIZES
        if begins and (not self.are_in_line or name == "accumulate"):
            self._take_buffers_of(0)
        self.counts_nothing = False  # a window that synchronizes nothing
        taken = self._do_all("train" if raises else name, seed)  # the step after an exception is clean
        self._note_gradients()
        if synchronizes:
            self._compare_and_take_over(taken)
        else:
            self.compare.local(self.mine.model, taken, self.copies[self.rank].model)
        self.brings_buffers = self.brings_buffers or begins
        self.are_in_line = (self.are_in_line or begins) and (not synchronizes or self.counts_nothing)
        are_shared = self.shares_buffers and synchronizes and self.brings_buffers and name != "sync_gradients"
        if are_shared:
            self._take_buffers_of(_first_with_batches(self.program, seed) if name == "accumulate" else 0)
        self.compare.buffers(bare(self.mine.model), self.copies[self.rank].model, are_shared)

    def _do_all(self, name: str, seed: int) -> Taken:
        """Perform an operation. Return this rank's gradients right after it."""
        if name == "accumulate":
            accumulate(self.program, seed, self.mine.model, self.rank)
            taken = take(bare(self.mine.model))
            total = accumulate_copies(self.program, seed, [one.model for one in self.copies])
            self.counts_nothing = total == 0
            return taken
        self.mine.do(name, seed)
        taken = take(bare(self.mine.model))
        for one in self.copies:
            one.do(name, seed)
        return taken

    def _note_gradients(self) -> None:
        for one in self.copies:
            self.had |= {place for place, p in enumerate(one.model.parameters()) if p.grad is not None}

    def _take_buffers_of(self, rank: int) -> None:
        """Copy one rank's buffers to the others, as a step's first synchronized forward and its end do."""
        for one in self.copies if self.shares_buffers else ():
            for other, source in zip(one.model.buffers(), self.copies[rank].model.buffers(), strict=True):
                other.data.copy_(source)  # batch norm has saved it for a backward that may still come

    def _find_out_buffers(self) -> None:
        """Give each copy its rank's buffers. Only a rank knows how far it came in an abandoned step. Collective."""
        for one in self.copies:
            for found, other in zip(bare(self.mine.model).buffers(), one.model.buffers(), strict=True):
                if one.rank == self.rank:
                    other.data.copy_(found)
                dist.broadcast(other.data, one.rank)

    def _compare_and_take_over(self, taken: Taken) -> None:
        """Compare with the mean. Then set the copies' gradients to this rank's, which all ranks have."""
        expected: list[Tensor | None] = []
        everywhere = zip(*[[p.grad for p in one.model.parameters()] for one in self.copies], strict=True)
        for place, (grads, found) in enumerate(zip(everywhere, taken, strict=True)):
            present = [g for g in grads if g is not None]
            if not present and place in self.had and found is not None:
                present = [
                    torch.zeros_like(found)
                ]  # dropped since a backward without synchronization: zeros, as torch
            expected.append(sum(present) / self.num_ranks if present else None)
        self.compare.gradients(self.mine.model, taken, expected)
        for one in self.copies:
            for p, q in zip(bare(self.mine.model).parameters(), one.model.parameters(), strict=True):
                q.grad = None if p.grad is None else p.grad.clone()
        if not self.counts_nothing:  # otherwise the step goes on
            self.had.clear()


def _where_to_raise(program: Program, name: str) -> str:
    """Return the place to raise, moved to forward if raising in backward has no single outcome.

    A backward through outputs that no library sees is noticed late, and how late depends on buckets.
    """
    return "raise in forward" if name == "raise in backward" and program.outputs != "plain" else name


def _stumble(name: str, seed: int, mine: Replica, num_ranks: int, compare: Comparison) -> None:
    """Let one rank raise. Check its error, the name that others get, and that the next step is clean."""
    who = seed % num_ranks
    net = bare(mine.model)
    mine.do("zero to None", seed)
    if mine.rank == who and name != "raise before backward":
        net.stumbles = name.rsplit(maxsplit=1)[-1]
    told = _attempt(mine, seed, forward_only=mine.rank == who and name == "raise before backward")
    net.stumbles = ""
    if mine.rank == who and name != "raise before backward" and told[0] != "StumbleError":
        compare.fail(f"the rank that raised got {told}")
    if mine.rank == who and name != "raise in backward":
        told = _attempt(mine, seed, forward_only=False)  # the others are still in the step before
    is_told = told[0] == "PeerAbortedError" and f"rank {who}" in told[1]
    if not is_told and not (mine.rank == who and name == "raise in backward"):
        compare.fail(f"rank {mine.rank} should have been told of rank {who} and got {told}")
    if any(p.grad is not None for p in net.parameters()):
        compare.fail("gradients of a step that was given up are left")
    if mine.rank == who and name == "raise in backward":
        mine.model.reducer.prepare()  # type: ignore[operator, union-attr]  # as the next forward: the others are told
    compare.bits.append(f"{name} by {who}")


def _attempt(mine: Replica, seed: int, forward_only: bool) -> tuple[str, str]:
    net = bare(mine.model)
    try:
        loss = loss_of(mine.model, batch(mine.program, seed, mine.rank), {})
        if not forward_only:
            loss.backward()
    except (StumbleError, PeerAbortedError) as error:
        net.kept = None
        return type(error).__name__, str(error)
    return "nothing", ""


def _micro_batches(program: Program, seed: int, rank: int) -> list[tuple[Tensor, int]]:
    source = random.Random(f"micro {program.seed} {seed} {rank}")
    sizes = [source.randrange(4) for _ in range(source.randrange(4))]
    return [(batch(program, seed, rank, part, max(size, 2)), size) for part, size in enumerate(sizes)]


def _first_with_batches(program: Program, seed: int) -> int:
    """Return the first rank with micro-batches that count in a window; 0 if none has."""
    everyone = [_micro_batches(program, seed, rank) for rank in range(program.num_ranks)]
    return next((rank for rank, batches in enumerate(everyone) if any(size for _, size in batches)), 0)


def accumulate(program: Program, seed: int, model: Any, rank: int) -> None:
    model.zero_grad()
    batches = _micro_batches(program, seed, rank)
    with model.accumulate(batches, weight=lambda one: one[1]) as micro_batches:
        for x, _ in micro_batches:
            loss_of(model, x, {}).backward()


def accumulate_copies(program: Program, seed: int, models: Sequence[nn.Module]) -> int:
    """Give each copy its part of sum(w g) / sum(w), times the number of ranks. Return sum(w)."""
    all_of_them = [_micro_batches(program, seed, r) for r in range(program.num_ranks)]
    total = sum(weight for batches in all_of_them for _, weight in batches)
    for model in models:
        model.zero_grad()
    for r, batches in enumerate(all_of_them):
        for x, weight in batches:
            if weight:
                loss = loss_of(models[r % len(models)], x, {}) * (weight * len(models) / total)
                loss.backward()
    return total
