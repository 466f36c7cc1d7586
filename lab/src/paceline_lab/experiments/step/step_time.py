"""Measure how long a training step is under Paceline, compared with torch's.

Both sides train the same model from the same seed on the same batches, in the same processes, in alternating blocks.
The first step of a block is not timed: it pays for the caches that the other side left. A step's time is the slowest
rank's. A model's pages keep their place in memory for the life of its process. So the processes are launched several
times, with the sides built in alternating order. Afterwards the sides' parameters must be bitwise equal (one or two
ranks: addition of two is order-free): a fast wrong answer is no answer.
"""

import dataclasses
import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator, WrongAnswerError, turns
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks, gather
from paceline_lab.bench.sides import StepTimes, Trainee, labels, parse_sides
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, Ranks, ReportFolder, Sides
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.look import look_of, workload_name
from paceline_lab.report.panels import STEP_TIME, Bars, bars_of
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, ratios, slowest_rank
from paceline_lab.workloads import Workload, make_workload

WARM_UP_STEPS = 4  # torch re-buckets after the first
PHASES = ("forward_s", "backward_s", "optimizer_s", "step_s")
STEPS_PER_BLOCK = {"tiny": 20}  # milliseconds each
TARGET_RATIO = 1.00
TARGET_RATIOS = {"wide_mlp": 0.90}  # what the communication-heavy one aims for


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    workload: str
    side_names: tuple[str, ...]
    num_ranks: int
    num_launches: int
    num_rounds: int  # per launch
    steps_per_block: int
    allocator: Allocator
    quick: bool
    last_side_first: bool = False  # in which order the sides are built; alternates from launch to launch


@dataclass(frozen=True)
class RoundTimes:
    """Median seconds of one side in each round; the lists are as long as there are rounds."""

    forward_s: list[float]
    backward_s: list[float]
    optimizer_s: list[float]
    step_s: list[float]


@dataclass(frozen=True)
class Outcome:
    """The samples of one launch; every rank returns the same."""

    sides: tuple[RoundTimes, ...]
    samples: tuple[tuple[StepTimes, ...], ...]  # per side, per rank, all steps
    equal_sides: bool  # bitwise, parameters of all sides on this rank
    equal_ranks: bool  # bitwise, parameters of all ranks on every side
    notes: tuple[str, ...]


def measure(config: Config, tell: TellProgress) -> Outcome:
    """Train all sides in turn. Collective; every rank returns the same."""
    workload = make_workload(config.workload, config.quick)
    trainees = _build(config, workload)
    for trainee in trainees:
        for _ in range(WARM_UP_STEPS):
            trainee.step()
    gc.collect()
    gc.freeze()  # so that no side pays for scanning the other's set-up
    mine = [StepTimes() for _ in trainees]
    schedule = list(turns(len(trainees), config.num_rounds))
    for num_done, turn in enumerate(schedule):
        trainees[turn.side_index].step()
        for _ in range(config.steps_per_block):
            trainees[turn.side_index].step(mine[turn.side_index])
        tell((num_done + 1) / len(schedule))
    samples = tuple(tuple(gather(times)) for times in mine)
    return Outcome(
        sides=tuple(_per_round(per_rank, 2 * config.steps_per_block) for per_rank in samples),
        samples=samples,
        equal_sides=_equal_sides(trainees),
        equal_ranks=all(_equal_ranks(trainee) for trainee in trainees),
        notes=workload.notes(),
    )


def _build(config: Config, workload: Workload) -> list[Trainee]:
    order = list(range(len(config.side_names)))
    if config.last_side_first:
        order.reverse()
    built = {index: Trainee(config.side_names[index], workload) for index in order}
    return [built[index] for index in range(len(order))]


def _per_round(per_rank: tuple[StepTimes, ...], steps_per_round: int) -> RoundTimes:
    def medians(samples_per_rank: list[list[float]]) -> list[float]:
        steps = slowest_rank(samples_per_rank)
        return [
            Summary.of(steps[at : at + steps_per_round]).median
            for at in range(0, len(steps), steps_per_round)
        ]

    return RoundTimes(
        forward_s=medians([times.forward_s for times in per_rank]),
        backward_s=medians([times.backward_s for times in per_rank]),
        optimizer_s=medians([times.optimizer_s for times in per_rank]),
        step_s=medians([times.totals_s() for times in per_rank]),
    )


def _equal_sides(trainees: list[Trainee]) -> bool:
    first, *others = [trainee.parameters() for trainee in trainees]
    return all(torch.equal(left, right) for other in others for left, right in zip(first, other, strict=True))


def _equal_ranks(trainee: Trainee) -> bool:
    flat = torch.cat([parameter.flatten() for parameter in trainee.parameters()])
    reference = flat.clone()
    dist.broadcast(reference, src=0)
    return all(gather(torch.equal(flat, reference)))


def run(config: Config) -> list[Outcome]:
    """Launch the ranks several times and return one outcome per launch.

    Raises:
        WrongAnswerError: ranks disagree; or, up to two ranks, sides do.
    """
    outcomes = []
    for launch in range(config.num_launches):
        title = f"step time, {config.workload}, launch {launch + 1} of {config.num_launches}"
        this = dataclasses.replace(config, last_side_first=bool(launch % 2))
        outcomes.append(
            LoopbackRanks(config.num_ranks).run(measure, this, title, ENVIRONMENTS[config.allocator])[0]
        )
        _check(config, outcomes[-1])
    return outcomes


def _check(config: Config, outcome: Outcome) -> None:
    if not outcome.equal_ranks:
        raise WrongAnswerError(f"the ranks ended {config.workload} apart: a side does not synchronize.")
    if config.num_ranks <= 2 and not outcome.equal_sides:
        raise WrongAnswerError(
            f"the sides {', '.join(config.side_names)} ended {config.workload} with different parameters "
            "after the same batches. With one or two ranks they must be bitwise equal; compare gradients "
            "before timing anything."
        )


def report(config: Config, outcomes: list[Outcome]) -> Report:
    """Turn the outcomes into rows: one per side, ratios to the first."""
    names = labels(config.side_names)
    times = [_all_launches(outcomes, index) for index in range(len(names))]
    rows, verdicts, summaries = [], [], {}
    for name, mine in zip(names, times, strict=True):
        per_phase = {phase: Summary.of(getattr(mine, phase)) for phase in PHASES}
        ratio = Summary.of(ratios(mine.step_s, times[0].step_s))
        summaries[name] = {**{key: asdict(value) for key, value in per_phase.items()}, "ratio": asdict(ratio)}
        rows.append((name, *[per_phase[phase].text(1e3, 1) for phase in PHASES], ratio.text(digits=3)))
        if name.startswith("ours"):
            target = (
                TARGET_RATIOS.get(config.workload, TARGET_RATIO) if config.num_ranks > 1 else TARGET_RATIO
            )
            verdicts.append(Verdict(f"step of {name} / {names[0]}", ratio.median, target, "x"))
    return Report(
        name=f"step_time-{config.workload}-{config.num_ranks}ranks{'-quick' if config.quick else ''}",
        question=f"How long is a step of {config.workload} on {config.num_ranks} rank(s)?",
        columns=("side", "forward ms", "backward ms", "optimizer ms", "step ms", f"ratio to {names[0]}"),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=_notes(config, outcomes),
        config=config,
        summaries=summaries,
        samples={name: _raw(outcomes, index) for index, name in enumerate(names)},
        provenance=collect(config.num_ranks),
    )


def _all_launches(outcomes: list[Outcome], side_index: int) -> RoundTimes:
    per_phase = {
        phase: [value for outcome in outcomes for value in getattr(outcome.sides[side_index], phase)]
        for phase in PHASES
    }
    return RoundTimes(**per_phase)


def _notes(config: Config, outcomes: list[Outcome]) -> tuple[str, ...]:
    equal_sides = all(outcome.equal_sides for outcome in outcomes)
    return (
        *outcomes[0].notes,
        f"after each of {config.num_launches} launch(es): all ranks bitwise equal; "
        + ("all sides bitwise equal" if equal_sides else "sides differ (expected above two ranks)"),
        "ranks and Gloo's threads share the cores: communication also slows computation, as not on GPUs",
    )


def _raw(outcomes: list[Outcome], side_index: int) -> list[dict[str, object]]:
    return [
        {
            "per_round": asdict(outcome.sides[side_index]),
            "per_rank": [asdict(t) for t in outcome.samples[side_index]],
        }
        for outcome in outcomes
    ]


def main(
    workload: str = "wide_mlp",
    sides: Sides = "torch,ours",
    ranks: Ranks = 2,
    launches: Annotated[int, typer.Option(min=1, help="Number of launches of the processes.")] = 4,
    rounds: Annotated[
        int,
        typer.Option(min=2, help="Number of measuring rounds per launch. Each side runs twice per round."),
    ] = 4,
    steps_per_block: Annotated[int, typer.Option(min=1, help="Number of timed steps per turn.")] = 3,
    allocator: Allocator = Allocator.KEEP,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Compare the step time of one workload (tiny, resnet50, transformer, mlstm, wide_mlp)."""
    make_workload(workload)  # an unknown name fails here rather than in a process
    steps_per_block = STEPS_PER_BLOCK.get(workload, steps_per_block)
    launches, rounds, steps_per_block = (1, 2, 1) if quick else (launches, rounds, steps_per_block)
    config = Config(workload, parse_sides(sides), ranks, launches, rounds, steps_per_block, allocator, quick)
    result = report(config, run(config))
    conclude(result, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw a bar a side."""
    found, config = record["summaries"], record["config"]
    first, last = next(iter(found)), list(found)[-1]
    ratio = found[last]["ratio"]["median"]
    num_ranks, whose = config["num_ranks"], f"{look_of(first).name}'s"
    load = record["provenance"]["load_average_before"]
    return draw_figure(
        path,
        f"A step of {workload_name(config['workload'])} with {look_of(last).name} is {show_ratio(ratio, whose)}",
        [Bars("", STEP_TIME, bars_of({name: value["step_s"] for name, value in found.items()}, 1e3))],
        f"{num_ranks} rank{'s' * (num_ranks > 1)} on one host of two cores, layers compute. Medians and quartiles. "
        f"Other programs ran (load average {load:.1f}), so the ratio counts: the median of ratios within a round, in "
        "which the sides alternate.",
    )
