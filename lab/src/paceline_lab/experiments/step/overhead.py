"""Measure how much CPU time data parallelism adds, per parameter and per step.

One rank, so that it never waits for a network. Two models: 1,000 parameters of 16 floats, whose added time divides by
1,000, and one Linear(4, 4), whose added time is fixed per step. CPU time is that of the thread that calls forward and
backward (time.thread_time), where autograd's CPU work runs. Gloo's threads are not in it, so the report also shows the
whole process's CPU time per step. Each side is compared, round by round, with the same model without data parallelism.

Gradients are dropped (zero_grad(set_to_none=True)) before forward or between forward and backward. A reducer that
restores gradient views must do it in different places then. So the report shows forward, backward and their sum, which
is what counts.
"""

import gc
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator, turns
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks
from paceline_lab.bench.sides import labels, parse_sides, wrap
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder, Rounds, Sides
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import look_of
from paceline_lab.report.panels import Bars, bars_of
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, differences
from paceline_lab.workloads.synthetic import TinyWorkload

BASELINE = "none"
DEFAULT_SIDES = "torch,torch-view,torch-batched,torch-static,torch-unused,ours,ours-unused"
WARM_UP_STEPS = 4
TARGET_US_PER_PARAMETER = {"ours": 1.0, "ours-unused": 1.5}
PHASES = ("forward_s", "backward_s", "both_s", "process_s")


class ZeroGrad(str, Enum):
    """The place in a step at which the gradients are dropped."""

    BEFORE_FORWARD = "before_forward"
    BEFORE_BACKWARD = "before_backward"


class Model(str, Enum):
    """The models that are trained."""

    TINY = "tiny"
    LINEAR = "linear"


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    side_names: tuple[str, ...]  # the first is "none"
    num_rounds: int
    steps_per_block: int
    num_parameters: int


@dataclass(frozen=True)
class Case:
    """One table: a model and an order."""

    model: Model
    zero_grad: ZeroGrad

    @property
    def label(self) -> str:
        """Return the key in the JSON."""
        return f"{self.model.value}/{self.zero_grad.value}"


CASES = (
    Case(Model.TINY, ZeroGrad.BEFORE_FORWARD),
    Case(Model.TINY, ZeroGrad.BEFORE_BACKWARD),
    Case(Model.LINEAR, ZeroGrad.BEFORE_FORWARD),
)


@dataclass(frozen=True)
class BlockTimes:
    """CPU seconds per step over one block."""

    forward_s: float
    backward_s: float
    process_s: float  # all threads, zero_grad included

    @property
    def both_s(self) -> float:
        """Return forward + backward."""
        return self.forward_s + self.backward_s


Samples = list[list[BlockTimes]]  # by side, then by block (two a round)


def measure(config: Config, tell: TellProgress) -> dict[str, Samples]:
    """Run all cases; each side's models are made in turn and dropped after their case."""
    results: dict[str, Samples] = {}
    for case in CASES:
        results[case.label] = _measure_case(config, case)
        tell(len(results) / len(CASES))
    return results


def _measure_case(config: Config, case: Case) -> Samples:
    inputs, models = _models(config, case.model)
    for model in models:
        _time_block(model, inputs, case.zero_grad, WARM_UP_STEPS)
    gc.collect()
    gc.freeze()  # so that no side pays for scanning the others' objects
    samples: Samples = [[] for _ in models]
    steps = config.steps_per_block * (1 if case.model is Model.TINY else 20)
    for turn in turns(len(models), config.num_rounds):
        _time_block(models[turn.side_index], inputs, case.zero_grad, 1)
        samples[turn.side_index].append(_time_block(models[turn.side_index], inputs, case.zero_grad, steps))
    gc.unfreeze()
    return samples


def _models(config: Config, model: Model) -> tuple[Tensor, list[nn.Module]]:
    if model is Model.LINEAR:
        return torch.randn(4, 4), [wrap(name, nn.Linear(4, 4)) for name in config.side_names]
    workload = TinyWorkload(num_parameters=config.num_parameters)
    return workload.make_batch(0, 0), [wrap(name, workload.make_model()) for name in config.side_names]


def _time_block(model: nn.Module, inputs: Tensor, zero_grad: ZeroGrad, num_steps: int) -> BlockTimes:
    forward_s = backward_s = 0.0
    process_start = time.process_time()
    for _ in range(num_steps):
        if zero_grad is ZeroGrad.BEFORE_FORWARD:
            model.zero_grad(set_to_none=True)
        start = time.thread_time()
        loss = model(inputs).sum()
        after_forward = time.thread_time()
        if zero_grad is ZeroGrad.BEFORE_BACKWARD:
            model.zero_grad(set_to_none=True)
        before_backward = time.thread_time()
        loss.backward()
        backward_s += time.thread_time() - before_backward
        forward_s += after_forward - start
    process_s = time.process_time() - process_start
    return BlockTimes(forward_s / num_steps, backward_s / num_steps, process_s / num_steps)


def added_s(samples: Samples, side_index: int, phase: str) -> list[float]:
    """Return, per round, the seconds per step that a side adds to the baseline's; a round's two blocks are averaged."""

    def per_round(blocks: list[BlockTimes]) -> list[float]:
        values = [getattr(block, phase) for block in blocks]
        return [(first + second) / 2 for first, second in zip(values[::2], values[1::2], strict=True)]

    return differences(per_round(samples[side_index]), per_round(samples[0]))


def report(config: Config, results: dict[str, Samples]) -> Report:
    """Turn the samples into one row per case and side."""
    names = labels(config.side_names)
    rows, verdicts = [], []
    summaries: dict[str, dict[str, dict[str, object]]] = {}
    for case in CASES:
        per_step = config.num_parameters if case.model is Model.TINY else 1
        summaries[case.label] = {}
        for index, name in enumerate(names[1:], start=1):
            added = {
                phase: Summary.of([s * 1e6 / per_step for s in added_s(results[case.label], index, phase)])
                for phase in PHASES
            }
            summaries[case.label][name] = {phase: asdict(summary) for phase, summary in added.items()}
            rows.append((case.label, name, *[added[phase].text() for phase in PHASES]))
            if case.model is Model.TINY and name in TARGET_US_PER_PARAMETER:
                target = TARGET_US_PER_PARAMETER[name]
                verdicts.append(
                    Verdict(
                        f"{name}, {case.label}, backward", added["backward_s"].median, target, "us/parameter"
                    )
                )
    return Report(
        name="overhead" + ("-quick" if config.num_parameters < 1000 else ""),
        question="How much CPU time does data parallelism add? us per parameter (tiny), us per step (linear)",
        columns=("model/zero_grad", "side", "forward +us", "backward +us", "both +us", "whole process +us"),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=_notes(config, results),
        config=config,
        summaries=summaries,
        samples={
            case: {name: [asdict(b) for b in blocks] for name, blocks in zip(names, s, strict=True)}
            for case, s in results.items()
        },
        provenance=collect(1),
    )


def _notes(config: Config, results: dict[str, Samples]) -> tuple[str, ...]:
    baseline = results[CASES[0].label][0]
    forward, backward = (
        Summary.of([getattr(block, phase) * 1e6 / config.num_parameters for block in baseline])
        for phase in ("forward_s", "backward_s")
    )
    return (
        f"without data parallelism: forward {forward.text()}, backward {backward.text()} us/parameter",
        "one rank: what a reducer saves or costs while it waits for a network does not show here",
    )


def main(
    sides: Sides = DEFAULT_SIDES,
    rounds: Rounds = 15,
    steps_per_block: Annotated[
        int,
        typer.Option(min=1, help="Number of timed steps per turn. The linear layer takes 20 times as many."),
    ] = 10,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Measure the CPU time that each side adds to the same model without data parallelism."""
    names = (BASELINE, *parse_sides(sides))
    config = Config(names, 2, 1, 50) if quick else Config(names, rounds, steps_per_block, 1000)
    results = LoopbackRanks(1).run(measure, config, "overhead", ENVIRONMENTS[Allocator.KEEP])[0]
    result = report(config, results)
    conclude(result, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw what each side adds to backward."""
    found = {name: s["backward_s"] for name, s in record["summaries"][CASES[0].label].items()}
    least = min((name for name in found if name.startswith("torch")), key=lambda name: found[name]["median"])
    title = (
        f"Paceline adds {found['ours']['median']:.2f} µs per parameter to backward" if "ours" in found else ""
    )
    base = f", torch {found['torch']['median']:.2f}" if "torch" in found else ""
    if least != "torch":
        base += f", {found[least]['median']:.2f} with {look_of(least).name.removeprefix('torch, ')}"
    panel = Bars("", "µs of CPU time added to backward, per parameter", bars_of(found))
    num_parameters = record["config"]["num_parameters"]
    return draw_figure(
        path,
        title + base,
        [panel],
        f"One rank, {num_parameters:,} parameters of 16 floats, no network. Medians; whiskers: quartiles.",
    )
