"""Record a profile: train for some steps without data parallelism, and note when every layer is done.

A layer's time lasts from the end of the layer before it to its own end, in the order of timed models (`timed_model`).
So the sums are those of the real forward and backward. A layer that is done before one that should come earlier
gets 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.errors import ConfigurationError
from paceline.observe.device_times import name_of
from paceline_lab.bench.layer_profile import Layer, LayerTime, Profile, layers_of, owners
from paceline_lab.workloads import Workload, make_workload
from paceline_plan.workload_recording import clock_of

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class _Step:
    """Seconds since the phase began, by layer, and each phase's whole."""

    forward_ends_s: dict[str, float]
    backward_ends_s: dict[str, float]
    forward_s: float
    backward_s: float
    optimizer_s: float


def check_recordable(device: str, num_steps: int) -> None:
    """Refuse what cannot be recorded here.

    Raises:
        ConfigurationError: There is no such device, or nothing to record.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    known = ["cpu"] if here is None else ["cpu", here.type]
    if device not in known:
        raise ConfigurationError(f"--device {device} is not here. Pass {' or '.join(known)}.")
    if num_steps < 1:
        raise ConfigurationError(f"--steps {num_steps} records nothing. Pass 1 or more.")


def record(
    workload_name: str, device: str, num_steps: int, tell: Callable[[float], None], quick: bool = False
) -> Profile:
    """Train and return the median step, layer by layer.

    Args:
        workload_name: Name of the workload.
        device: "cpu", or the accelerator's type.
        num_steps: Number of timed steps.
        tell: Told the share of the work that is done.
        quick: The workload's smallest size; its profile fits no other.

    Raises:
        ConfigurationError: There is no such workload or device.
    """
    check_recordable(device, num_steps)
    workload = make_workload(workload_name, quick)
    recorder = _Recorder(workload, device)
    steps = []
    for number in range(WARM_UP_STEPS + num_steps):
        steps.append(recorder.step())
        tell((number + 1) / (WARM_UP_STEPS + num_steps))
    name = name_of(torch.device(device))
    source = f"recorded: median of {num_steps} steps on {name}, torch {torch.__version__}, {workload}"
    return _profile(workload_name, source, layers_of(workload), steps[WARM_UP_STEPS:])


class _Recorder:
    """A model with a mark at the end of every layer's forward and backward."""

    def __init__(self, workload: Workload, device: str) -> None:
        torch.manual_seed(0)
        self.workload, self.device = workload, torch.device(device)
        self.model = workload.make_model().to(self.device)
        self.optimizer = workload.make_optimizer(self.model.parameters())
        self.clock = clock_of(self.device)
        self.forward_marks: dict[str, Any] = {}
        self.backward_marks: dict[str, Any] = {}
        self.carry: Any = None
        self.num_steps = 0
        for layer, (module, parameters) in owners(self.model).items():
            module.register_forward_hook(self._forward_hook(layer))
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._backward_hook(layer))

    def _forward_hook(self, layer: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self.forward_marks[layer] = self.clock.mark()

        return hook

    def _backward_hook(self, layer: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            self.backward_marks[layer] = self.clock.mark()

        return hook

    def step(self) -> _Step:
        batch = tree_map(
            lambda x: x.to(self.device) if isinstance(x, Tensor) else x,
            self.workload.make_batch(0, self.num_steps),
        )
        self.num_steps += 1
        self.optimizer.zero_grad()
        start = self.clock.mark()
        loss, self.carry = self.workload.loss(self.model, batch, self.carry)
        after_forward = self.clock.mark()
        loss.backward()
        after_backward = self.clock.mark()
        self.optimizer.step()
        end = self.clock.mark()
        between_s = self.clock.between_s
        return _Step(
            {name: between_s(start, mark) for name, mark in self.forward_marks.items()},
            {name: between_s(after_forward, mark) for name, mark in self.backward_marks.items()},
            between_s(start, after_forward),
            between_s(after_forward, after_backward),
            between_s(after_backward, end),
        )


def _profile(workload: str, source: str, layers: tuple[Layer, ...], steps: list[_Step]) -> Profile:
    names = [layer.name for layer in layers]
    forward_s = _durations(names, [(step.forward_ends_s, step.forward_s) for step in steps])
    backward_s = _durations(names[::-1], [(step.backward_ends_s, step.backward_s) for step in steps])
    return Profile(
        workload,
        source,
        tuple(LayerTime(x.name, x.shapes, forward_s[x.name], backward_s[x.name]) for x in layers),
        median(step.optimizer_s for step in steps),
    )


def _durations(order: list[str], steps: list[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Return the median time of each layer; the time after the last layer counts as its own."""
    samples: dict[str, list[float]] = {name: [] for name in order}
    for ends_s, whole_s in steps:
        now_s = 0.0
        for name in order:
            until_s = whole_s if name == order[-1] else max(now_s, ends_s.get(name, now_s))
            samples[name].append(until_s - now_s)
            now_s = until_s
    return {name: median(values) for name, values in samples.items()}
