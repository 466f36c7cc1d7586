"""A job of `time_to_loss`, and what came of it: when its sides reached the loss, as a report and a figure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.planning import Speed, lower_bound_s
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.ranks import ClusterRanks
from paceline_lab.experiments.unequal.shares import Case
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, CURVE_COLORS, LIMIT, OURS
from paceline_lab.report.panels import Line, Lines, Panel
from paceline_lab.report.publication import Report, Verdict
from paceline_lab.report.summary import Summary, ratios

TORCH, HETSEQ, FIXED, AUTO, IDEAL = "torch", "HetSeq", "fixed", "auto", "ideal"
SIDES = (TORCH, HETSEQ, FIXED, AUTO)
LOOKS = {
    TORCH: (BASELINE, "-"),
    HETSEQ: (CURVE_COLORS[4], "--"),
    FIXED: (CURVE_COLORS[2], "--"),
    AUTO: (OURS, "-"),
}
SMOOTH_STEPS = 8
TARGET_IDEAL = 1.15  # of the whole time, the steps in which speeds are learnt included
TARGET_SETTLED, LEARNING_STEPS = 1.05, 20  # of a step after so many


@dataclass(frozen=True)
class Job:
    """One training, on one kind of cluster.

    Attributes:
        workload: `images` (a small CNN), `text` (a byte model whose sequences differ in length), `masked` (a BERT on
            bytes), `translation` (numbers to words). Or `bert`: gradients of BERT's shape, layers that sleep.
        case: Slowness of the hosts; one may get slower half-way.
        num_steps: Number of steps that are trained; the target has to lie within.
        quotas: Cores of each host; None: ranks sleep.
        seed: Seed of the parameters and the samples.
    """

    workload: str
    case: Case
    num_steps: int
    quotas: tuple[float, ...] | None = None
    seed: int = 0

    @property
    def title(self) -> str:
        """Return the title of all seeds."""
        return f"{self.workload} {self.case.name}"

    @property
    def name(self) -> str:
        return self.title + (f", seed {self.seed}" if self.seed else "")

    @property
    def learns(self) -> bool:
        """Return whether there is a loss that falls; else the part of the steps that is left takes its place."""
        return self.workload != "bert"


@dataclass(frozen=True)
class Outcome:
    """All sides of one job.

    Attributes:
        job: Job of the outcome.
        runs: Results of `train`, by side.
        target: The loss that all sides had to reach.
        ideal_s: Ideal end of each step.
    """

    job: Job
    runs: dict[str, dict[str, Any]]
    target: float
    ideal_s: list[float]

    @classmethod
    def of(cls, job: Job, runs: dict[str, dict[str, Any]]) -> "Outcome":
        """The target is what the worst side's loss falls to within 7/8 of the steps."""
        last = job.num_steps * 7 // 8
        target = max(min(smoothed(run["loss"])[:last]) for run in runs.values())
        ends, now_s = [], 0.0
        for step in range(job.num_steps):
            now_s += lower_bound_s(speeds_at(job, step, runs[TORCH]), job.case.size)
            ends.append(now_s)
        return cls(job, runs, target, ends)

    def reached_at(self, side: str) -> int:
        """The first step whose smoothed loss is the target."""
        losses = smoothed(self.runs[TORCH if side == IDEAL else side]["loss"])
        return next(step for step, loss in enumerate(losses) if loss <= self.target)

    def seconds(self, side: str) -> float:
        """Return when a side's loss had come down to the target."""
        ends = self.ideal_s if side == IDEAL else self.runs[side]["end_s"]
        return float(ends[self.reached_at(side)])

    def settled(self, side: str) -> float:
        """The median step over the ideal's; the second half of those after the first ones, or after a throttling."""
        first = max(LEARNING_STEPS, self.job.num_steps // 2)
        first = (first + self.job.num_steps) // 2 if self.job.case.throttled is not None else first
        first = min(first, self.job.num_steps * 3 // 4)
        pairs = zip(self.runs[side]["end_s"], self.ideal_s, strict=True)
        found = [(step, ideal) for step, ideal in pairs]
        steps = [
            (found[at][0] - found[at - 1][0]) / (found[at][1] - found[at - 1][1])
            for at in range(first, len(found))
        ]
        return Summary.of(steps).median

    def largest_difference(self) -> float:
        """Return the largest relative difference of the smoothed losses of torch and of automatic shares."""
        pairs = zip(smoothed(self.runs[TORCH]["loss"]), smoothed(self.runs[AUTO]["loss"]), strict=True)
        return max(abs(ours / theirs - 1) for theirs, ours in pairs)


def speeds_at(job: Job, step: int, equal: dict[str, Any]) -> list[Speed]:
    """Return how fast each rank is in a step: what it sleeps, or what its processor time is worth under its quota."""
    speeds = job.case.speeds()
    if job.quotas is not None:
        medians = [Summary.of(times).median for times in equal["processor_s"]]
        per_sample_s = [seconds / job.case.samples_per_rank for seconds in medians]
        speeds = [Speed(0.0, one_s / cores) for one_s, cores in zip(per_sample_s, job.quotas, strict=True)]
    if job.case.throttled is not None and step >= job.num_steps // 2:
        rank, factor = job.case.throttled
        speeds[rank] = speeds[rank].times(factor)
    return speeds


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of each step's loss and those before it."""
    return [
        sum(losses[max(0, step - SMOOTH_STEPS + 1) : step + 1]) / min(step + 1, SMOOTH_STEPS)
        for step in range(len(losses))
    ]


def report(outcomes: Sequence[Outcome], ranks: ClusterRanks, compute: str, quick: bool) -> Report:
    """A row for each job."""
    rows, verdicts, summaries = [], [], {}
    for title in dict.fromkeys(outcome.job.title for outcome in outcomes):
        seeds = [outcome for outcome in outcomes if outcome.job.title == title]
        summary = summaries[title] = _summary(seeds)
        seconds = summary["seconds"]
        rows.append(
            (
                title,
                f"{summary['target']:.3f}",
                *[f"{seconds[side]:.1f}" for side in seconds],
                f"{summary['gain']:.2f}",
                " ".join(map(str, seeds[0].runs[AUTO]["samples"])),
            )
        )
        verdicts.append(Verdict(f"{title}: auto / ideal", summary["auto_to_ideal"], TARGET_IDEAL, "x"))
        settled = summary["settled"][AUTO]
        verdicts.append(Verdict(f"{title}: auto / ideal, settled", settled, TARGET_SETTLED, "x"))
        verdicts.append(Verdict(f"{title}: auto / torch", 1 / summary["gain"], 1.0, "x"))
    worst = max(outcome.largest_difference() for outcome in outcomes)
    workloads = dict.fromkeys(outcome.job.workload for outcome in outcomes)
    which = f"-{1 + max(outcome.job.seed for outcome in outcomes)}seeds" if outcomes[-1].job.seed else ""
    which += "-throttled" if all(outcome.job.case.throttled is not None for outcome in outcomes) else ""
    how = {
        "timed": "ranks compute and sleep for the rest of what their speed says: they hardly compete for the cores",
        "quota": "hosts have CPU quotas; the ideal is processor time divided by the quota",
    }[compute]
    return Report(
        name=f"time_to_loss-{'-'.join(workloads)}-{compute}{which}" + ("-quick" if quick else ""),
        question="How long do unequal machines take to a given loss?",
        columns=(
            "training, slowness",
            "loss",
            *[f"{side}, s" for side in (*SIDES, IDEAL)],
            "torch / auto",
            "samples",
        ),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=(
            how,
            "HetSeq's weight is a constant that changes nothing; its table of nodes is row H6",
            f"smoothed losses of torch and auto differ by at most {worst:.2%}: the same samples in the same steps",
            "text counts tokens, torch's mean over ranks counts ranks; BERT's \"loss\" is the part of the steps left",
        ),
        config=[outcome.job for outcome in outcomes],
        summaries=summaries,
        samples={outcome.job.name: outcome.runs | {IDEAL: outcome.ideal_s} for outcome in outcomes},
        provenance=collect(ranks.num_ranks),
        place=ranks.describe(),
    )


def _summary(seeds: Sequence[Outcome]) -> dict[str, Any]:
    def median(values: Iterable[float]) -> float:
        return Summary.of(list(values)).median

    each = {side: [seed.seconds(side) for seed in seeds] for side in (*SIDES, IDEAL)}
    return {
        "target": median(seed.target for seed in seeds),
        "seconds": {side: median(values) for side, values in each.items()},
        "gain": median(ratios(each[TORCH], each[AUTO])),
        "auto_to_ideal": median(ratios(each[AUTO], each[IDEAL])),
        "settled": {side: median(seed.settled(side) for seed in seeds) for side in SIDES},
        "each": each,
    }


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw loss over time from a stored report, a panel a job."""
    panels: list[Panel] = []
    for job in record["summaries"]:  # of several seeds the first is shown
        runs = record["samples"][job]
        losses = {side: smoothed(runs[side]["loss"]) for side in SIDES}
        lines = [
            Line(side, list(zip(runs[side]["end_s"], losses[side], strict=True)), *look, "")
            for side, look in LOOKS.items()
        ]
        lines.append(Line(IDEAL, list(zip(runs[IDEAL], losses[TORCH], strict=True)), LIMIT, ":", ""))
        loss = "part of the steps left" if job.startswith("bert") else "training loss"
        panels.append(Lines(job, "seconds", loss, lines, bottom=None))
    gains = [summary["gain"] for summary in record["summaries"].values()]
    times = " to ".join(dict.fromkeys(f"{gain:.1f}" for gain in (min(gains), max(gains))))
    title = (
        f"With shares by speed, training reaches a loss {times} times as fast as with torch's equal shares"
    )
    return draw_figure(path, title, panels)
