"""Performs random programs on ranks, beside bare copies of the model that one process trains on every rank's batch.

Rules
1. All ranks compare at the same places and go on after a mismatch, so that none waits for another.
2. A bare copy knows nothing of ranks: gradients of the whole batch come from autograd alone, in float64.
3. After a comparison what was free to differ (who was given zeros and who None) is made the same.
"""

from __future__ import annotations

import contextlib
import copy
import random
import shlex
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from models import digest, generator
from paceline import DistributedDataParallel
from paceline.compression import RandomK, TopK
from paceline.errors import PeerAbortedError
from paceline.optim import DiLoCo, LocalSGD, overlap
from random_programs import Program, shrink
from ranks import Ranks

SIZE = 4  # of an input
CODECS: dict[str, Any] = {"topk": TopK(1.0), "randomk": RandomK(1.0)}
LOSSY = {
    "bf16": 0.02,
    "fp16": 0.005,
    "int8": 0.03,
    "fp16 around allreduce": 0.005,
    "topk": 1e-6,
    "randomk": 1e-6,
}
EXACT = 1e-11
HOOKS: dict[str, Callable[..., Any]] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "fp16 around allreduce": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "noop": lambda _state, bucket: _done(bucket.buffer()),
}


def _done(value: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


class StumbleError(Exception):
    """What a user's code raises."""


class _Stumble(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradient: Any) -> Any:
        raise StumbleError("in backward")


# ---- the model


class Outputs:
    """What no library looks into."""

    def __init__(self, values: Any) -> None:
        self.values = values


LEFT: list[Any] = []  # outputs in a global


class Block(nn.Module):
    """A narrow pair of layers, run in one of several ways."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "norm":
            self.layers = nn.Sequential(nn.BatchNorm1d(width))
        elif kind != "tied":
            self.layers = nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, width))

    def forward(self, x: Tensor, tied: Tensor) -> Tensor:
        result: Tensor
        if self.kind == "tied":
            return x + linear(linear(x, tied), tied.t())
        if self.kind == "twice":
            x = self.layers(x)
        if self.kind not in ("reentrant", "checkpoint", "nested") or not torch.is_grad_enabled():
            result = self.layers(x)
        elif self.kind == "nested":
            inner = lambda y: checkpoint(self.layers, y, use_reentrant=True)  # noqa: E731
            result = checkpoint(inner, x, use_reentrant=True)
        else:
            result = checkpoint(self.layers, x, use_reentrant=self.kind == "reentrant")
        return result


class Net(nn.Module):
    """A trunk, blocks and two heads that can be left out; leaves its outputs where they may not be found."""

    def __init__(self, width: int, blocks: Sequence[str], place: str = "plain") -> None:
        super().__init__()
        self.place = place
        self.trunk = nn.Linear(SIZE, width)
        self.blocks = nn.ModuleList(Block(kind, width) for kind in blocks)
        self.left = nn.Linear(width, 3)
        self.right = nn.Linear(width, 3)
        self.spare = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(SIZE, width).requires_grad_(requires_grad=False)
        self.stumbles = ""
        self.kept: Any = None

    def forward(self, x: Tensor, left: bool = True, right: bool = True, spare: bool = True) -> Any:
        if self.stumbles == "forward":
            raise StumbleError("in forward")
        hidden = torch.tanh(self.trunk(x) + self.frozen(x))
        for block in self.blocks:
            hidden = block(hidden, self.left.weight)
        if self.stumbles == "backward":
            hidden = _Stumble.apply(hidden)  # type: ignore[no-untyped-call]
        heads = (self.left(hidden) if left else None, self.right(hidden) if right else None)
        outputs = tuple(o if o is None or not spare else o * self.spare for o in heads)
        if self.place == "global":
            LEFT.append(outputs)
        elif self.place == "attribute":
            self.kept = outputs
        else:
            return Outputs(outputs) if self.place == "object" else outputs
        return None

    def find(self, returned: Any) -> Any:
        """The outputs of the last forward."""
        if self.place == "global":
            return LEFT.pop()
        kept, self.kept = self.kept, None
        return kept if self.place == "attribute" else getattr(returned, "values", returned)


def make_net(program: Program) -> Net:
    """The same on every rank."""
    torch.manual_seed(program.seed)
    return Net(program.width, program.blocks, program.outputs).double()


def bare(model: nn.Module) -> Any:
    """Without a wrapper."""
    return getattr(model, "module", model)


def loss_of(model: nn.Module, x: Tensor, used: dict[str, bool]) -> Tensor:
    """Forward and loss; of a forward whose heads are all left out, nothing."""
    net = bare(model)
    outputs = [o for o in net.find(model(x, **used)) if o is not None]
    total: Tensor = sum((o**2).mean() for o in outputs) if outputs else 0.0 * net.trunk.weight.sum()
    return total


def batch(program: Program, seed: int, rank: int, part: int = 0, size: int = 3) -> Tensor:
    """One rank's inputs."""
    return torch.randn(size, SIZE, generator=generator(program.seed, seed, rank, part), dtype=torch.float64)


def branches(program: Program, seed: int, rank: int) -> dict[str, bool]:
    """Which branches a rank's forward uses."""
    source = random.Random(f"{program.seed} {seed} {rank}")
    return {name: source.random() < 0.8 for name in ("left", "right", "spare")}


def wrap(program: Program, net: nn.Module) -> DistributedDataParallel:
    """Our wrapper with the program's options."""
    given = {k: v for k, v in program.options.items() if k not in ("hook", "optimizer", "weight")}
    if "compression" in given:
        given["compression"] = CODECS.get(given["compression"], given["compression"])
    if "weight" in program.options:
        given["weight"] = lambda x, **_: float(len(x))
    if "mixed_precision" in given:
        from torch.nn.parallel.distributed import _MixedPrecision  # private: torch may move it

        given["mixed_precision"] = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = DistributedDataParallel(copy.deepcopy(net), **given)
    if "hook" in program.options:
        model.register_comm_hook(None, HOOKS[program.options["hook"]])
    return model


# ---- comparing


class Comparison:
    """What went wrong so far, and where; and the bits that have to be the same on all ranks."""

    def __init__(self, program: Program) -> None:
        self.wrong: list[str] = []
        self.bits: list[str] = []
        self.where = "before the first operation"
        lossy = program.options.get("compression", program.options.get("hook", ""))
        self.tolerance = LOSSY.get(lossy, EXACT)
        if "mixed_precision" in program.options:
            self.tolerance = 0.15

    def fail(self, words: str) -> None:
        """Note a mismatch."""
        self.wrong.append(f"{self.where}: {words}")

    def same(self, what: str, found: Tensor | None, expected: Tensor | None, scale: float) -> None:
        """Compare; None and zeros are the same."""
        if found is None and expected is None:
            return
        a = torch.zeros(()) if found is None else found.detach().double()
        b = torch.zeros(()) if expected is None else expected.detach().double()
        distance = float((a - b).abs().max())
        if not distance <= self.tolerance * max(scale, 1e-3):
            self.fail(f"{what} differs by {distance:.3g} (largest expected {scale:.3g})")

    def gradients(self, net: nn.Module, expected: Sequence[Tensor | None]) -> None:
        """Compare `.grad` of all parameters."""
        scale = max((float(g.abs().max()) for g in expected if g is not None), default=0.0)
        for (name, p), mean in zip(net.named_parameters(), expected, strict=True):
            self.same(f"gradient of {name}", p.grad, mean, scale)
        self.note(p.grad for p in net.parameters())

    def parameters(self, net: nn.Module, alone: nn.Module) -> None:
        """Compare parameters."""
        for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
            self.same(name, p, q, float(q.detach().abs().max()))
        self.note(net.parameters())

    def note(self, tensors: Iterable[Tensor | None]) -> None:
        """Keep bits that all ranks must share."""
        self.bits.append(f"{self.where} {digest([t for t in tensors if t is not None])}")

    def across_ranks(self) -> list[str]:
        """What went wrong on this rank, or between ranks. Collective."""
        noted: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(noted, self.bits)
        if any(bits != noted[0] for bits in noted):
            for place, bits in enumerate(zip(*noted, strict=False)):
                if len(set(bits)) > 1:
                    self.wrong.append(f"ranks are not bitwise equal at comparison {place}: {bits}")
                    break
            else:
                self.wrong.append(f"ranks compared {[len(bits) for bits in noted]} times")
        return self.wrong


# ---- the kinds


class Replica:
    """A model and the losses whose backward is still to come: the wrapped one, or a rank's bare copy."""

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
NEEDS_NO_FORWARD = ("around the wrapper", "freeze", "unfreeze", "accumulate", "train")


def free(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Gradients are the mean of the copies' after every synchronization, whatever happened before."""
    net = make_net(program)
    copies = [Replica(copy.deepcopy(net), r, program) for r in range(num_ranks)]
    mine = Replica(wrap(program, net), rank, program)
    for operation, seed in program.operations:
        name = operation
        if "backward" in name and not name.startswith("raise") and not mine.pending:
            name = "forward"
        if mine.pending and (name in NEEDS_NO_FORWARD or name.startswith("raise")):
            name = "backward"  # an open forward would be taken for theirs
        if name.startswith("raise"):
            name = _where_to_raise(program, name)
        compare.where = f"{name} ({seed})"
        if name.startswith("raise"):
            _stumble(name, seed, mine, num_ranks, compare)
            for one in [mine, *copies]:
                one.do("train", seed)  # the next step is clean; the others wait for it to be told
        elif name == "accumulate":
            _accumulate(program, seed, mine.model, rank)
            _accumulate_copies(program, seed, [one.model for one in copies])
        else:
            for one in [mine, *copies]:
                one.do(name, seed)
        if name in SYNCHRONIZES or name.startswith("raise"):
            _compare_and_take_over(mine, copies, compare)


def _where_to_raise(program: Program, name: str) -> str:
    """Where that has one outcome.

    How early a backward that nobody sees begin was noticed depends on buckets.
    """
    return "raise in forward" if name == "raise in backward" and program.outputs != "plain" else name


def _compare_and_take_over(mine: Replica, copies: list[Replica], compare: Comparison) -> None:
    own = list(bare(mine.model).parameters())
    expected = []
    for grads in zip(*[[p.grad for p in one.model.parameters()] for one in copies], strict=True):
        present = [g for g in grads if g is not None]
        expected.append(sum(present) / len(copies) if present else None)
    compare.gradients(bare(mine.model), expected)
    for one in copies:
        for p, q in zip(own, one.model.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()


def _stumble(name: str, seed: int, mine: Replica, num_ranks: int, compare: Comparison) -> None:
    """One rank raises: there it is raised, the others are told by name, and the next step is clean."""
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


def _accumulate(program: Program, seed: int, model: Any, rank: int) -> None:
    model.zero_grad()
    batches = _micro_batches(program, seed, rank)
    with model.accumulate(batches, weight=lambda one: one[1]) as micro_batches:
        for x, _ in micro_batches:
            loss_of(model, x, {}).backward()


def _accumulate_copies(program: Program, seed: int, models: Sequence[nn.Module]) -> None:
    """Each copy holds its part of sum(w g) / sum(w), times the number of ranks."""
    all_of_them = [_micro_batches(program, seed, r) for r in range(program.num_ranks)]
    total = sum(weight for batches in all_of_them for _, weight in batches)
    for model in models:
        model.zero_grad()
    for r, batches in enumerate(all_of_them):
        for x, weight in batches:
            if weight:
                loss = loss_of(models[r % len(models)], x, {}) * (weight * len(models) / total)
                loss.backward()


def train_on(program: Program, name: str, seed: int, model: Any, who: Sequence[int], whole: bool) -> None:
    """Zero, forward and backward of the ranks `who`: one's own on a wrapped model, all on a bare one (`whole`)."""
    weighted = "weight" in program.options
    is_static = "static_graph" in program.options
    can_skip = program.kind == "overlap" or is_static or "find_unused_parameters" in program.options
    if weighted and name == "train on two micro-batches":
        name = "train"  # without a window that is refused
    parts = 1 if name == "train" else 2
    model.zero_grad()
    sizes = {r: 2 + (seed + r) % 3 if weighted else 3 for r in range(program.num_ranks)}
    for part in range(parts):
        losses = []
        for r in who:
            used = branches(program, 0 if is_static else seed, r) if can_skip else {}
            if program.kind != "overlap" and used:
                used["left"] = True  # torch's class wants a loss that comes out of forward
            x = batch(program, seed, r, part, sizes[r])
            share = (sizes[r] / sum(sizes.values())) if weighted else 1 / program.num_ranks
            losses.append((used, x, share if whole else 1.0))
        quiet = not whole and name == "train on two micro-batches" and part == 0
        with model.no_sync() if quiet else contextlib.nullcontext():
            for used, x, factor in losses:
                (loss_of(model, x, used) * factor).backward()


def with_torch(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Gradients are those of one process on the whole batch, and of torch's class where that supports the program."""
    precision = torch.float32 if "mixed_precision" in program.options else torch.float64
    net = make_net(program)
    alone, model = copy.deepcopy(net), wrap(program, net.to(precision))
    theirs = _torchs(program, net)
    who = [rank] if program.options.get("hook") == "noop" else list(range(num_ranks))
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
            continue
        train_on(program, name, seed, _Cast(model, precision), [rank], whole=False)
        train_on(program, name, seed, alone, who, whole=True)
        expected = [p.grad for p in alone.parameters()]
        if len(who) == 1:
            expected = [None if g is None else g * num_ranks for g in expected]
        local_bits = len(compare.bits)
        compare.gradients(model.module, expected)
        if theirs is not None:
            train_on(program, name, seed, theirs, [rank], whole=False)
            tolerance, compare.tolerance = compare.tolerance, EXACT
            compare.where += ", against torch's"
            compare.gradients(model.module, [p.grad for p in theirs.module.parameters()])
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


class _Cast:
    """A wrapped model whose inputs come in another dtype."""

    def __init__(self, model: DistributedDataParallel, dtype: torch.dtype) -> None:
        self.wrapped, self.module, self.dtype = model, model.module, dtype
        self.zero_grad, self.no_sync = model.zero_grad, model.no_sync

    def __call__(self, x: Tensor, **used: bool) -> Any:
        return self.wrapped(x.to(self.dtype), **used)


def _torchs(program: Program, net: Net) -> Any:
    """Torch's class with the same options; None where it has no such thing or does not support the program."""
    reentrant = {"reentrant", "nested"} & set(program.blocks)
    names = {name for name, _ in program.operations}
    is_static = "static_graph" in program.options
    lossy = program.options.get("hook") in ("fp16", "fp16 around allreduce") and program.num_ranks > 2
    ours_only = {"compression", "weight", "mixed_precision"} & set(program.options)
    if ours_only or lossy or (reentrant and not is_static) or "train twice forward" in names:
        return None
    if is_static and (reentrant or len(names - {"evaluate"}) > 1 or "train on two micro-batches" in names):
        return None
    given = {k: v for k, v in program.options.items() if k != "hook"}
    model = TorchDDP(copy.deepcopy(net), **given)
    if "hook" in program.options:
        model.register_comm_hook(None, HOOKS[program.options["hook"]])
    return model


class Generator(nn.Module):
    """What makes samples of noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, width), nn.Linear(width, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(x)))
        return result


def gan(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Two wrapped models; both models' gradients are the mean after every backward, alone or through each other."""
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
        _gan_step(program, name, seed, alone, range(num_ranks), 1 / num_ranks)
        for model, other in zip(ours, alone, strict=True):
            compare.gradients(model.module, [p.grad for p in other.parameters()])
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
    """Ranks train alone; now and then parameters become what the papers' equations say."""
    net = make_net(program)
    every, is_diloco = program.options["every"], program.options["optimizer"] == "DiLoCo"
    codec = program.options.get("compression", "")
    make: Any = DiLoCo if is_diloco else LocalSGD
    copies = [copy.deepcopy(net) for _ in range(num_ranks)]
    theirs = [torch.optim.SGD(one.parameters(), lr=0.01, momentum=0.5) for one in copies]
    optimizer = make(
        torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5),
        every,
        compression=CODECS.get(codec, codec or None),
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


def forward_overlap(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Parameters and outputs are those of one process on the whole batch whenever they are read."""
    net = make_net(program)
    kind = program.options["optimizer"]
    make: Callable[[Any], torch.optim.Optimizer] = (
        (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5))
        if kind == "SGD"
        else (lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3))
    )
    alone, model = copy.deepcopy(net), wrap(program, net)
    theirs = make(alone.parameters())
    ours = overlap(make(model.parameters()), model)
    for name, seed in [*program.operations, ("read", 0)]:
        compare.where = f"{name} ({seed})"
        if name == "read":
            compare.parameters(model.module, alone)
        elif name == "evaluate":
            with torch.no_grad():
                x = torch.ones(2, SIZE, dtype=torch.float64)
                compare.same("output", model(x)[0], alone(x)[0], 1.0)
        else:
            if name == "accumulate":
                _accumulate(program, seed, model, rank)
                _accumulate_copies(program, seed, [alone])
            else:
                train_on(program, name, seed, model, [rank], whole=False)
                train_on(program, name, seed, alone, range(num_ranks), whole=True)
            ours.step()
            theirs.step()


KINDS: dict[str, Callable[[Program, int, int, Comparison], None]] = {
    "free": free,
    "torch": with_torch,
    "mixed precision": with_torch,
    "gan": gan,
    "local steps": local_steps,
    "overlap": forward_overlap,
}


# ---- many programs, on ranks


def perform(rank: int, num_ranks: int, programs: Sequence[str]) -> list[list[str]]:
    """What went wrong in each program, on this rank. Collective."""
    warnings.simplefilter("ignore")
    results = []
    for text in programs:
        program = Program.from_json(text)
        compare = Comparison(program)
        try:
            KINDS[program.kind](program, rank, num_ranks, compare)
            results.append(compare.across_ranks())
        except Exception as error:
            raise AssertionError(
                f"program of seed {program.seed}, {compare.where}: {type(error).__name__}: {error}"
            ) from error
        finally:
            LEFT.clear()
    return results


def find_failures(
    programs: Sequence[Program], ranks: Ranks, deadline_s: float = 120.0
) -> dict[Program, list[str]]:
    """Perform programs of one number of ranks; those that went wrong, with what every rank says of it."""
    outcomes = ranks.outcomes(perform, [one.to_json() for one in programs], deadline_s=deadline_s)
    if all(outcome.clean for outcome in outcomes):
        failures = {}
        for index, program in enumerate(programs):
            words = [f"rank {o.rank}: {line}" for o in outcomes for line in o.value[index][:3]]
            if words:
                failures[program] = words
        return failures
    if len(programs) == 1:
        return {programs[0]: [outcome.story() for outcome in outcomes if not outcome.clean]}
    half = len(programs) // 2
    return {
        **find_failures(programs[:half], ranks, deadline_s),
        **find_failures(programs[half:], ranks, deadline_s),
    }


def explain(
    program: Program, words: Sequence[str], pool: Callable[[int], Ranks], max_tries: int = 150
) -> str:
    """A failure's report: the seed, the smallest program that fails, and the command that repeats it."""

    def fails(candidate: Program) -> bool:
        return bool(find_failures([candidate], pool(candidate.num_ranks), 40.0))

    smallest = shrink(program, fails, max_tries)
    last = find_failures([smallest], pool(smallest.num_ranks), 40.0).get(smallest, ["not repeated alone"])
    return "\n".join(
        [
            f"seed {program.seed}: {words[0][:600]}",
            f"smallest: {smallest.kind} on {smallest.num_ranks} ranks, {smallest.blocks}, {smallest.options}",
            *[f"  {name} ({seed})" for name, seed in smallest.operations],
            *[f"  -> {line[:1500]}" for line in last],
            "repeat: python -m benchmarks.fuzz --program " + shlex.quote(smallest.to_json()),
        ]
    )
