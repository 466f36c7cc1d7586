"""Random programs of anything between two backwards, each rank's bare copy performing the same operations."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.program_changes import NEW_START, change, put_right, says_remedy
from harness.program_comparison import ROUNDED, Comparison, Taken, take
from harness.program_model import SIZE, StumbleError, bare, batch, branches, loss_of, make_net, routes, wrap
from harness.random_programs import Program
from paceline.errors import ConfigurationError, PeerAbortedError


class Replica:
    """A model and the losses whose backward is still to come: the wrapped model, or a rank's bare copy."""

    def __init__(self, model: nn.Module, rank: int, program: Program) -> None:
        self.model, self.rank, self.program = model, rank, program
        self.pending: list[Tensor] = []

    def do(self, operation: str, seed: int) -> None:
        """Perform one operation that is the same on copies."""
        net, program = bare(self.model), self.program
        if operation.startswith("forward"):
            is_routed = operation == "forward, routed"
            used = (routes if is_routed else branches)(program, seed, self.rank)
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
        elif operation == "evaluate on some ranks":
            if random.Random(f"{program.seed} {seed} {self.rank}").random() < 0.5:
                evaluate(self.model)
        elif operation == "around the wrapper":
            if random.Random(f"{program.seed} {seed} {self.rank}").random() < 0.5:
                loss_of(net, batch(program, seed, self.rank), {}).backward()
        elif operation in ("freeze", "unfreeze"):
            net.right.requires_grad_(requires_grad=operation == "unfreeze")
        elif operation.endswith("freeze the start"):
            net.frozen.requires_grad_(requires_grad=operation.startswith("unfreeze"))
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


def evaluate(model: Any) -> None:
    """Run a forward in evaluation mode and without gradients, on this rank alone."""
    model.eval()
    with torch.no_grad():
        bare(model).find(model(torch.ones(2, SIZE, dtype=torch.float64)))
    model.train()


SYNCHRONIZES = ("backward", "backward, keep the graph", "sync_gradients", "train", "accumulate")
BEGINS = ("forward", "forward, routed", "train", "accumulate")
NEEDS_NO_FORWARD = (
    "around the wrapper",
    "accumulate",
    "accumulate, evaluate within",
    "accumulate, unfreeze within",
    "train",
    "replace",
    "replace nothing",
)


def free(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Check that gradients are the mean of the copies' after every synchronization, after any operations."""
    trial = Trial(program, rank, num_ranks, compare)
    for operation, seed in program.operations:
        trial.do(trial.possible(operation, seed), seed)


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
        self.may_rename = program.options.get("compression") in (
            None,
            *ROUNDED,
        )  # others keep residuals by name
        self.start_is_new = False  # replaced since it was wrapped: it may be frozen alone
        self.had: set[int] = set()  # parameters with a gradient, on any rank, since the last synchronization

    def possible(self, operation: str, seed: int) -> str:
        """Return this operation, or the one that has to come before it."""
        raises = operation.startswith("raise")
        if "backward" in operation and not raises and not self.mine.pending:
            return "forward"
        if self.mine.pending and (operation in NEEDS_NO_FORWARD or raises):
            return "backward"  # an open forward would be taken for theirs
        if operation == "forward, routed" and self.program.outputs != "plain":
            return "forward"  # a graph without a parameter is found by its outputs alone
        start_is_fixed = self.start_is_new or bare(self.mine.model).frozen.weight.requires_grad
        if operation == "accumulate, unfreeze within" and (start_is_fixed or max(self._counts(seed)) < 2):
            return "accumulate"
        if operation == "unfreeze the start" and self.start_is_new:
            return "freeze the start"
        return _where_to_raise(self.program, operation) if raises else operation

    def do(self, name: str, seed: int) -> None:
        """Perform an operation on the wrapped model and on all copies, and compare."""
        self.compare.where = f"{name} ({seed})"
        if name.startswith("replace"):
            self._replace(name, seed)
            return
        self.within = ""
        if name.startswith("accumulate, "):
            name, self.within = "accumulate", name.removeprefix("accumulate, ").removesuffix(" within")
        raises = name.startswith("raise")
        if self.within == "unfreeze":
            self._unfreeze_within(seed)
            raises = True
        elif raises:
            _stumble(name, seed, self.mine, self.num_ranks, self.compare)
        if raises:
            self._find_out_buffers()
            name = "train"  # the step after an exception is clean
        begins, synchronizes = raises or name in BEGINS, raises or name in SYNCHRONIZES
        if begins and (not self.are_in_line or name == "accumulate"):
            self._take_buffers_of(0)
        self.counts_nothing = False  # a window that synchronizes nothing
        taken = self._do_all(name, seed)
        self._note_gradients()
        if synchronizes:
            self._compare_and_take_over(taken)
        else:
            self.compare.local(self.mine.model, taken, self.copies[self.rank].model)
        self.brings_buffers = self.brings_buffers or begins
        self.are_in_line = (self.are_in_line or begins) and (
            not synchronizes
            or self.counts_nothing
            or name == "sync_gradients"  # that of an open forward goes on
        )
        are_shared = self.shares_buffers and synchronizes and self.brings_buffers and name != "sync_gradients"
        if are_shared:
            self._take_buffers_of(_first_with_batches(self.program, seed) if name == "accumulate" else 0)
        self.compare.buffers(bare(self.mine.model), self.copies[self.rank].model, are_shared)

    def _do_all(self, name: str, seed: int) -> Taken:
        """Perform an operation. Return this rank's gradients right after it."""
        if name == "accumulate":
            accumulate(self.program, seed, self.mine.model, self.rank, self.within)
            taken = take(bare(self.mine.model))
            models = [one.model for one in self.copies]
            total = accumulate_copies(self.program, seed, models, self.within)
            self.counts_nothing = total == 0
            return taken
        self.mine.do(name, seed)
        taken = take(bare(self.mine.model))
        for one in self.copies:
            one.do(name, seed)
        return taken

    def _replace(self, name: str, seed: int) -> None:
        """Change the module's parameters. If the next forward refuses that, wrap the module anew. Collective."""
        self.mine.do("zero to None", seed)
        if name == "replace":
            self.mine.do("sync_gradients", seed)  # a step ends: the next one has no gradients of before
        nets = [bare(self.mine.model), *[one.model for one in self.copies]]
        way = change(
            nets, f"{self.program.seed} {seed}", is_refused=name == "replace", may_rename=self.may_rename
        )
        if name == "replace":
            told = _attempt(self.mine, seed, forward_only=False, refusal=ConfigurationError)
            if told[0] != "ConfigurationError" or not says_remedy(told[1]):
                self.compare.fail(f"{way} was not refused: {told}")
            self.compare.bits.append(f"{way}: {told[0]}")
            self._find_out_buffers()  # some refusals come in backward
            put_right(nets, way)
            self.start_is_new = False
            self.mine = Replica(wrap(self.program, nets[0], copies=False), self.rank, self.program)
            gc.collect()  # the wrapper of before: its hooks would still be called
            self.compare.forget_codecs()
            self._take_buffers_of(0)
            self.are_in_line = self.brings_buffers = False
        self.start_is_new = self.start_is_new or way == NEW_START
        for one in (self.mine, *self.copies):
            one.do("zero to None", seed)
        self.had.clear()

    def _counts(self, seed: int) -> list[int]:
        """Return the number of micro-batches that count in a window, by rank."""
        ranks = range(self.num_ranks)
        return [sum(size > 0 for _, size in _micro_batches(self.program, seed, rank)) for rank in ranks]

    def _unfreeze_within(self, seed: int) -> None:
        """Unfreeze a layer in each micro-batch of a window: refused on all ranks, as one runs another forward."""
        told = "nothing"
        expected = "ConfigurationError" if self._counts(seed)[self.rank] > 1 else "PeerAbortedError"
        try:
            accumulate(self.program, seed, self.mine.model, self.rank, "unfreeze")
        except (ConfigurationError, PeerAbortedError) as error:
            told = type(error).__name__
            bare(self.mine.model).kept = None
            self.mine.model.reducer.prepare()  # type: ignore[operator, union-attr]  # the end of a window that raised
        if told != expected:
            self.compare.fail(
                f"a window in which a layer was unfrozen ended with {told}, not with {expected}"
            )
        self.are_in_line = False
        for one in (self.mine, *self.copies):
            one.do("unfreeze the start", seed)
            one.do("zero to None", seed)
        self.had.clear()

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


def _attempt(
    mine: Replica, seed: int, forward_only: bool, refusal: type[Exception] = StumbleError
) -> tuple[str, str]:
    net = bare(mine.model)
    try:
        loss = loss_of(mine.model, batch(mine.program, seed, mine.rank), {})
        if not forward_only:
            loss.backward()
    except (StumbleError, PeerAbortedError, refusal) as error:
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


def accumulate(program: Program, seed: int, model: Any, rank: int, within: str = "") -> None:
    model.zero_grad()
    batches = _micro_batches(program, seed, rank)
    with model.accumulate(batches, weight=lambda one: one[1]) as micro_batches:
        for x, _ in micro_batches:
            loss = loss_of(model, x, {})
            _act_within(model, within)
            loss.backward()


def _act_within(model: Any, within: str) -> None:
    """Perform the window's other act between a micro-batch's forward and its backward."""
    if within == "evaluate":
        evaluate(model)
    elif within == "unfreeze":
        bare(model).frozen.requires_grad_(requires_grad=True)


def accumulate_copies(program: Program, seed: int, models: Sequence[nn.Module], within: str = "") -> int:
    """Give each copy its part of sum(w g) / sum(w), times the number of ranks. Return sum(w)."""
    all_of_them = [_micro_batches(program, seed, r) for r in range(program.num_ranks)]
    total = sum(weight for batches in all_of_them for _, weight in batches)
    for model in models:
        model.zero_grad()
    for r, batches in enumerate(all_of_them):
        for x, weight in batches:
            if weight:
                loss = loss_of(models[r % len(models)], x, {}) * (weight * len(models) / total)
                _act_within(models[r % len(models)], within)
                loss.backward()
    return total
