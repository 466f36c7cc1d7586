"""Measure how much sooner a training comes down to a loss when the next forward hides communication as well.

An MLP learns Fashion-MNIST on the hosts of an emulated cluster: real gradients, real steps of Adam. Its layers are
small for this machine's sake, so each also sleeps, forward a third and backward two thirds of `--compute-s` in all. All
sides train the same samples in the same steps. The result is the time until the training loss, a mean of 8 steps, first
falls to the target. It includes what forward overlap takes to measure, to decide and to compare.

    torch            torch's DistributedDataParallel
    ours             ours: backward hides communication
    ours-forward     ours with overlap_forward=True
    least            arithmetic: what no order of sending goes below (`forward_overlap`), of the layers' sleeps alone
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn import functional

from paceline.optim import overlap
from paceline_lab.bench.limit import ring_bytes_per_rank
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import Ranks, gather
from paceline_lab.bench.sides import digest, wrap
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, ComputeS, Hosts, Quick, Rate, ReportFolder
from paceline_lab.experiments.runner import cluster_or_loopback, conclude, refuse_unequal, train_each
from paceline_lab.experiments.step.forward_overlap import PAYLOAD_RATIO
from paceline_lab.experiments.step.forward_overlap_floor import Layer, least_step_s
from paceline_lab.experiments.step.forward_overlap_sides import FORWARD
from paceline_lab.experiments.unequal.shares import sleep_in_backward
from paceline_lab.experiments.unequal.time_to_loss_outcome import smoothed
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import look_of
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary
from paceline_lab.workloads import load_images

TORCH, LEAST = "torch", "least"
SIDES = (TORCH, "ours", FORWARD)
TARGET_TO_TORCH = 0.9
LATE_STEPS = 32  # the overlap has been compared by then


@dataclass(frozen=True)
class Config:
    """The settings of the trainings.

    Attributes:
        width: Width of each hidden layer.
        num_layers: Number of hidden layers.
        compute_s: Time that all layers sleep in forward and backward together.
        num_samples: Size of a rank's batch.
        num_steps: Steps of each training.
    """

    width: int
    num_layers: int
    compute_s: float
    num_samples: int
    num_steps: int

    def sizes(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer; images have 28 x 28 pixels, of 10 classes."""
        widths = [784, *[self.width] * self.num_layers, 10]
        return list(itertools.pairwise(widths))

    def layers(self) -> list[Layer]:
        """Return each layer's sleep, by its share of all parameters, and its gradients' bytes."""
        elements = [inputs * outputs + outputs for inputs, outputs in self.sizes()]
        shares = [number / sum(elements) for number in elements]
        return [
            Layer(share * self.compute_s / 3, share * self.compute_s * 2 / 3, 4 * number)
            for share, number in zip(shares, elements, strict=True)
        ]


class SlowLinear(nn.Linear):
    """A layer that takes some time more."""

    def __init__(self, inputs: int, outputs: int, timing: Layer) -> None:
        super().__init__(inputs, outputs)
        self.timing = timing

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.timing.forward_s)
        output: Tensor = sleep_in_backward(super().forward(x), self.timing.backward_s)
        return output


def network(config: Config) -> nn.Sequential:
    """The MLP, the same on every rank."""
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for (inputs, outputs), timing in zip(config.sizes(), config.layers(), strict=True):
        modules += [SlowLinear(inputs, outputs, timing), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def train_all(config: Config, tell: TellProgress) -> dict[str, dict[str, Any]]:
    """Return the results of `train`, by side. Collective."""
    return train_each(SIDES, partial(train, config), tell)


def train(config: Config, side: str) -> dict[str, Any]:
    """Train all steps: when each began on the last rank, the mean loss, and whether overlap is on. Collective."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    images = load_images()
    x, y = torch.from_numpy(images.train_images).flatten(1), torch.from_numpy(images.train_labels)
    module = network(config)
    name, arguments = ("ours", {"overlap_forward": True}) if side == FORWARD else (side, {})
    model: Any = wrap(name, module, **arguments)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    if side == FORWARD:
        optimizer = overlap(optimizer, model)
    dice = torch.Generator().manual_seed(0)  # the same for every side and rank
    end_s, losses = [], []
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(config.num_steps):
        chosen = torch.randint(len(x), (num_ranks, config.num_samples), generator=dice)[rank]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[chosen]), y[chosen])
        end_s.append(time.perf_counter() - began_s)  # of forward: whose loss belongs to this moment
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    answer = [parameter.detach() for parameter in model.parameters()]  # waits for what is under way
    drained_s = time.perf_counter() - began_s
    overlapped = getattr(model, "forward_overlap", None)
    everyone = gather((end_s, torch.stack(losses).tolist(), drained_s, digest(answer)))
    return {
        "end_s": [max(ends) for ends in zip(*(each[0] for each in everyone), strict=True)],
        "loss": [sum(found) / num_ranks for found in zip(*(each[1] for each in everyone), strict=True)],
        "drained_s": max(each[2] for each in everyone),
        "ranks_equal": len({each[3] for each in everyone}) == 1,
        "is_on": None if overlapped is None else overlapped.is_on,
        "seen": None if overlapped is None or overlapped.seen is None else asdict(overlapped.seen),
    }


def report(config: Config, runs: dict[str, Any], place: Ranks, quick: bool) -> Report:
    """A row a side."""
    losses = {side: smoothed(runs[side]["loss"]) for side in SIDES}
    target = max(min(loss[: config.num_steps * 7 // 8]) for loss in losses.values())
    least_s = _least_s(config, place)
    if least_s is not None:
        ends = [config.compute_s / 3 + step * least_s for step in range(config.num_steps)]
        runs[LEAST] = {"end_s": ends, "loss": runs[TORCH]["loss"]}
        losses[LEAST] = losses[TORCH]
    seconds = {
        side: runs[side]["end_s"][next(i for i, value in enumerate(loss) if value <= target)]
        for side, loss in losses.items()
    }
    late = {side: _late_step_s(runs[side]["end_s"]) for side in losses}
    difference = max(
        abs(a / b - 1) for side in SIDES for a, b in zip(losses[side], losses[TORCH], strict=True)
    )
    seen = runs[FORWARD]["seen"]
    num_bytes = sum(layer.num_bytes for layer in config.layers())
    return Report(
        name=f"forward_overlap_loss-{place.label}" + ("-quick" if quick else ""),
        question="How much sooner does a training come down to a loss with forward overlap?",
        columns=(
            "side",
            f"loss {target:.3f} after, s",
            "/ torch",
            "late step, ms",
            "/ torch",
            "all steps, s",
        ),
        rows=tuple(
            (
                side,
                f"{seconds[side]:.1f}",
                f"{seconds[side] / seconds[TORCH]:.2f}",
                f"{1e3 * late[side]:.0f}",
                f"{late[side] / late[TORCH]:.2f}",
                f"{runs[side]['drained_s']:.1f}" if side in SIDES else "-",
            )
            for side in losses
        ),
        verdicts=(
            Verdict("time to the loss / torch's", seconds[FORWARD] / seconds[TORCH], TARGET_TO_TORCH, "x"),
        ),
        notes=(
            (
                f"{num_bytes / 1e6:.1f} MB of gradients, {1e3 * config.compute_s:.0f} ms of sleep a step, "
                f"{config.num_steps} steps; a late step comes after the first {LATE_STEPS}"
            ),
            f"smoothed losses differ by at most {difference:.1e}: the same samples in the same steps",
            f"forward overlap is {'on' if runs[FORWARD]['is_on'] else 'off'}"
            + (
                f", seen {1e3 * seen['with_s']:.0f} instead of {1e3 * seen['without_s']:.0f} ms"
                if seen
                else ""
            ),
        ),
        config=config,
        summaries={
            "target": target,
            "seconds": seconds,
            "late_step_s": late,
            "gain": seconds[TORCH] / seconds[FORWARD],
            "largest_difference": difference,
        },
        samples=runs,
        provenance=collect(place.num_ranks),
        place=place.describe(),
    )


def _least_s(config: Config, place: Ranks) -> float | None:
    if place.rate_bytes_per_s is None:
        return None
    layers = config.layers()
    num_bytes = sum(layer.num_bytes for layer in layers)
    sent = ring_bytes_per_rank(place.num_ranks, num_bytes)
    return least_step_s(layers, 0.0, PAYLOAD_RATIO * place.rate_bytes_per_s * num_bytes / sent)


def _late_step_s(end_s: list[float]) -> float:
    late = end_s[min(LATE_STEPS, len(end_s) // 2) :]
    return Summary.of([after - before for before, after in itertools.pairwise(late)]).median


def main(
    hosts: Hosts = 4,
    rate: Rate = "500Mbit",
    width: Annotated[int, typer.Option(help="Width of the hidden layers.")] = 1024,
    layers: Annotated[int, typer.Option(help="Number of hidden layers.")] = 4,
    compute_s: ComputeS = 0.4,
    samples: Annotated[int, typer.Option(help="Number of samples of a rank's batch.")] = 32,
    steps: Annotated[int, typer.Option(min=8, help="Number of steps of each training.")] = 64,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Train with every side on an emulated cluster."""
    if quick:
        hosts, width, layers, compute_s, steps = 0, 16, 1, 0.003, 8
    config = Config(width, layers, compute_s, samples, steps)
    place = cluster_or_loopback(hosts, rate)
    with place:
        environment = ENVIRONMENTS[Allocator.KEEP]
        runs = place.run(train_all, config, "time to a loss with forward overlap", environment)[0]
    refuse_unequal(side for side in SIDES if not runs[side]["ranks_equal"])
    result = report(config, runs, place, quick)
    conclude(result, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each side's seconds to one training loss from a stored report."""
    summaries = record["summaries"]
    bars = [
        Bar(look_of(side).name, seconds, look_of(side).color)
        for side, seconds in summaries["seconds"].items()
        if side != LEAST
    ]
    marks = {"lower bound": summaries["seconds"][LEAST]} if LEAST in summaries["seconds"] else {}
    panel = Bars("", f"seconds to a training loss of {summaries['target']:.2f}; lower is better", bars, marks)
    title = f"With overlap_forward, training reaches the same loss {summaries['gain']:.2f} times as fast as with torch"
    return draw_figure(path, title, [panel], record["notes"][0].split("; a late step")[0])
