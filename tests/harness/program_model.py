"""The model that random programs train: drawn layers, outputs and exceptions, its batches, and the wrapper."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from harness.models import generator
from harness.random_programs import Program
from paceline import DistributedDataParallel
from paceline.compression import Int8, OneBit, RandomK, TopK
from paceline.planning import TrialConfig
from paceline.reductions import Auto, PowerSGD

SIZE = 4  # of an input
LATE_S = 0.002  # of the slow rank
HEADS = (
    "heads"  # a block that is none: the heads in a reentrant checkpoint, so that backward reaches that first
)


class InTurns(Auto):
    """`compression="auto"` with decisions by the number of steps, not by clocks, so that a seed repeats them."""

    def __init__(self) -> None:
        config = TrialConfig(num_sweeps=1, check_every=1, try_every=1)
        super().__init__((Int8(stochastic=False),), config)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def _start_over(self, codecs: Sequence[str], num_ranks: int) -> None:
        super()._start_over(codecs, num_ranks)
        trial = self._trial
        decide = trial.decide

        def in_turns(agreed: Sequence[float]) -> dict[str | None, float]:
            """Let the codec that is off now seem the shorter way."""
            return decide([1.0 if name == trial.in_use else 0.5 for name in trial.candidates])

        trial.decide = in_turns  # type: ignore[method-assign]


CODECS: dict[str, Callable[[], Any]] = {
    "auto": InTurns,
    "int8 with feedback": lambda: Int8(stochastic=False),
    "onebit": OneBit,
    "topk": lambda: TopK(0.3),
    "all of topk": lambda: TopK(1.0),
    "randomk": lambda: RandomK(0.3),
    "powersgd": lambda: PowerSGD(1, min_compression_rate=0.5),
}
HOOKS: dict[str, Callable[..., Any]] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "fp16 around allreduce": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "fresh": lambda _state, bucket: _reduce_into_another(bucket),
    "noop": lambda _state, bucket: _done(bucket.buffer()),
}


def _done(value: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def _reduce_into_another(bucket: Any) -> torch.futures.Future[Tensor]:
    """Return the mean in another tensor, and leave nothing of use in the bucket."""
    sent = bucket.buffer() / dist.get_world_size()
    bucket.buffer().fill_(torch.nan)
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].clone())  # type: ignore[no-any-return]


class StumbleError(Exception):
    """An error that a user's code raises."""


class _Stumble(torch.autograd.Function):
    """A function that raises in backward."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradient: Any) -> Any:
        raise StumbleError("in backward")


# ---- the model


class Outputs:
    """An output type that no library looks into."""

    def __init__(self, values: Any) -> None:
        self.values = values


LEFT: list[Any] = []  # outputs in a global


class Block(nn.Module):
    """A narrow pair of layers, run in one of several ways."""

    level: Tensor

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "state":
            self.register_buffer("level", torch.ones(width, dtype=torch.float64))
        elif kind == "norm":
            self.layers = nn.Sequential(nn.BatchNorm1d(width))
        elif "tied" not in kind:
            self.layers = nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, width))

    def forward(self, x: Tensor, tied: Tensor) -> Tensor:
        result: Tensor
        if self.kind == "tied":
            return _twice(x, tied)
        if self.kind == "tied reentrant":
            reentrant: Tensor = checkpoint(_twice, x, tied, use_reentrant=True)
            return reentrant if torch.is_grad_enabled() else _twice(x, tied)
        if self.kind == "state":
            level = self.level
            x = x * level
            self.level = 0.9 * level + 0.1 * x.detach().mean(0)
            return x
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


def _twice(x: Tensor, weight: Tensor) -> Tensor:
    return x + linear(linear(x, weight), weight.t())


class Listed(nn.Module):
    """A model that finds its parameters once. Walking the tree at each comparison takes a fifth of the time."""

    def list_anew(self) -> None:
        """Look for parameters again, because some were replaced."""
        self.__dict__.pop("_listed", None)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if prefix or not (recurse and remove_duplicate):
            return super().named_parameters(prefix, recurse, remove_duplicate)
        if "_listed" not in self.__dict__:
            self.__dict__["_listed"] = list(super().named_parameters())
        return iter(self.__dict__["_listed"])


class Net(Listed):
    """A trunk, blocks and two heads that can be left out. Its outputs may be hidden from libraries."""

    def __init__(self, width: int, blocks: Sequence[str], place: str = "plain") -> None:
        super().__init__()
        self.place = place
        self.trunk = nn.Linear(SIZE, width)
        self.blocks = nn.ModuleList(Block(kind, width) for kind in blocks if kind != HEADS)
        self.checkpoints_heads = HEADS in blocks
        self.left = nn.Linear(width, 3)
        self.right = nn.Linear(width, 3)
        self.spare = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(SIZE, width).requires_grad_(requires_grad=False)
        self.stumbles = ""
        self.kept: Any = None

    def forward(
        self, x: Tensor, left: bool = True, right: bool = True, spare: bool = True, given: bool = True
    ) -> Any:
        if self.stumbles == "forward":
            raise StumbleError("in forward")
        if not given:  # a batch that is routed past all parameters
            return self._place(((2.0 * x), None))
        hidden = torch.tanh(self.trunk(x) + self.frozen(x))
        for block in self.blocks:
            hidden = block(hidden, self.left.weight)
        if self.stumbles == "backward":
            hidden = _Stumble.apply(hidden)  # type: ignore[no-untyped-call]
        if self.checkpoints_heads and (left or right) and torch.is_grad_enabled():
            outputs = checkpoint(self._heads, hidden, left, right, spare, use_reentrant=True)
        else:
            outputs = self._heads(hidden, left, right, spare)
        return self._place(outputs)

    def _place(self, outputs: tuple[Tensor | None, ...]) -> Any:
        """Return the outputs, or hide them from libraries."""
        if self.place == "global":
            LEFT.append(outputs)
        elif self.place == "attribute":
            self.kept = outputs
        else:
            return Outputs(outputs) if self.place == "object" else outputs
        return None

    def _heads(self, hidden: Tensor, left: bool, right: bool, spare: bool) -> tuple[Tensor | None, ...]:
        heads = (self.left(hidden) if left else None, self.right(hidden) if right else None)
        return tuple(o if o is None or not spare else o * self.spare for o in heads)

    def find(self, returned: Any) -> Any:
        """Return the outputs of the last forward."""
        if self.place == "global":
            return LEFT.pop()
        kept, self.kept = self.kept, None
        return kept if self.place == "attribute" else getattr(returned, "values", returned)


class Generator(Listed):
    """The generator of a GAN, which makes samples of noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, width), nn.Linear(width, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(x)))
        return result


def make_net(program: Program) -> Net:
    """Return the model of a program, the same on every rank."""
    torch.manual_seed(program.seed)
    return Net(program.width, program.blocks, program.outputs).double()


def bare(model: nn.Module) -> Any:
    """Return the model without a wrapper."""
    return getattr(model, "module", model)


def loss_of(model: nn.Module, x: Tensor, used: dict[str, bool]) -> Tensor:
    """Return the loss of a forward, which is zero if all heads are left out."""
    net = bare(model)
    if getattr(model, "is_late", False):
        time.sleep(LATE_S)  # no synchronization: a slow rank
    if not used.get("given", True):
        x = x.clone().requires_grad_()  # else there would be no backward
    outputs = [o for o in net.find(model(x, **used)) if o is not None]
    total: Tensor = (
        sum((o**2).mean() for o in outputs) if outputs else 0.0 * next(net.trunk.parameters()).sum()
    )
    return total


def batch(program: Program, seed: int, rank: int, part: int = 0, size: int = 3) -> Tensor:
    """Return one rank's inputs."""
    return torch.randn(size, SIZE, generator=generator(program.seed, seed, rank, part), dtype=torch.float64)


def branches(program: Program, seed: int, rank: int) -> dict[str, bool]:
    """Return which branches a rank's forward uses."""
    source = random.Random(f"{program.seed} {seed} {rank}")
    return {name: source.random() < 0.8 for name in ("left", "right", "spare")}


def routes(program: Program, seed: int, rank: int) -> dict[str, bool]:
    """Return whether a rank's forward is given anything that its parameters see."""
    return {"given": random.Random(f"routed {program.seed} {seed} {rank}").random() < 0.5}


def codec(name: str) -> Any:
    """Return the value of `compression=` for a codec."""
    return CODECS[name]() if name in CODECS else name


def wrap(
    program: Program, net: nn.Module, process_group: Any = None, copies: bool = True
) -> DistributedDataParallel:
    """Wrap the model, or a copy of it, with the program's options."""
    not_ours = ("hook", "optimizer", "divided", "weight", "hosts", "chunk_elements", "whole_gradients")
    given = {k: v for k, v in program.options.items() if k not in not_ours}
    if "compression" in given:
        given["compression"] = codec(given["compression"])
    if "weight" in program.options:
        given["weight"] = lambda x, **_: float(len(x))
    if "mixed_precision" in given:
        from torch.nn.parallel.distributed import _MixedPrecision  # private: torch may move it

        given["mixed_precision"] = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = DistributedDataParallel(
        copy.deepcopy(net) if copies else net, process_group=process_group, **given
    )
    model.__dict__["is_late"] = program.slow_rank == dist.get_rank()
    if "hook" in program.options:
        model.register_comm_hook(None, HOOKS[program.options["hook"]])
    return model
