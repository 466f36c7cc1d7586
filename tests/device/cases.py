"""What is trained on the device and on the CPU, to be compared bit by bit: a function of where, and of whose wrapper.

`side` is "torch" for torch's DistributedDataParallel over the fake NCCL, "nccl" for ours over it, "paceline" for ours
over our own backend. A case returns losses, gradients, parameters: whatever has to be the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from device.ranks import Here
from harness.models import WORKLOADS, Branches, Mlp, conv_net, generator, sgd, squares

SIDES = {"torch": "latenccl", "nccl": "latenccl", "paceline": "paceline"}
"""By side, the backend of its group on the device."""

NUM_STEPS = 4


def wrapped(module: nn.Module, here: Here, side: str, **options: Any) -> Any:
    """The side's wrapper of a module that is where the case is performed."""
    from paceline import DistributedDataParallel

    kind = nn.parallel.DistributedDataParallel if side == "torch" else DistributedDataParallel
    options = {"bucket_cap_mb": 0.001, **options}
    return kind(module, process_group=here.group, **options)


def made(build: Callable[[], nn.Module], here: Here, seed: int = 1) -> nn.Module:
    """A module, on the device; replicas start apart, and rank 0's has to win."""
    torch.manual_seed(seed + here.rank)
    module = build()
    before = dict(module.named_parameters(remove_duplicate=False))
    module.to(here.device)
    shared: dict[int, nn.Parameter] = {}
    for name, parameter in before.items():  # torch unties parameters on their way to a PrivateUse1 device
        owner, _, of = name.rpartition(".")
        tied = shared.setdefault(id(parameter), module.get_parameter(name))
        setattr(module.get_submodule(owner), of, tied)
    return module


def vectors(here: Here, step: int, width: int = 8) -> Tensor:
    return here.to_device(torch.randn(6, width, generator=generator(step, here.rank)))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def state(model: nn.Module) -> list[Tensor]:
    return [t.detach() for t in model.state_dict().values()]


def steps(
    here: Here, model: Any, optimizer: torch.optim.Optimizer | None = None, num_steps: int = NUM_STEPS
) -> list[Tensor]:
    """Losses and gradients of some steps, then the model's state."""
    optimizer = optimizer or sgd(model)
    found: list[Tensor] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = squares(model(vectors(here, step)))
        loss.backward()
        found += [loss.detach(), *gradients(model)]
        optimizer.step()
    return [*found, *state(model)]


# ---- plain training


def workload(name: str) -> Callable[[Here, str], list[Tensor]]:
    """One of the models that stand for what people train."""

    def case(here: Here, side: str) -> list[Tensor]:
        work = WORKLOADS[name]
        model = wrapped(made(work.build, here), here, side)
        # One by one, as on the CPU: half-precision foreach operators of foreign devices differ in the last bit.
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=False)
        found = []
        for step in range(NUM_STEPS):
            torch.manual_seed(step * 31 + here.rank)  # dropout
            optimizer.zero_grad(set_to_none=step % 3 != 1)
            batch = work.batch(generator(step, here.rank))
            loss = work.loss(model(*map(here.to_device, batch)))
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return [*found, *state(model)]

    return case


def option(**options: Any) -> Callable[[Here, str], list[Tensor]]:
    """An MLP under an option of the wrapper."""

    def case(here: Here, side: str) -> list[Tensor]:
        return steps(here, wrapped(made(Mlp, here), here, side, **options))

    return case


def on_a_side_stream(here: Here, side: str) -> list[Tensor]:
    """The whole step runs on another stream than the default one."""
    with _side_stream(here):
        return steps(here, wrapped(made(Mlp, here), here, side))


def accumulated(here: Here, side: str) -> list[Tensor]:
    """Windows of two micro-batches, of which one synchronizes, and clipping."""
    model = wrapped(made(Mlp, here), here, side)
    optimizer, found = sgd(model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for micro_step in range(2):
            with contextlib.nullcontext() if micro_step else model.no_sync():
                squares(model(vectors(here, 10 * step + micro_step))).backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return [*found, *state(model)]


def unused_parameters(here: Here, side: str) -> list[Tensor]:
    """Ranks leave out different parts of the model in turn."""
    model = wrapped(made(lambda: Branches(8), here), here, side, find_unused_parameters=True)
    optimizer, found = sgd(model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        outputs = model(
            vectors(here, step, 4), left=step % 2 == 0, right=(step + here.rank) % 2 == 1 or step % 2 == 1
        )
        torch.stack([squares(output) for output in outputs if output is not None]).sum().backward()
        found += gradients(model)
        optimizer.step()
    return [*found, *state(model)]


def two_models(here: Here, side: str) -> list[Tensor]:
    """Two wrapped modules in one graph, one of them used twice."""
    first = wrapped(made(Mlp, here), here, side)
    second = wrapped(made(lambda: nn.Linear(4, 4), here), here, side)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05, momentum=0.9)
    found = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        x = vectors(here, step)
        loss = squares(second(first(x))) + squares(first(-x))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *state(first), *state(second)]


def uneven_inputs(here: Here, side: str) -> list[Tensor]:
    """One rank has fewer batches, and joins."""
    model = wrapped(made(Mlp, here), here, side)
    optimizer = sgd(model)
    with model.join():
        for step in range(2 + here.rank):
            optimizer.zero_grad()
            squares(model(vectors(here, step))).backward()
            optimizer.step()
    return state(model)


def buffers(here: Here, side: str) -> list[Tensor]:
    """Batch normalisation, whose buffers are rank 0's before each forward."""
    model = wrapped(made(conv_net, here), here, side)
    optimizer, found = sgd(model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        images = torch.randn(4, 3, 8, 8, generator=generator(step, here.rank))
        loss = squares(model(here.to_device(images)))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *state(model)]


def synchronized_batch_norm(here: Here, side: str) -> list[Tensor]:
    """Statistics over all ranks' batches; over a group of their own."""
    from paceline import convert_sync_batchnorm

    convert = convert_sync_batchnorm if side != "torch" else nn.SyncBatchNorm.convert_sync_batchnorm
    if here.device.type == "cpu":  # torch's layer is not for the CPU
        convert, side = convert_sync_batchnorm, "nccl"
    module = convert(made(conv_net, here), here.another_group())
    model = wrapped(module, here, side)
    optimizer, found = sgd(model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        images = torch.randn(4, 3, 8, 8, generator=generator(step, here.rank))
        loss = squares(model(here.to_device(images)))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *state(model)]


def saved_and_loaded(here: Here, side: str) -> list[Tensor]:
    """A checkpoint of the model and its optimizer, into another wrapper."""
    model = wrapped(made(Mlp, here), here, side)
    optimizer = sgd(model)
    steps(here, model, optimizer, 2)
    again = wrapped(made(Mlp, here, seed=9), here, side)
    continued = sgd(again)
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return steps(here, again, continued, 2)


class _Split(nn.Module):
    """A layer on one device and one on the next: what travels between them is copied on the devices."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).to(first), nn.Linear(8, 4).to(second)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        found: Tensor = self.second(hidden.to(self.second.weight.device))
        return found


def split_model(here: Here, side: str) -> list[Tensor]:
    """A model on two devices of the process, of which neither is always the current one."""
    other = (
        here.device if here.device.type == "cpu" else torch.device(here.device.type, 1 - here.device.index)
    )
    torch.manual_seed(1 + here.rank)
    return steps(here, wrapped(_Split(here.device, other), here, side))


BOTH: dict[str, Callable[[Here, str], list[Tensor]]] = {
    **{name: workload(name) for name in WORKLOADS if name != "sparse"},
    "static graph": option(static_graph=True),
    "bucket views": option(gradient_as_bucket_view=True),
    "one bucket": option(bucket_cap_mb=25),
    "side stream": on_a_side_stream,
    "accumulated": accumulated,
    "unused parameters": unused_parameters,
    "two models": two_models,
    "uneven inputs": uneven_inputs,
    "buffers": buffers,
    "saved and loaded": saved_and_loaded,
    "split model": split_model,
    "synchronized batch norm": synchronized_batch_norm,
}
"""What torch's wrapper does as well: it has to pass, too, or the device is wrong."""


# ---- ours alone


def clipped_by(name: str) -> Callable[[Here, str], list[Tensor]]:
    """An optimizer that scales by norms of parameters and gradients."""

    def case(here: Here, side: str) -> list[Tensor]:
        import paceline_recipes

        model = wrapped(made(Mlp, here), here, side)
        return steps(here, model, getattr(paceline_recipes, name)(model.parameters(), lr=0.05))

    return case


def reduced(num_steps: int = NUM_STEPS, **options: Any) -> Callable[[Here, str], list[Tensor]]:
    """Another reduction of gradients, or one of fewer bytes."""

    def case(here: Here, side: str) -> list[Tensor]:
        made_here = {name: make() if callable(make) else make for name, make in options.items()}
        return steps(here, wrapped(made(Mlp, here), here, side, **made_here), num_steps=num_steps)

    return case


def sparse(**options: Any) -> Callable[[Here, str], list[Tensor]]:
    """Gradients of an embedding. NCCL has no all-reduce of sparse tensors, so torch's wrapper cannot do it."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Flatten(), nn.Linear(30, 3))

    def case(here: Here, side: str) -> list[Tensor]:
        model = wrapped(made(build, here), here, side, **options)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False), []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            tokens = torch.randint(20, (4, 5), generator=generator(step, here.rank))
            squares(model(here.to_device(tokens))).backward()
            found += [
                p.grad.coalesce().to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()
            ]
            optimizer.step()
        return [*found, *state(model)]

    return case


def mixed_precision(here: Here, side: str) -> list[Tensor]:
    from torch.nn.parallel.distributed import _MixedPrecision

    low = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return steps(here, wrapped(made(Mlp, here), here, side, mixed_precision=low))


class Residual(nn.Module):
    """Blocks of which a step may leave out some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Linear(8, 8) for _ in range(3)]
        for i, block in enumerate(self.blocks):
            self.add_module(f"block{i}", block)
        self.dropped: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x if i in self.dropped else x + torch.tanh(block(x))
        return x


def skipped_blocks(here: Here, side: str) -> list[Tensor]:
    """Residual blocks that some steps leave out, declared before."""
    net: Any = made(Residual, here)
    model = wrapped(net, here, side, droppable=net.blocks)
    optimizer, found = sgd(model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        net.dropped = [step % 3] if step else []
        with model.skip(*(net.blocks[i] for i in net.dropped)) if step else contextlib.nullcontext():
            squares(model(vectors(here, step))).backward()
        found += gradients(model)
        optimizer.step()
    return [*found, *state(model)]


def forward_overlap(here: Here, side: str) -> list[Tensor]:
    """Steps that are put off into the next forward."""
    model = wrapped(made(Mlp, here), here, side, overlap_forward="always")
    optimizer, found = sgd(model), []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = squares(model(vectors(here, step)))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *state(model)]


def unequal_shares(here: Here, side: str) -> list[Tensor]:
    """Ranks train three and five samples of each step's eight."""
    from paceline.data import GlobalBatch, GlobalShuffle

    shuffle = GlobalShuffle(32, GlobalBatch((3, 5)))
    samples = torch.randn(32, 8, generator=generator(5))
    model = wrapped(made(Mlp, here), here, side, batch_sampler=shuffle)
    optimizer, found = sgd(model), []
    loader = DataLoader(TensorDataset(samples), batch_sampler=shuffle)
    for ((batch,),) in shuffle.steps(loader):  # a step of one micro-batch
        optimizer.zero_grad()
        loss = squares(model(here.to_device(batch)))
        loss.backward()
        found += [loss.detach(), *gradients(model)]
        optimizer.step()
    return [*found, *state(model)]


def _bounded_loss() -> Any:
    from paceline_lossy import BoundedLoss

    return BoundedLoss(0.0)


OURS: dict[str, Callable[[Here, str], list[Tensor]]] = {
    "sparse": sparse(),
    "lars": clipped_by("LARS"),
    "lamb": clipped_by("LAMB"),
    **{
        f"compression {name}": reduced(compression=name)
        for name in ("bf16", "fp16", "int8", "topk", "powersgd")
    },
    "adasum": reduced(reduction="adasum"),
    "bounded loss": reduced(reduction=_bounded_loss),
    "unequal shares": unequal_shares,
    "mixed precision": mixed_precision,
    "skipped blocks": skipped_blocks,
    "forward overlap": forward_overlap,
}
"""What ours alone does."""

CASES = {**BOTH, **OURS}

TOLERANCES = {
    "channels_last": 1e-5,  # the meta kernel of convolution's backward says another memory format than the CPU's has
    "synchronized batch norm": 1e-4,  # a device's layer is torch's, a CPU's is ours
    "lstm": 1e-6,  # a weight's gradients of several steps in time are added up in another order
    "lamb": 1e-5,  # norms of the CPU's parameters are taken by another operator
}
"""Where the CPU computes in another way, to what relative error its numbers are the device's."""


@contextlib.contextmanager
def _side_stream(here: Here) -> Iterator[None]:
    if here.device.type == "cpu":
        yield
        return
    with torch.Stream(here.device):
        yield
        # What the case returns is read on the default stream.
        after = torch.accelerator.current_stream(here.device).record_event()
    torch.accelerator.current_stream(here.device).wait_event(after)
