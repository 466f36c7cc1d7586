"""Is the memory of a minibatch what the model of Zou et al. 2017 says, M_fixed + X M_sample and a workspace a layer?

The convolutions of `guidelines`, each followed by a ReLU in place and, where the size halves, by pooling,
are trained for a step with momentum SGD. Counted is the most that torch's allocator holds at once, with weights,
momentum and the batch. Workspaces: the most that each way to compute a convolution allocates in forward and backward
besides its output and the gradients, beside what its formulation needs in forward.

There is no clock in it: a busy machine changes nothing.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from paceline_lab.bench.provenance import collect
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    Quick,
    ReportFolder,
)
from paceline_lab.experiments.prediction.convolution_times import (
    ALGORITHMS,
    Convolution,
    counted_workspace,
    peak_bytes,
)
from paceline_lab.experiments.prediction.guidelines import LAYERS, WEIGHT_COPIES
from paceline_lab.experiments.prediction.minibatch import Memory
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.publication import Report

MINIBATCHES = (1, 4, 16, 64)
_MB = 1e6


@dataclass(frozen=True)
class Config:
    """What was asked."""

    minibatches: tuple[int, ...]


def main(quick: Quick = False, as_json: AsJson = False, report_folder: ReportFolder = REPORT_FOLDER) -> None:
    """Count, and set beside the model."""
    config = Config(MINIBATCHES[:2] if quick else MINIBATCHES)
    cases = {f"step, {X} samples": step_bytes(X) for X in config.minibatches}
    for name in ALGORITHMS:
        cases |= {f"{name}, {X} samples": workspace_bytes(name, X) for X in config.minibatches}
    report = Report(
        name="minibatch-memory" + "-quick" * quick,
        question="Is the memory of a minibatch what the model of Zou et al. 2017 says?",
        columns=("case", "model, MB", "counted, MB"),
        rows=tuple((name, f"{said / _MB:.2f}", f"{seen / _MB:.2f}") for name, (said, seen) in cases.items()),
        verdicts=(),
        notes=(
            "a step: weights, gradients, momentum, the batch, feature maps",
            "an algorithm: of the four layers; modelled in forward, counted in forward and backward",
            "what a library allocates by itself, as oneDNN and NNPACK do, is not counted",
        ),
        config=config,
        summaries={
            name: {"model": said, "counted": seen, "error": said / seen - 1 if seen else None}
            for name, (said, seen) in cases.items()
        },
        samples={},
        provenance=collect(1),
    )
    conclude(report, report_folder, as_json)


def step_bytes(X: int) -> tuple[float, int]:
    """Of a training step: as modelled, and as counted."""
    memory = Memory(
        0.0,
        WEIGHT_COPIES * sum(layer.weight_bytes for layer in LAYERS),
        sum(layer.sample_bytes for layer in LAYERS),
    )
    model = _chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    batch = torch.randn(X, LAYERS[0].channels_in, LAYERS[0].size, LAYERS[0].size)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # momentum is there afterwards
    before = batch.nbytes + 2 * sum(parameter.nbytes for parameter in model.parameters())
    return -memory.bound(X), before + peak_bytes(step)


def _chain() -> nn.Module:
    modules: list[nn.Module] = []
    for layer, following in pairwise((*LAYERS, LAYERS[-1])):
        modules += [_module(layer), nn.ReLU(inplace=True)]
        modules += [nn.AvgPool2d(2)] * (following.size < layer.size)
    return nn.Sequential(*modules)


def _module(layer: Convolution) -> nn.Module:
    return nn.Conv2d(layer.channels_in, layer.channels_out, layer.kernel, padding="same", bias=False)


def workspace_bytes(name: str, X: int) -> tuple[float, int]:
    """Of all layers computed by one algorithm: as its formulation needs in forward, and as counted in both."""
    _, model = ALGORITHMS[name]
    counted = sum(counted_workspace(layer, X, name) for layer in LAYERS)
    return float(sum(model(layer, X) for layer in LAYERS)), counted
