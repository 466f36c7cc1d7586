"""Measure a step of LARS against torch's foreach SGD, and of LAMB against torch's foreach Adam.

Parameters of real models, and 1,000 tiny ones, with gradients that stay; one thread. Sides of a pair have the same
settings: momentum and weight decay. A side's parameters, gradients and state are its own. Turns go A B B A; a turn is
some steps; the ratio is taken within a round. Time is the thread's CPU time, so that other programs count less.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator, turns
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder, Rounds
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import workload_name
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, ratios
from paceline_lab.workloads import make_workload
from paceline_recipes import LAMB, LARS

Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

MODELS = ("tiny", "transformer", "resnet50", "wide_mlp")
TARGET_RATIO = 1.3
SETTINGS: dict[str, Any] = {"lr": 1e-6, "weight_decay": 1e-4}
MAKERS: dict[str, Maker] = {
    "torch SGD": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True, **SETTINGS),
    "LARS": lambda parameters: LARS(parameters, momentum=0.9, **SETTINGS),
    "torch Adam": lambda parameters: torch.optim.Adam(parameters, foreach=True, **SETTINGS),
    "LAMB": lambda parameters: LAMB(parameters, **SETTINGS),
}
PAIRS = (("LARS", "torch SGD"), ("LAMB", "torch Adam"))


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    models: tuple[str, ...]
    num_rounds: int
    num_steps: int
    quick: bool


Samples = dict[str, list[float]]  # seconds a step, by side; a value a round


def measure(config: Config, tell: TellProgress) -> dict[str, Samples]:
    """Time every model's sides."""
    return {model: _measure_model(config, model, tell) for model in config.models}


def _measure_model(config: Config, model: str, tell: TellProgress) -> Samples:
    torch.manual_seed(0)
    shapes = [p.shape for p in make_workload(model, config.quick).make_model().parameters()]
    optimizers = [_make(shapes, maker) for maker in MAKERS.values()]
    for optimizer in optimizers:
        _time(optimizer, 3)
    found: Samples = {name: [] for name in MAKERS}
    names = list(MAKERS)
    halves: dict[str, float] = {}
    for turn in turns(len(optimizers), config.num_rounds):
        name = names[turn.side_index]
        seconds = _time(optimizers[turn.side_index], config.num_steps)
        if name in halves:
            found[name].append((halves.pop(name) + seconds) / 2)
        else:
            halves[name] = seconds
        tell((turn.round_index + 1) / config.num_rounds)
    return found


def _make(shapes: list[torch.Size], maker: Maker) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return maker(parameters)


def _time(optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    start_s = time.thread_time()
    for _ in range(num_steps):
        optimizer.step()
    return (time.thread_time() - start_s) / num_steps


def report(config: Config, found: dict[str, Samples]) -> Report:
    """Turn the samples into one row per model and side."""
    rows, verdicts = [], []
    summaries: dict[str, dict[str, dict[str, object]]] = {}
    for model, samples in found.items():
        summaries[model] = {}
        for side, peer in PAIRS:
            ratio = Summary.of(ratios(samples[side], samples[peer]))
            summaries[model][side] = asdict(ratio)
            times = [Summary.of(samples[name]).text(scale=1e3, digits=2) for name in (side, peer)]
            rows.append((model, side, peer, *times, ratio.text()))
            verdicts.append(Verdict(f"{side}, {model}", ratio.median, TARGET_RATIO, f"x {peer}"))
    return Report(
        name="optimizers" + ("-quick" if config.quick else ""),
        question="How long is a step of LARS and LAMB, beside torch's foreach optimizers?",
        columns=("model", "side", "peer", "side ms", "peer ms", "ratio"),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=("all with weight decay 1e-4; LARS and SGD with momentum 0.9; one thread, no accelerator",),
        config=config,
        summaries=summaries,
        samples=found,
        provenance=collect(1),
    )


def main(
    rounds: Rounds = 15,
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps per turn.")] = 5,
    models: Annotated[str, typer.Option(help="Workloads, comma-separated.")] = ",".join(MODELS),
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Time optimizer steps."""
    chosen = tuple(models.split(","))
    config = Config(chosen[:1], 2, 1, quick) if quick else Config(chosen, rounds, steps, quick)
    found = LoopbackRanks(1).run(measure, config, "optimizers", ENVIRONMENTS[Allocator.KEEP])[0]
    result = report(config, found)
    conclude(result, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw a panel a pair of optimizers, a bar a model."""
    panels, ranges = [], []
    for side, peer in PAIRS:
        found = {model: Summary(**sides[side]) for model, sides in record["summaries"].items()}
        panels.append(
            Bars(
                f"{side}, over {peer}",
                "CPU time, divided by torch's",
                [Bar(workload_name(m), s) for m, s in found.items()],
            )
        )
        medians = [summary.median for summary in found.values()]
        ranges.append(f"{side} {min(medians):.2f} to {max(medians):.2f} of {peer}'s")
    return draw_figure(
        path,
        f"A step takes, by model: {'; '.join(ranges)}",
        panels,
        "One thread; torch's optimizers with foreach=True. Medians; whiskers: quartiles.",
    )
