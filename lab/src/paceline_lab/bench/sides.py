"""Table of the sides of a training step: ways to wrap a module for data parallelism.

A side is a name for a way of training a module in parallel. Comparing `torch` with `torch` shows the noise.
Libraries that are not installed are refused before anything starts; lab/peers-requirements.txt has them all.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.ddp import DistributedDataParallel as OurDDP
from paceline.errors import ConfigurationError
from paceline.reductions import Reduction
from paceline.reductions.by_name import COMPRESSIONS
from paceline_lab.bench import other_libraries
from paceline_lab.bench.protocol import require
from paceline_lab.workloads import Workload
from paceline_recipes import GradientNoiseScale

NUM_BATCHES = 8  # prepared before timing, then used in turn
SEED = 20200817


@dataclass(frozen=True)
class Side:
    """One way of training in parallel.

    Attributes:
        family: "none", "torch", "ours", or another library's package.
        arguments: Arguments of the wrapper, where the family has one.
        make_reduction: Makes the reduction of the gradients, once for each model; None: the arguments name it.
        hook: A communication hook to register, by its name in `other_libraries.HOOKS`.
        backend: Backend of the process group; None for the job's own.
        tolerance: Largest relative distance of its mean from the exact one; None: lossy by design, only reported.
    """

    family: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    make_reduction: Callable[[], Reduction] | None = None
    hook: str | None = None
    backend: str | None = None
    tolerance: float | None = 1e-6


COMPRESSED_TOLERANCES = {"fp16": 2e-3, "bf16": 1.6e-2}  # the others are lossy by design

SIDES: dict[str, Side] = {
    "none": Side("none"),
    "torch": Side("torch"),
    "torch-view": Side("torch", {"gradient_as_bucket_view": True}),
    "torch-batched": Side("torch", {"gradient_as_bucket_view": True, "batched_grad_copy": True}),
    "torch-static": Side("torch", {"static_graph": True}),
    "torch-unused": Side("torch", {"find_unused_parameters": True}),
    "torch-2": Side("torch", {"bucket_cap_mb_list": [1, 2]}),
    "torch-paceline": Side("torch", backend="paceline"),  # torch's wrapper, our collectives
    "torch-fp16": Side("torch", hook="fp16", tolerance=2e-3),
    "torch-powersgd": Side("torch", {"bucket_cap_mb": 4096}, hook="powersgd", tolerance=None),
    "ours": Side("ours"),
    "ours-view": Side("ours", {"gradient_as_bucket_view": True}),
    "ours-static": Side("ours", {"static_graph": True}),
    "ours-2": Side("ours", {"bucket_cap_mb_list": [1, 2]}),  # fine buckets
    "ours-25": Side("ours", {"bucket_cap_mb_list": [1, 25]}),  # torch's, which are the default on one host
    "ours-unused": Side("ours", {"find_unused_parameters": True}),
    "ours-paceline": Side("ours", backend="paceline"),
    "ours-noise": Side("ours", make_reduction=GradientNoiseScale),
    **{
        f"ours-{name}": Side("ours", {"compression": name}, tolerance=COMPRESSED_TOLERANCES.get(name))
        for name in COMPRESSIONS
    },
    "accelerate": Side("accelerate"),
    "deepspeed": Side("deepspeed"),
    "torchft": Side("torchft"),
}


def wrap(side_name: str, module: nn.Module, **arguments: Any) -> nn.Module:
    """Return `module` under data parallelism of the named side; `arguments` are added to the side's own.

    Contract:
        Collective (the parameters are broadcast), except for "none".
    """
    side = SIDES[side_name]
    if side.family == "none":
        return module
    wrapper: Any = {"torch": TorchDDP, "ours": OurDDP}[side.family]
    if side.backend is not None:
        arguments["process_group"] = dist.new_group(backend=side.backend)
    if side.make_reduction is not None:
        arguments["reduction"] = side.make_reduction()
    model: nn.Module = wrapper(module, **{**side.arguments, **arguments})
    if side.hook is not None:
        other_libraries.HOOKS[side.hook](model)
    return model


def parallelise(
    side_name: str,
    module: nn.Module,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    **arguments: Any,
) -> other_libraries.Parallel:
    """Return `module` and its optimizer as the named side trains them.

    Contract:
        Collective, except for "none".
    """
    family = SIDES[side_name].family
    if family in other_libraries.ADAPTERS:
        return other_libraries.ADAPTERS[family](module, make_optimizer(module.parameters()))
    model = wrap(side_name, module, **arguments)
    return other_libraries.Parallel(model, make_optimizer(model.parameters()))


def parse_sides(text: str, option: str = "--sides") -> tuple[str, ...]:
    """Turn "torch,paceline" into names that can be measured here.

    Raises:
        ConfigurationError: A name is not in the table, or its package is not installed.
    """
    names = tuple(_in_table(name.strip()) for name in text.split(",") if name.strip())
    unknown = [shown(name) for name in names if name not in SIDES]
    if unknown or not names:
        other = (
            " `paceline study forward-overlap` measures paceline-forward."
            if "paceline-forward" in unknown
            else ""
        )
        raise ConfigurationError(
            f"{option} {text!r}: there is no side called {', '.join(unknown) or 'nothing'}. There are: "
            f"{', '.join(map(shown, SIDES))}.{other}"
        )
    for family in {SIDES[name].family for name in names}:
        require(family)
    return names


_OVER_ITS_BACKEND = {"ours-paceline": "paceline-backend"}


def shown(side_name: str) -> str:
    """Return what a side is called for users: `paceline-bf16` for `ours-bf16`, as stored results call it."""
    if side_name in _OVER_ITS_BACKEND:
        return _OVER_ITS_BACKEND[side_name]
    return re.sub("^ours", "paceline", side_name)


def _in_table(name: str) -> str:
    """Return the name in `SIDES` of a side as a user types it."""
    found = {words: side for side, words in _OVER_ITS_BACKEND.items()}
    return found.get(name) or re.sub(r"^paceline(?=$|-)", "ours", name)


def labels(side_names: Sequence[str]) -> tuple[str, ...]:
    """Return one distinct label per side, so that torch can be compared with itself."""
    seen: dict[str, int] = {}
    result = []
    for name in side_names:
        seen[name] = seen.get(name, 0) + 1
        suffixes = {1: "", 2: " (again)"}
        result.append(name + suffixes.get(seen[name], f" ({seen[name]})"))
    return tuple(result)


@dataclass
class StepTimes:
    """Wall seconds of every timed step, phase by phase."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)

    def totals_s(self) -> list[float]:
        """Return forward + backward + optimizer of each step."""
        return [sum(phases) for phases in zip(self.forward_s, self.backward_s, self.optimizer_s, strict=True)]


class Trainee:
    """One side. Trainees with the same seed see the same weights and the same batches."""

    def __init__(self, side_name: str, workload: Workload, **arguments: Any) -> None:
        torch.manual_seed(SEED)
        self.workload = workload
        self.module = workload.make_model()
        self.parallel = parallelise(side_name, self.module, workload.make_optimizer, **arguments)
        self.batches = [workload.make_batch(dist.get_rank(), step) for step in range(NUM_BATCHES)]
        self.carry: Any = None
        self.num_steps = 0

    def step(self, times: StepTimes | None = None) -> None:
        """Train one step behind a barrier; append its phases to `times`.

        Contract:
            Collective. Zeroing the gradients counts as part of forward, where a training loop has it.
        """
        batch = self.batches[self.num_steps % NUM_BATCHES]
        dist.barrier()
        start = time.perf_counter()
        self.parallel.zero_grad()
        loss, self.carry = self.workload.loss(self.parallel.model, batch, self.carry)
        after_forward = time.perf_counter()
        self.parallel.backward(loss)
        after_backward = time.perf_counter()
        self.parallel.step()
        after_optimizer = time.perf_counter()
        self.num_steps += 1
        if times is not None:
            times.forward_s.append(after_forward - start)
            times.backward_s.append(after_backward - after_forward)
            times.optimizer_s.append(after_optimizer - after_backward)

    def parameters(self) -> list[Tensor]:
        """Return the trained values, detached."""
        return [parameter.detach() for parameter in self.module.parameters()]

    def last_answer(self) -> list[Tensor]:
        """Run one more forward and backward and return the tensors that must be equal on all ranks.

        Contract:
            Collective; nothing trains afterwards. No optimizer's step: DeepSpeed drops the gradients in it.
        """
        self.parallel.zero_grad()
        loss, self.carry = self.workload.loss(self.parallel.model, self.batches[0], self.carry)
        self.parallel.backward(loss)
        return self.workload.answer(self.module)

    def rest(self) -> None:
        """Drop the gradients, so that sides that wait for their turn take less memory."""
        self.module.zero_grad(set_to_none=True)


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a fingerprint of the tensors' bytes and shapes: equal digests, equal tensors."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        state.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def bucket_bytes(model: nn.Module) -> tuple[int, ...]:
    """Return the bytes of each bucket in the order of launch; none where the side does not tell."""
    logging_data: Any = getattr(model, "_get_ddp_logging_data", None)  # torch's name; ours has it, too
    if logging_data is None:
        return ()
    record = logging_data()
    text = record.get("rebuilt_bucket_sizes") or record.get("bucket_sizes", "")
    return tuple(int(size) for size in re.findall(r"\d+", str(text)))
