"""Measure the gain of buckets in the order in which rank 0 saw its gradients, over the reverse order of registration.

    registered   Paceline, whose buckets stay as they were cut at first
    ours         Paceline, which cuts them anew after the first backward
    torch        torch's DistributedDataParallel, which does so too

The layers of a model sleep (`TimedModel`) on the hosts of an emulated cluster. They are registered in the order of
their use, in the reverse one, or shuffled; what is computed is the same. Sides alternate; a time is the slowest rank's,
from one barrier to the end of backward.

Source: Li et al. 2020, section 6.2.1, which suggests it and measures nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from paceline import DistributedDataParallel
from paceline_lab.bench.layer_profile import default_profile
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import Ranks, gather
from paceline_lab.bench.timed_model import TimedModel
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    ComputeS,
    Hosts,
    Quick,
    Rate,
    ReportFolder,
    Rounds,
)
from paceline_lab.experiments.runner import cluster_or_loopback, conclude, train_in_turn
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.look import BASELINE, OURS, PAPER
from paceline_lab.report.panels import Bar, Bars, Panel
from paceline_lab.report.publication import Report
from paceline_lab.report.summary import Summary, ratios, slowest_rank

REGISTERED, FOLLOWED, TORCH = SIDES = ("registered", "ours", "torch")
COLORS = {REGISTERED: PAPER, FOLLOWED: OURS, TORCH: BASELINE}
ORDERS = ("as used", "reversed", "shuffled")
TORCH_CAP_MB = 25.0  # its default
WARM_UP_STEPS = 2  # after the first of them buckets are cut anew


@dataclass(frozen=True)
class Config:
    """The settings of the training.

    Attributes:
        workload: Workload whose layers are emulated, in proportion.
        scale: Divisor of its gradients' bytes.
        compute_s: Time of forward and backward.
    """

    workload: str
    scale: float
    compute_s: float


class Reordered(nn.Module):
    """Layers that are used in one order and registered in another."""

    def __init__(self, config: Config, order: str) -> None:
        super().__init__()
        profile = default_profile(config.workload).taking(config.compute_s)
        layers = list(TimedModel(profile, dist.get_rank(), config.scale))
        registered = {
            "as used": layers,
            "reversed": layers[::-1],
            "shuffled": random.Random(0).sample(layers, len(layers)),
        }[order]
        self.registered = nn.ModuleList(registered)
        self._used = layers  # a list, which registers nothing

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._used:
            x = layer(x)
        return x


class Trainee:
    """One side with one order of registration."""

    def __init__(self, config: Config, order: str, side: str) -> None:
        network = Reordered(config, order)
        self.model: nn.Module
        if side == TORCH:
            cap_mb = TORCH_CAP_MB / config.scale  # as many buckets as of whole gradients
            self.model = nn.parallel.DistributedDataParallel(network, bucket_cap_mb=cap_mb)
        else:
            self.model = ours = DistributedDataParallel(network)
            if side == REGISTERED:  # there is no option for this
                ours.reducer.cuts.has_followed = True
        self.lasted_s: list[float] = []
        self.x = torch.ones((), requires_grad=True)

    def turn(self, num_steps: int, timed: bool = True) -> None:
        """Train some steps, each behind a barrier. Collective."""
        for _ in range(num_steps):
            self.model.zero_grad()
            dist.barrier()
            began_s = time.perf_counter()
            self.model(self.x).backward()
            if timed:
                self.lasted_s.append(time.perf_counter() - began_s)


def measure(arguments: tuple[Config, int], tell: TellProgress) -> dict[str, dict[str, list[float]]]:
    """Steps of the slowest rank, by order and side. Collective."""
    config, num_rounds = arguments
    trainees = {(order, side): Trainee(config, order, side) for order in ORDERS for side in SIDES}
    for trainee in trainees.values():
        trainee.turn(WARM_UP_STEPS, timed=False)
    train_in_turn(list(trainees.values()), num_rounds, 1, tell)
    found: dict[str, dict[str, list[float]]] = {}
    for (order, side), trainee in trainees.items():
        found.setdefault(order, {})[side] = slowest_rank(gather(trainee.lasted_s))
    return found


def report(config: Config, found: dict[str, dict[str, list[float]]], place: Ranks, quick: bool) -> Report:
    """A row for each order of registration."""
    rows, summaries = [], {}
    for order, sides in found.items():
        gained = Summary.of(ratios(sides[FOLLOWED], sides[REGISTERED]))
        rows.append((order, *[Summary.of(sides[side]).text(1e3, 0) for side in SIDES], gained.text()))
        summaries[order] = {
            "step_s": {side: asdict(Summary.of(sides[side])) for side in SIDES},
            "ours / registered": asdict(gained),
            "saved": 1 - gained.median,
        }
    return Report(
        name=f"bucket-order-{place.label}" + ("-quick" if quick else ""),
        question="What is gained by buckets in the order in which gradients become ready?",
        columns=("layers registered", *[f"{side}, ms" for side in SIDES], "ours / registered"),
        rows=tuple(rows),
        verdicts=(),
        notes=(
            f"{config.workload}, gradients divided by {config.scale:g}, forward and backward {config.compute_s:g} s",
            "medians and quartiles; a ratio's sides are of the same round",
        ),
        config=config,
        summaries=summaries,
        samples=found,
        provenance=collect(place.num_ranks),
        place=place.describe(),
    )


_NAMES = {"registered": "as registered", "ours": "Paceline", "torch": "torch"}


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each order's steps from a stored report."""
    panels: list[Panel] = []
    for order, found in record["summaries"].items():
        bars = [
            Bar(_NAMES[side], Summary(**found["step_s"][side]).times(1e3), color)
            for side, color in COLORS.items()
        ]
        panels.append(Bars(f"layers registered {order}", "forward and backward, ms", bars))
    ratio = record["summaries"]["reversed"]["ours / registered"]["median"]
    words = show_ratio(ratio, "with buckets as registered")
    title = f"With layers registered backwards, buckets in the order of their gradients make a step {words}"
    return draw_figure(path, title, panels, record["notes"][0], columns=1)


def main(
    hosts: Hosts = 2,
    rate: Rate = "250Mbit",
    workload: Annotated[str, typer.Option(help="Whose layers.")] = "resnet50",
    scale: Annotated[float, typer.Option(min=1.0, help="Divides its gradients.")] = 4.0,
    compute_s: ComputeS = 1.2,
    rounds: Rounds = 5,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Time steps of a model whose layers are registered in another order than they are used in."""
    if quick:
        hosts, scale, compute_s, rounds = 0, 1000.0, 0.003, 2
    config = Config(workload, scale, compute_s)
    with cluster_or_loopback(hosts, rate) as place:
        found = place.run(measure, (config, rounds), "order of buckets", ENVIRONMENTS[Allocator.KEEP])[0]
    conclude(report(config, found, place, quick), report_folder, as_json, draw)
