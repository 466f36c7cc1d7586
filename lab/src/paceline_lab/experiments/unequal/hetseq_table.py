"""Measure HetSeq's table of 1 to 8 nodes of 4 mixed GPUs again, with equal shares, as there, and with shares by speed.

Each rank sleeps for its samples (a third in forward), 32 per rank, as one of four GPUs of a node. The kinds of GPUs are
not published, so the speeds here are an assumption, the same for every node. Gradients of a small model, weights and
their exchange are real, over Gloo on loopback. So the study shows the cost of unequal GPUs, the gain of shares by
speed, and Paceline's cost at up to 32 ranks. It cannot show HetSeq's network, which is not published.

With `--train translation` (or masked) nodes are hosts of an emulated cluster, and ranks train that task of
`time-to-loss`. They compute real gradients and sleep for the rest of the time that their speed gives.

    speed-up    samples per second over those of one node with equal shares
    expansion   speed-up over nodes, as HetSeq calls it
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigurationError
from paceline.planning import lower_bound_s
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import ClusterRanks, LoopbackRanks, Ranks
from paceline_lab.emulation import ClusterSpec
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder
from paceline_lab.experiments.runner import conclude
from paceline_lab.experiments.unequal import time_to_loss
from paceline_lab.experiments.unequal.shares import AUTO, EQUAL, LEARNING_STEPS, Case, Run, measure
from paceline_lab.experiments.unequal.time_to_loss_outcome import TORCH, Job
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, LIMIT, OURS
from paceline_lab.report.panels import Line, Lines, linear_line
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, differences

GPUS = 4
MIXED = (1.0, 1.0, 1.5, 2.0)  # seconds per sample of a node's GPUs, relative; an assumption
PUBLISHED = {
    1: (2.60, 1.0),
    2: (2.69, 1.72),
    4: (2.794, 3.22),
    8: (3.126, 5.94),
}  # s/step, speed-up (its README)
TARGET_IDEAL = 1.05
TRAINED_IDEAL_S = 1.6  # so long that 32 ranks can compute meanwhile on two cores


def case_of(nodes: int, ideal_s: float) -> Case:
    """So many nodes, alike among themselves; a step takes as long with any number of them."""
    return Case(MIXED * nodes, ideal_s=ideal_s)


def train(job: Job, tell: TellProgress) -> Run:
    """Steps of a real training, with torch's equal shares and with `balance="auto"`. Collective."""
    step_s = {}
    for side, ours in ((EQUAL, TORCH), (AUTO, AUTO)):
        steps = job.num_steps if side == AUTO else max(job.num_steps // 4, 3)
        ends = time_to_loss.train(replace(job, num_steps=steps), ours)["end_s"]
        step_s[side] = differences(ends, [0.0, *ends[:-1]])
        tell(len(step_s) / 2)
    return Run(job.case, step_s, [lower_bound_s(job.case.speeds(), job.case.size)], [], {})


def settled_s(run: Run, side: str) -> float:
    """The median step, without those in which speeds are learnt."""
    steps = run.step_s[side]
    return Summary.of(steps[LEARNING_STEPS:] if side == AUTO else steps[1:]).median


def report(runs: dict[int, Run], quick: bool, trained: str = "", place: Ranks | None = None) -> Report:
    """A row for each number of nodes."""
    fewest = min(runs)
    one_s = settled_s(runs[fewest], EQUAL)
    rows, summaries, verdicts = [], {}, []
    for nodes, run in runs.items():
        equal_s, auto_s, ideal_s = settled_s(run, EQUAL), settled_s(run, AUTO), run.ideal_s[-1]
        published_s, published = PUBLISHED[nodes]
        by_side = {"equal": equal_s, "auto": auto_s, "ideal": ideal_s}
        speed_ups = {side: nodes / fewest * one_s / seconds for side, seconds in by_side.items()}
        rows.append(
            (
                str(nodes),
                str(GPUS * nodes),
                f"{published_s:.3f}",
                f"{published:.2f}",
                *[f"{1000 * seconds:.0f}" for seconds in by_side.values()],
                *[f"{speed_ups[side]:.2f}" for side in by_side],
                f"{speed_ups['auto'] / nodes:.2f}",
            )
        )
        summaries[str(nodes)] = {"step_s": by_side, "speed_up": speed_ups, "published": published}
        verdicts.append(Verdict(f"{nodes} node(s): auto / ideal", auto_s / ideal_s, TARGET_IDEAL, "x"))
    sides = ("equal", "auto", "ideal")
    return Report(
        name="hetseq_table" + (f"-{trained}" if trained else "") + ("-quick" if quick else ""),
        question="What does HetSeq's table become with shares by speed?",
        columns=(
            "nodes",
            "GPUs",
            "HetSeq, s/step",
            "HetSeq, speed-up",
            *[f"{side}, ms" for side in sides],
            *[f"{side}, speed-up" for side in sides],
            "auto, expansion",
        ),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=(
            f"a node's GPUs take {MIXED} times as long per sample: an assumption, none is published",
            f"{trained} is trained: ranks compute, and sleep for the rest of what their speed says"
            if trained
            else "computation sleeps; the exchange of a small model's gradients is real; HetSeq's network is not",
            "HetSeq's first row contradicts itself: its steps and seconds make 8.04 days, its column says 7.19",
        ),
        config=case_of(fewest, 0.0 + runs[fewest].case.ideal_s),
        summaries=summaries,
        samples={str(nodes): {"step_s": run.step_s, "ideal_s": run.ideal_s} for nodes, run in runs.items()},
        provenance=collect(GPUS * max(runs)),
        place={} if place is None else place.describe(),
    )


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw the speed-up over nodes from a stored report, beside the published one."""
    summaries = record["summaries"]
    nodes = [int(key) for key in summaries]
    lines = [linear_line(max(nodes))]
    drawn = (
        ("equal", "equal shares", BASELINE, "-"),
        ("auto", 'balance="auto"', OURS, "-"),
        ("ideal", "ideal shares", LIMIT, ":"),
    )
    for side, name, color, style in drawn:
        points = [(float(at), summaries[str(at)]["speed_up"][side]) for at in nodes]
        lines.append(Line(name, points, color, style))
    lines.append(Line.published("HetSeq, published", [(float(at), PUBLISHED[at][1]) for at in nodes]))
    ticks = {float(at): str(at) for at in nodes}
    panel = Lines("over one node with equal shares", "nodes of 4 mixed GPUs", "speed-up", lines, ticks)
    last = summaries[str(max(nodes))]["speed_up"]
    title = (
        f"{max(nodes)} nodes are {last['auto']:.1f} times as fast as one with shares by speed, and "
        f"{last['equal']:.1f} times with equal shares"
    )
    how = "train, and sleep for the rest of" if record["place"] else "sleep for"
    note = (
        f"Ranks {how} their computing: a node's GPUs take 1, 1, 1.5 and 2 times as long a sample (assumed)."
    )
    return draw_figure(path, title, [panel], note)


def main(
    most_nodes: Annotated[int, typer.Option(min=1, max=8, help="Largest number of nodes.")] = 8,
    steps: Annotated[int, typer.Option(min=24, help="Number of steps of each run.")] = 40,
    train_task: Annotated[
        str, typer.Option("--train", help="On emulated nodes: translation or masked.", show_default="none")
    ] = "",
    rate: Annotated[str, typer.Option(help="Rate of an emulated node's link.")] = "1Gbit",
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Measure every number of nodes."""
    if train_task not in ("", "translation", "masked"):
        raise ConfigurationError(f"--train {train_task} is neither translation nor masked.")
    runs = {}
    place: ClusterRanks | None = None
    for nodes in [1] if quick else [nodes for nodes in PUBLISHED if nodes <= most_nodes]:
        case = case_of(nodes, TRAINED_IDEAL_S if train_task else 0.4)
        if quick:
            case, steps = replace(case_of(nodes, 0.02), samples_per_rank=8), 24
        if not train_task:
            runs[nodes] = LoopbackRanks(len(case.slowness)).run(measure, (case, steps), f"{nodes} node(s)")[0]
            continue
        place = ClusterRanks(ClusterSpec.parse(hosts=nodes, ranks_per_host=GPUS, rate=rate))
        with place:
            runs[nodes] = place.run(train, Job(train_task, case, steps), f"{nodes} node(s)")[0]
    conclude(report(runs, quick, train_task, place), report_folder, as_json, draw)
