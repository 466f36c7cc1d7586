"""Random programs of the other kinds: what torch's class can do, two models, local steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from harness.program_comparison import EXACT, Comparison, take
from harness.program_model import (
    HOOKS,
    SIZE,
    Generator,
    Net,
    bare,
    batch,
    branches,
    codec,
    loss_of,
    make_net,
    wrap,
)
from harness.random_programs import Program
from paceline import DistributedDataParallel
from paceline_recipes import DiLoCo, LocalSGD

ALONE = {"train twice forward", "train, backward twice"}  # not what torch's class can do


def train_on(program: Program, name: str, seed: int, model: Any, who: Sequence[int], whole: bool) -> None:
    """Train on the batches of the ranks `who`: one rank on a wrapped model, all on a bare one (`whole`)."""
    weighted = "weight" in program.options
    is_static = "static_graph" in program.options
    can_skip = (
        "overlap_forward" in program.options or is_static or "find_unused_parameters" in program.options
    )
    if weighted and name == "train on two micro-batches":
        name = "train"  # without a window that is refused
    if program.options.get("compression") == "auto" and name in ALONE:
        name = "train"  # which codec was used is known of the last synchronization only
    parts = 1 if name in ("train", "train, backward twice") else 2
    times = 2 if name == "train, backward twice" else 1
    model.zero_grad()
    sizes = {r: 2 + (seed + r) % 3 if weighted else 3 for r in range(program.num_ranks)}
    for part in range(parts):
        losses = []
        for r in who:
            used = branches(program, 0 if is_static else seed, r) if can_skip else {}
            if "overlap_forward" not in program.options and used:
                used["left"] = True  # torch's class wants a loss that comes out of forward
            x = batch(program, seed, r, part, sizes[r])
            share = (sizes[r] / sum(sizes.values())) if weighted else 1 / program.num_ranks
            losses.append((used, x, share if whole else 1.0))
        quiet = not whole and name == "train on two micro-batches" and part == 0
        with model.no_sync() if quiet else contextlib.nullcontext():
            for used, x, factor in losses:
                loss = loss_of(model, x, used) * factor
                for time in range(times):
                    loss.backward(retain_graph=time + 1 < times)


def with_torch(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Check gradients against one process on the whole batch, and against torch's class if it fits the program."""
    precision = torch.float32 if "mixed_precision" in program.options else torch.float64
    net = make_net(program)
    alone, model = copy.deepcopy(net), wrap(program, net.to(precision))
    theirs = _torchs(program, net)
    who = [rank] if program.options.get("hook") == "noop" else list(range(num_ranks))
    shares_buffers = program.options.get("broadcast_buffers", True)
    for name, seed in program.operations:
        compare.where = f"{name} ({seed})"
        if name == "evaluate":
            with torch.no_grad():
                found = model(torch.ones(2, SIZE, dtype=precision))[0]
                model.eval()
                model(torch.ones(1, SIZE, dtype=precision))
                model.train()  # type: ignore[no-untyped-call]
            if "norm" not in program.blocks:
                compare.same("output", found, alone(torch.ones(2, SIZE, dtype=torch.float64))[0], 1.0)
            if theirs is not None:
                theirs.module.load_state_dict(model.module.state_dict())  # running statistics have moved
            continue
        train_on(program, name, seed, Cast(model, precision), [rank], whole=False)
        taken = take(model.module)
        train_on(program, name, seed, alone, who, whole=True)
        expected = [p.grad for p in alone.parameters()]
        if len(who) == 1:
            expected = [None if g is None else g * num_ranks for g in expected]
        local_bits = len(compare.bits)
        compare.gradients(model, taken, expected)
        if shares_buffers:
            compare.note(model.module.buffers())
        if "static_graph" in program.options:
            _left_early(model.reducer, compare)
        if theirs is not None:
            train_on(program, name, seed, theirs, [rank], whole=False)
            tolerance, compare.tolerance = compare.tolerance, EXACT
            compare.where += ", against torch's"
            compare.gradients(model, taken, [p.grad for p in theirs.module.parameters()])
            if rank == 0 or not shares_buffers:
                compare.buffers(model.module, theirs.module, are_shared=False)
            compare.tolerance = tolerance
        if len(who) == 1:
            del compare.bits[local_bits:]
        with torch.no_grad():
            for p, q in zip(model.module.parameters(), alone.parameters(), strict=True):
                if p.grad is not None and len(who) > 1:
                    p.sub_(p.grad, alpha=0.01)
                    q.copy_(p)
            if theirs is not None:
                theirs.module.load_state_dict(model.module.state_dict())


def _left_early(reducer: Any, compare: Comparison) -> None:
    """Check that each bucket of a counted static graph is full at its last gradient, neither sooner nor at the end."""
    timing = reducer.timings.last
    if reducer.tracker.pending.waits_for_end:
        compare.fail("a bucket of a static graph left before its last gradient")
    elif reducer.num_steps > 1:
        ended_s = timing.started_s + timing.backward_s
        late = [bucket.index for bucket in timing.buckets if bucket.ready_s > ended_s]
        if late:
            compare.fail(f"buckets {late} of a static graph waited for the end of backward")


class Cast:
    """A wrapped model whose inputs come in another dtype."""

    def __init__(self, model: DistributedDataParallel, dtype: torch.dtype) -> None:
        self.wrapped, self.module, self.dtype = model, model.module, dtype
        self.zero_grad, self.no_sync = model.zero_grad, model.no_sync

    def __call__(self, x: Tensor, **used: bool) -> Any:
        return self.wrapped(x.to(self.dtype), **used)


def _torchs(program: Program, net: Net) -> Any:
    """Return torch's class with the same options, or None if it does not support the program."""
    reentrant = {"reentrant", "nested", "tied reentrant"} & set(program.blocks)
    names = {name for name, _ in program.operations}
    is_static = "static_graph" in program.options
    lossy = program.options.get("hook") in ("fp16", "fp16 around allreduce") and program.num_ranks > 2
    ours_only = {"compression", "weight", "mixed_precision", "skip_all_reduce_unused_params"} & set(
        program.options
    )
    if ours_only or lossy or (reentrant and not is_static) or names & ALONE:
        return None
    if is_static and (reentrant or len(names - {"evaluate"}) > 1 or "train on two micro-batches" in names):
        return None
    given = {k: v for k, v in program.options.items() if k != "hook" and v != "auto"}
    model = TorchDDP(copy.deepcopy(net), **given)
    if "hook" in program.options:
        model.register_comm_hook(None, HOOKS[program.options["hook"]])
    return model


def gan(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Check two wrapped models: after every backward, alone or through each other, both have the mean gradients."""
    critic = make_net(program)
    maker = Generator(program.width).double()
    static = program.options.pop("static_graph", None)  # their graphs alternate
    alone = (copy.deepcopy(maker), copy.deepcopy(critic))
    if static:
        program.options.setdefault("find_unused_parameters", True)
    ours = (wrap(program, maker), wrap(program, critic))
    for name, seed in program.operations:
        compare.where = f"{name} ({seed})"
        if name == "step":
            with torch.no_grad():
                for model, other in zip(ours, alone, strict=True):
                    for p, q in zip(model.module.parameters(), other.parameters(), strict=True):
                        if p.grad is not None:
                            p.sub_(p.grad, alpha=0.01)
                        q.copy_(p)
                        q.grad = None
                    model.zero_grad()
            continue
        _gan_step(program, name, seed, ours, [rank], 1.0)
        taken = [take(model.module) for model in ours]
        _gan_step(program, name, seed, alone, range(num_ranks), 1 / num_ranks)
        for model, found, other in zip(ours, taken, alone, strict=True):
            compare.gradients(model, found, [p.grad for p in other.parameters()])
            for p, q in zip(model.module.parameters(), other.parameters(), strict=True):
                q.grad = None if p.grad is None else p.grad.clone()


def _gan_step(
    program: Program, name: str, seed: int, models: Sequence[nn.Module], who: Iterable[int], share: float
) -> None:
    maker, critic = models
    frozen = name == "generate, frozen critic"
    if frozen:
        bare(critic).requires_grad_(requires_grad=False)
    for r in who:
        made = maker(batch(program, seed, r))
        used = {**branches(program, seed, r), "left": True}
        if name == "discriminate":
            real = loss_of(critic, batch(program, seed, r, 1), used)
            loss = real + loss_of(critic, made.detach(), {})
        elif name == "both":
            loss = loss_of(critic, made, {}) + (made**2).mean()
        else:
            loss = loss_of(critic, made, used)
        (loss * share).backward()
    if frozen:
        bare(critic).requires_grad_(requires_grad=True)
        bare(critic).frozen.requires_grad_(requires_grad=False)


def local_steps(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Check ranks that train alone, with parameters that now and then follow the papers' equations."""
    net = make_net(program)
    every, is_diloco = program.options["every"], program.options["optimizer"] == "DiLoCo"
    compression = program.options.get("compression")
    make: Any = DiLoCo if is_diloco else LocalSGD
    copies = [copy.deepcopy(net) for _ in range(num_ranks)]
    theirs = [torch.optim.SGD(one.parameters(), lr=0.01, momentum=0.5) for one in copies]
    optimizer = make(
        torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5),
        every,
        compression=None if compression is None else codec(compression),
    )
    outer_lr, outer_momentum = (0.7, 0.9) if is_diloco else (1.0, 0.0)
    before = [p.detach().clone() for p in net.parameters()]
    velocity = [torch.zeros_like(p) for p in before]
    since = 0
    for name, seed in program.operations:
        compare.where = f"{name} ({seed})"
        if name == "evaluate":
            net(torch.ones(2, SIZE, dtype=torch.float64))
            continue
        if name == "train":
            for r, (one, inner) in enumerate(zip([net, *copies], [optimizer, *theirs], strict=True)):
                who = rank if r == 0 else r - 1
                inner.zero_grad()
                loss_of(one, batch(program, seed, who), {}).backward()
                inner.step()
            since += 1
        elif since:
            optimizer.synchronize()
        if since and (name == "synchronize" or since >= every):
            since = 0
            for place, (w, v) in enumerate(zip(before, velocity, strict=True)):
                with torch.no_grad():
                    after = sum(list(one.parameters())[place] for one in copies) / num_ranks
                    change = after - w
                    v.mul_(outer_momentum).add_(change)
                    w.add_(outer_lr * (change + outer_momentum * v))
                    for one in copies:
                        list(one.parameters())[place].copy_(w)
            compare.parameters(net, copies[0])
            for own, *others in zip(net.parameters(), *[one.parameters() for one in copies], strict=True):
                for other in others:
                    other.detach().copy_(own.detach())
            before = [p.detach().clone() for p in net.parameters()]
