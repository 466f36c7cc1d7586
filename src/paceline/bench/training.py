"""How does one side train? A model under a side, its optimizer, its place in the data, and a timed step."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.bench.sides import wrap
from paceline.bench.workloads import Workload

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
        self.model: nn.Module = wrap(side_name, workload.make_model(), **arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
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
        self.optimizer.zero_grad(set_to_none=True)
        loss, self.carry = self.workload.loss(self.model, batch, self.carry)
        after_forward = time.perf_counter()
        loss.backward()
        after_backward = time.perf_counter()
        self.optimizer.step()
        after_optimizer = time.perf_counter()
        self.num_steps += 1
        if times is not None:
            times.forward_s.append(after_forward - start)
            times.backward_s.append(after_backward - after_forward)
            times.optimizer_s.append(after_optimizer - after_backward)

    def parameters(self) -> list[torch.Tensor]:
        """Return the trained values, detached."""
        return [parameter.detach() for parameter in self.model.parameters()]
