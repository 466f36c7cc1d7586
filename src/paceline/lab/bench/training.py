"""How does one side train? A model under a side, its optimizer, its place in the data, and a timed step."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.lab.bench.sides import parallelise
from paceline.lab.workloads import Workload

NUM_BATCHES = 8  # prepared before timing, then used in turn
SEED = 20200817


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
        """Run one more forward and backward and return what has to be the same on all ranks.

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
