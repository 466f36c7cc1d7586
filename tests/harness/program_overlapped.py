"""Random programs whose steps are deferred into the next forward: of one model, of two, and read in many ways."""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.program_comparison import Comparison
from harness.program_free import accumulate, accumulate_copies
from harness.program_kinds import train_on
from harness.program_model import SIZE, Generator, batch, branches, loss_of, make_net, wrap
from harness.random_programs import Program
from paceline.optim import overlap

Optimizers = Sequence[torch.optim.Optimizer]


def forward_overlap(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Check that parameters and outputs are those of one process on the whole batch whenever they are read."""
    net = make_net(program)
    make = OPTIMIZERS[program.options["optimizer"]]
    alone, model = copy.deepcopy(net), wrap(program, net)
    theirs = make(alone.parameters())
    ours = overlap(make(model.parameters()), model)
    for name, seed in [*program.operations, ("read", 0)]:
        compare.where = f"{name} ({seed})"
        if name == "read":
            compare.parameters(model.module, alone)
        elif name == "read one":
            read_one(program, seed, rank, [(model.module, alone)], compare)
        elif name == "evaluate":
            evaluate(model, alone, compare)
        else:
            if name == "accumulate":
                accumulate(program, seed, model, rank)
                accumulate_copies(program, seed, [alone])
            else:
                train_on(program, name, seed, model, [rank], whole=False)
                train_on(program, name, seed, alone, range(num_ranks), whole=True)
            ours.step()
            theirs.step()


def evaluate(model: Any, alone: nn.Module, compare: Comparison) -> None:
    """Return outputs without gradients."""
    with torch.no_grad():
        x = torch.ones(2, SIZE, dtype=torch.float64)
        found, expected = model(x), alone(x)
        if isinstance(found, tuple):
            found, expected = found[0], expected[0]
        compare.same("output", found, expected, 1.0)


# ---- two models

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3),
}


def overlapped_pair(program: Program, rank: int, num_ranks: int, compare: Comparison) -> None:
    """Check two models with forward overlap, whose parameters are divided among optimizers in one way or another."""
    critic = make_net(program)  # seeds what is drawn, so that the maker is the same on every rank
    nets = Generator(program.width).double(), critic
    alone = copy.deepcopy(nets)
    ours = tuple(wrap(program, net) for net in nets)
    bare_ours = tuple(model.module for model in ours)
    theirs = _optimizers(program, alone)
    optimizers = _optimizers(program, bare_ours)
    for place, optimizer in enumerate(optimizers):
        overlap(optimizer, ours[place % 2])
    for name, seed in [*program.operations, ("read", 0)]:
        compare.where = f"{name} ({seed})"
        if name == "read":
            for found, expected in zip(bare_ours, alone, strict=True):
                compare.parameters(found, expected)
        elif name == "read one":
            read_one(program, seed, rank, list(zip(bare_ours, alone, strict=True)), compare)
        elif name == "evaluate":
            for model, expected in zip(ours, alone, strict=True):
                evaluate(model, expected, compare)
        else:
            _train_pair(program, name, seed, ours, optimizers, [rank], 1.0)
            _train_pair(program, name, seed, alone, theirs, range(num_ranks), 1 / num_ranks)


def _optimizers(program: Program, nets: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    """Return the optimizers for the option "divided". Each has parameters of the model that it overlaps with."""
    make = OPTIMIZERS[program.options["optimizer"]]
    named = [[p for p in net.parameters() if p.requires_grad] for net in nets]
    how = program.options.get("divided", "by model")
    if how == "by model":
        return [make(own) for own in named]
    every = [p for own in named for p in own]
    if how == "not at all":
        return [make(every)]
    matrices, vectors = ([p for p in every if (p.dim() > 1) == wide] for wide in (True, False))
    return [make(matrices), OPTIMIZERS["SGD"](vectors)]


def _train_pair(
    program: Program,
    name: str,
    seed: int,
    models: Sequence[nn.Module],
    optimizers: Optimizers,
    who: Iterable[int],
    share: float,
) -> None:
    source = random.Random(f"{program.seed} {seed} order")  # the same on all ranks
    clears_before, is_reversed = source.random() < 0.7, source.random() < 0.5
    if clears_before:
        _zero(optimizers)
    maker, critic = models
    for r in who:
        x, used = batch(program, seed, r), {**branches(program, seed, r), "left": True}
        if name == "train both":
            ((loss_of(critic, maker(x), used) + (maker(x) ** 2).mean()) * share).backward()
        elif name == "train the critic":
            (loss_of(critic, x, used) * share).backward()
        elif name == "train the maker":
            ((maker(x) ** 2).mean() * share).backward()
        else:  # one after the other
            ((maker(x) ** 2).mean() * share).backward()
            (loss_of(critic, x, used) * share).backward()
    for optimizer in reversed(optimizers) if is_reversed else optimizers:
        optimizer.step()
    if not clears_before:
        _zero(optimizers)


def _zero(optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


# ---- readers


def _loaded(p: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)
    return loaded


def _written_into(p: Tensor) -> Tensor:
    x = torch.empty_like(p)
    with torch.no_grad():
        x.copy_(p)
    return x


def _given_data(p: Tensor) -> Tensor:
    x = torch.empty(0, dtype=p.dtype)
    x.data = p
    return x.clone()


def _bypassing(p: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return p.clone()


SEEN: dict[str, Callable[[Any], Tensor]] = {
    "clone": lambda p: p.detach().clone(),
    "data": lambda p: p.data.clone(),
    "multiplied": lambda p: p * 1,
    "into another": _written_into,
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "saved": _loaded,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "list": lambda p: torch.asarray(p.tolist(), dtype=p.dtype),
    "parameter": nn.Parameter,
    "view": lambda p: p.view(-1).clone().view(p.shape),
    "stack": lambda p: torch.stack([p, p])[1],
    "lerp": lambda p: torch.zeros_like(p).lerp_(p.detach(), 1.0),
    "vector": lambda p: nn.utils.parameters_to_vector([p]).view(p.shape),
    "foreach": lambda p: torch._foreach_mul([p], 1.0)[0],
    "vmap": torch.vmap(lambda row: row * 1),
}
"""Show the step, by waiting for it."""

UNSEEN: dict[str, Callable[[Any], Tensor]] = {
    "torch.tensor": torch.tensor,
    "asarray": lambda p: torch.asarray(p, copy=True),
    "new_tensor": lambda p: torch.empty(0, dtype=p.dtype).new_tensor(p),
    "given data": _given_data,
    "as_subclass": lambda p: p.as_subclass(Tensor).clone(),
    "bypassing": _bypassing,
}
"""Show the step, or NaN: never the step before."""


def read_one(
    program: Program,
    seed: int,
    rank: int,
    pairs: Sequence[tuple[nn.Module, nn.Module]],
    compare: Comparison,
    kinds: Sequence[dict[str, Callable[[Any], Tensor]]] = (SEEN, SEEN, UNSEEN),
) -> None:
    """Read parameters in drawn ways, on this thread or another. Each rank reads others. Local."""
    source = random.Random(f"{program.seed} {seed} {rank} readers")
    for _ in range(3):
        kind = source.choice(kinds)
        way = source.choice(list(kind))
        name, found, expected = source.choice(list(_named(pairs)))
        value = _on_a_thread(kind[way], found) if source.random() < 0.3 else kind[way](found)
        if kind is UNSEEN and bool(value.isnan().all()):
            continue
        compare.same(f"{name}, read by {way},", value, expected, float(expected.detach().abs().max()))


def _named(pairs: Sequence[tuple[nn.Module, nn.Module]]) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    for found, expected in pairs:
        for (name, p), q in zip(found.named_parameters(), expected.parameters(), strict=True):
            yield name, p, q


def _on_a_thread(read: Callable[[Any], Tensor], p: Tensor) -> Tensor:
    read_there: list[Any] = []

    def run() -> None:
        try:
            read_there.append(read(p).detach().clone())
        except BaseException as error:
            read_there.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(read_there[0], BaseException):
        raise read_there[0]
    value: Tensor = read_there[0]
    return value
