"""Does `bucket_cap_mb="auto"` find the caps with the shortest steps, and is it never slower than the default?

    torch            torch's DistributedDataParallel, 25 MiB
    ours             ours with its default
    auto             ours with bucket_cap_mb="auto", after its search
    1 MiB, ...       ours with that cap: a grid beside which the search is judged

Computation is timed (layers sleep), gradients and their traffic are real, on the hosts of an emulated cluster. All
sides live in the same processes and alternate; a step is the time from one backward's begin to the next one's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from paceline_lab.bench.layer_profile import Profile, default_profile
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import gather
from paceline_lab.bench.sides import wrap
from paceline_lab.bench.timed_model import TimedModel, gradient_bytes
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    ComputeS,
    Hosts,
    Quick,
    Rate,
    ReportFolder,
    Steps,
    Turns,
)
from paceline_lab.experiments.runner import cluster_or_loopback, conclude, train_in_turn
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.panels import STEP_TIME, Bars, bars_of
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, slowest_rank

WARM_UP_STEPS = 4
MOST_SEARCH_STEPS = 200
TARGET_TO_BEST = 1.03
TARGET_TO_DEFAULT = 1.01


@dataclass(frozen=True)
class Config:
    """What is measured; caps are in MiB."""

    profile: Profile
    grid_mb: tuple[float, ...]
    num_rounds: int
    num_steps: int  # of a turn
    scale: float


class Trainee:
    """One side: a model of timed layers."""

    def __init__(self, config: Config, name: str, cap_mb: float | str | None) -> None:
        module = TimedModel(config.profile, dist.get_rank(), config.scale)
        options = {} if cap_mb is None else {"bucket_cap_mb": cap_mb}
        self.name, self.model = name, wrap("torch" if name == "torch" else "ours", module, **options)
        self.lasted_s: list[float] = []

    def turn(self, num_steps: int, timed: bool = True) -> None:
        """Train some consecutive steps. Collective."""
        dist.barrier()
        began_s = []
        for _ in range(num_steps):
            self.model.zero_grad(set_to_none=True)
            loss = self.model(torch.zeros(1, requires_grad=True)).sum()
            began_s.append(time.perf_counter())
            loss.backward()
        if timed:
            self.lasted_s += [after - before for before, after in itertools.pairwise(began_s)]

    def warm_up(self) -> None:
        """Train until buckets are as they stay. Collective."""
        self.turn(WARM_UP_STEPS, timed=False)
        search = getattr(self.model, "cap_search", None)
        for _ in range(MOST_SEARCH_STEPS // 8):
            if search is None or search.best_mb is not None:
                return
            self.turn(8, timed=False)


@dataclass(frozen=True)
class SideOutcome:
    """One side; `lasted_s` of the slowest rank."""

    name: str
    lasted_s: list[float]
    best_mb: float | None
    tried: list[dict[str, float]]


def measure(config: Config, tell: TellProgress) -> list[SideOutcome]:
    """Train all sides in turn. Collective; every rank returns the same."""
    caps: dict[str, float | str | None] = {"torch": None, "ours": None, "auto": "auto"}
    caps |= {f"{cap:g} MiB": cap for cap in config.grid_mb}
    trainees = [Trainee(config, name, cap) for name, cap in caps.items()]
    for trainee in trainees:
        trainee.warm_up()
    train_in_turn(trainees, config.num_rounds, config.num_steps, tell)
    return [_outcome(trainee) for trainee in trainees]


def _outcome(trainee: Trainee) -> SideOutcome:
    search = getattr(trainee.model, "cap_search", None)
    tried = [] if search is None else [asdict(each) for each in search.tried]
    best_mb = None if search is None else search.best_mb
    return SideOutcome(trainee.name, slowest_rank(gather(trainee.lasted_s)), best_mb, tried)


def report(config: Config, outcomes: list[SideOutcome], place: Any, quick: bool) -> Report:
    """Turn the outcomes into one row a side."""
    steps = {side.name: Summary.of(side.lasted_s) for side in outcomes}
    auto = next(side for side in outcomes if side.name == "auto")
    best = min((name for name in steps if name not in ("auto", "torch")), key=lambda name: steps[name].median)
    rows = [
        (name, step.text(1e3, 1), f"{step.median / steps['torch'].median:.3f}")
        for name, step in steps.items()
    ]
    to = {name: steps["auto"].median / steps[name].median for name in steps}
    num_bytes = gradient_bytes(config.profile, config.scale)
    compute_s = config.profile.forward_s + config.profile.backward_s
    found = "no end of the search" if auto.best_mb is None else f"{auto.best_mb:.3g} MiB"
    return Report(
        name=f"bucket_caps-{config.profile.workload}-{place.label}" + ("-quick" if quick else ""),
        question='Does bucket_cap_mb="auto" find the caps with the shortest steps?',
        columns=("side", "step ms", "/ torch"),
        rows=tuple(rows),
        verdicts=(
            Verdict(f"auto / best of all ({best})", to[best], TARGET_TO_BEST, "x"),
            Verdict("auto / our default", to["ours"], TARGET_TO_DEFAULT, "x"),
        ),
        notes=(
            f"{num_bytes / 1e6:.1f} MB of gradients, {compute_s * 1e3:.0f} ms of compute",
            f"auto found {found} in {len(auto.tried)} turns",
        ),
        config=config,
        summaries={"sides": {name: asdict(step) for name, step in steps.items()}, "best_mb": auto.best_mb},
        samples={side.name: asdict(side) for side in outcomes},
        provenance=collect(place.num_ranks),
    )


def main(
    workload: str = "resnet50",
    grid: Annotated[str, typer.Option(help="Bucket caps in MiB, comma-separated.")] = "1,4,16,1000",
    hosts: Hosts = 4,
    rate: Rate = "1Gbit",
    compute_s: ComputeS = 0.3,
    scale: Annotated[float, typer.Option(help="Divisor of the gradients' bytes.")] = 4.0,
    rounds: Turns = 2,
    steps: Steps = 6,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Compare steps with searched, default and given bucket caps."""
    if quick:
        compute_s, scale, rounds, steps, hosts = 0.01, 64.0, 2, 2, 0
    config = Config(
        default_profile(workload).taking(compute_s), tuple(map(float, grid.split(","))), rounds, steps, scale
    )
    place = cluster_or_loopback(hosts, rate)
    with place as where:
        outcomes = where.run(measure, config, f"bucket caps, {workload}", ENVIRONMENTS[Allocator.KEEP])[0]
        result = report(config, outcomes, where, quick)
    conclude(result, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw each side's steps, from a stored report."""
    steps = {side: Summary(**found) for side, found in record["summaries"]["sides"].items()}
    panel = Bars(
        "",
        STEP_TIME,
        bars_of({side: asdict(step) for side, step in steps.items()}, 1e3),
    )
    words = show_ratio(steps["auto"].median / steps["ours"].median, "the default's")
    return draw_figure(path, f'A step with bucket_cap_mb="auto" is {words}', [panel])
