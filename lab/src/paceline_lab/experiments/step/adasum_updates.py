"""Measure how much of combining updates by Adasum backward hides.

    after            AdasumOptimizer: the step, then Adasum of all updates, when backward is done
    during           the same with overlap=True: bucket by bucket, while backward runs
    alone            without communication

An MLP whose layers also sleep (`forward_overlap_loss`) trains with Adam on the hosts of an emulated cluster. Sides
alternate. A time is the slowest rank's from one barrier to the end of `step()`. Both ways end with the same parameters
but for rounding, as buckets are cut otherwise. Each side's ranks are compared bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from paceline_adasum import AdasumOptimizer
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import Ranks, gather
from paceline_lab.bench.sides import digest
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
from paceline_lab.experiments.runner import cluster_or_loopback, conclude, refuse_unequal, train_in_turn
from paceline_lab.experiments.step.forward_overlap_loss import Config, network
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.look import BASELINE, OURS, PAPER
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, slowest_rank

ALONE, AFTER, DURING = SIDES = ("alone", "after", "during")
SHOWN = {
    ALONE: ("no communication", PAPER),
    AFTER: ("after backward", BASELINE),
    DURING: ("during backward", OURS),
}
WARM_UP_STEPS = 3

Found = dict[str, tuple[list[float], bool]]


class Trainee:
    """One side."""

    def __init__(self, side: str, config: Config) -> None:
        self.side, self.config = side, config
        self.model = network(config)
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        if side != ALONE:
            self.optimizer = AdasumOptimizer(self.optimizer, overlap=side == DURING)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.lasted_s: list[float] = []

    def turn(self, num_steps: int, timed: bool = True) -> None:
        """Train some steps, each behind a barrier. Collective."""
        for _ in range(num_steps):
            x = torch.randn(self.config.num_samples, 784, generator=self.generator)
            self.optimizer.zero_grad()
            dist.barrier()
            began_s = time.perf_counter()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            if timed:
                self.lasted_s.append(time.perf_counter() - began_s)


def measure(arguments: tuple[Config, int], tell: TellProgress) -> Found:
    """Steps of the slowest rank, and whether the ranks' parameters are equal, by side. Collective."""
    config, num_rounds = arguments
    trainees = [Trainee(side, config) for side in SIDES]
    for trainee in trainees:
        trainee.turn(WARM_UP_STEPS, timed=False)
    train_in_turn(trainees, num_rounds, config.num_steps, tell)
    return {
        each.side: (
            slowest_rank(gather(each.lasted_s)),
            len(set(gather(digest([p.detach() for p in each.model.parameters()])))) == 1,
        )
        for each in trainees
    }


def report(config: Config, found: Found, place: Ranks, quick: bool) -> Report:
    """A row a side."""
    steps = {side: Summary.of(lasted_s) for side, (lasted_s, _) in found.items()}
    exposed = {side: steps[side].median - steps[ALONE].median for side in (AFTER, DURING)}
    num_bytes = sum(layer.num_bytes for layer in config.layers())
    return Report(
        name=f"adasum-updates-{place.label}" + ("-quick" if quick else ""),
        question="How much of combining updates by Adasum does backward hide?",
        columns=("updates are combined", "step ms", "more than alone, ms"),
        rows=tuple((side, steps[side].text(1e3, 0), f"{1e3 * exposed.get(side, 0.0):.0f}") for side in SIDES),
        verdicts=(Verdict("step, during / after", steps[DURING].median / steps[AFTER].median, 1.0, "x"),),
        notes=(f"{num_bytes / 1e6:.1f} MB of updates, {1e3 * config.compute_s:.0f} ms of sleep a step",),
        config=config,
        summaries={
            "steps_s": {side: asdict(step) for side, step in steps.items()},
            "exposed_s": exposed,
            "hidden_ratio": 1 - exposed[DURING] / exposed[AFTER],
        },
        samples={side: lasted_s for side, (lasted_s, _) in found.items()},
        provenance=collect(place.num_ranks),
        place=place.describe(),
    )


def main(
    hosts: Hosts = 2,
    rate: Rate = "500Mbit",
    width: Annotated[int, typer.Option(help="Width of the hidden layers.")] = 1024,
    layers: Annotated[int, typer.Option(help="Number of hidden layers.")] = 4,
    compute_s: ComputeS = 0.6,
    rounds: Rounds = 3,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Time steps that combine updates after backward, and during it."""
    if quick:
        hosts, width, layers, compute_s, rounds = 0, 16, 1, 0.003, 2
    config = Config(width, layers, compute_s, num_samples=8, num_steps=4)
    with cluster_or_loopback(hosts, rate) as place:
        environment = ENVIRONMENTS[Allocator.KEEP]
        found = place.run(measure, (config, rounds), "updates by Adasum", environment)[0]
    refuse_unequal(side for side, (_, is_equal) in found.items() if side != ALONE and not is_equal)
    made = report(config, found, place, quick)
    conclude(made, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each side's steps, from a stored report."""
    steps = {side: Summary(**found) for side, found in record["summaries"]["steps_s"].items()}
    bars = [Bar(SHOWN[side][0], step.times(1e3), SHOWN[side][1]) for side, step in steps.items()]
    words = show_ratio(steps[DURING].median / steps[AFTER].median, "combining after it")
    title = f"Combining updates during backward makes a step {words}"
    return draw_figure(path, title, [Bars("", "step time, ms", bars)], record["notes"][0])
