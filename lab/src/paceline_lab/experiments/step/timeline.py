"""Record a rank's computation and its link's traffic in two consecutive steps.

The sides of `forward_overlap` are trained in the same way, then for one more turn each. There rank 0 notes every
layer's forward and backward, the optimizer's step, and each bucket from its launch until it has arrived. Torch's
buckets are noted by a communication hook that does what torch does without one: it divides, and reduces.

Two consecutive steps are drawn, because forward overlap needs the next forward: those of the turn that are nearest to
its median step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from paceline_lab.bench.layer_profile import default_profile
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import gather
from paceline_lab.bench.sides import digest
from paceline_lab.bench.timed_model import TimedModel
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    ComputeS,
    Hosts,
    Quick,
    Rate,
    ReportFolder,
    Sides,
)
from paceline_lab.experiments.runner import cluster_or_loopback, conclude, refuse_unequal
from paceline_lab.experiments.step.forward_overlap_sides import (
    Config,
    ProportionalSleep,
    Trainee,
    UnevenStopwatch,
    UnevenWorkload,
    parse_names,
)
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.look import look_of, workload_name
from paceline_lab.report.panels import Lanes
from paceline_lab.report.publication import Report

NUM_STEPS, NUM_SHOWN = 10, 2  # of the turn that is noted
_GAP_S = 1e-3  # spans of one kind that are nearer than this are one


@dataclass
class Spans:
    """The spans of this rank's work, on the clock of `time.perf_counter`."""

    phase: str = "forward"  # of the sleeps to come
    begun_s: list[float] = field(default_factory=list)  # each step
    computed: list[tuple[str, float, float]] = field(default_factory=list)
    sent: list[tuple[float, float]] = field(default_factory=list)  # launched, arrived

    def note(self, what: str, since_s: float) -> None:
        """Something has ended just now."""
        self.computed.append((what, since_s, time.perf_counter()))

    def clear(self) -> None:
        """Begin anew."""
        self.begun_s, self.computed, self.sent = [], [], []


class NotingStopwatch(UnevenStopwatch):
    """Notes its sleeps."""

    def __init__(self, spans: Spans) -> None:
        super().__init__(1.0, 0.0, 0)
        self._spans = spans

    def spend(self, length_s: float) -> None:
        since_s = time.perf_counter()
        super().spend(length_s)
        self._spans.note(self._spans.phase, since_s)


class NotingSleep(ProportionalSleep):
    """Notes its steps: of all parameters, or of a bucket's."""

    def __init__(self, parameters: Iterable[nn.Parameter], step_s: float, spans: Spans) -> None:
        super().__init__(parameters, step_s)
        self._spans = spans

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        since_s = time.perf_counter()
        super().step(closure)
        self._spans.note("optimizer", since_s)


@dataclass(frozen=True)
class NotingWorkload(UnevenWorkload):
    """A profile as a workload that notes what it does."""

    spans: Spans = field(default_factory=Spans)

    def make_model(self) -> TimedModel:
        """Return the model."""
        return TimedModel(self.profile, self.rank, self.scale, NotingStopwatch(self.spans))

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> NotingSleep:  # type: ignore[override]
        """Return what takes as long as an optimizer."""
        return NotingSleep(parameters, self.profile.optimizer_s, self.spans)

    def loss(self, model: nn.Module, batch: Tensor, carry: None) -> tuple[Tensor, None]:
        """Pass all layers."""
        self.spans.begun_s.append(time.perf_counter())
        self.spans.phase = "forward"
        result = super().loss(model, batch, carry)
        self.spans.phase = "backward"
        return result


@dataclass(frozen=True)
class NotingConfig(Config):
    """The settings of a measurement; every rank notes what it does."""

    def make(self, rank: int) -> NotingWorkload:
        """Return the workload of one rank."""
        assert self.profile is not None
        return NotingWorkload(self.profile, rank, self.scale)


def _reduce_and_note(spans: Spans, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket as torch does without a hook, and note when."""
    launched_s = time.perf_counter()
    work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)

    def arrived(future: torch.futures.Future[Any]) -> Tensor:
        spans.sent.append((launched_s, time.perf_counter()))
        value: Tensor = future.value()[0]
        return value

    noted: torch.futures.Future[Tensor] = work.get_future().then(arrived)
    return noted


_reduce_and_note.__annotations__["bucket"] = dist.GradBucket  # torch looks, and takes no text
_reduce_and_note.__annotations__["return"] = torch.futures.Future[Tensor]


def measure(config: NotingConfig, tell: TellProgress) -> dict[str, Spans]:
    """Train the sides one after another; return what this rank did. Collective."""
    found = {}
    for place, name in enumerate(config.side_names):
        trainee = Trainee(name, config)
        spans = trainee.workload.spans  # type: ignore[attr-defined]
        model: Any = trainee.parallel.model
        if name == "torch":
            model.register_comm_hook(spans, _reduce_and_note)
        trainee.warm_up()
        spans.clear()
        trainee.turn(NUM_STEPS)
        if name != "torch":
            steps = model.timings.recent(NUM_STEPS)
            spans.sent = [(b.launched_s, b.done_s) for step in steps for b in step.buckets if b.size_bytes]
        answers = set(gather(digest(trainee.answer())))
        refuse_unequal([name] * (len(answers) > 1))
        found[name] = spans
        tell((place + 1) / len(config.side_names))
    return found


def joined(spans: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Join spans of one kind that follow each other without a gap."""
    found: list[tuple[str, float, float]] = []
    for what, began, ended in spans:
        if found and found[-1][0] == what and began - found[-1][2] < _GAP_S:
            found[-1] = (what, found[-1][1], ended)
        else:
            found.append((what, began, ended))
    return found


def busy(sent: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return when each bucket had the link: from its launch, or from when the one before it had arrived."""
    found, free_s = [], float("-inf")
    for launched_s, arrived_s in sorted(sent, key=lambda span: span[1]):
        found.append((max(launched_s, free_s), arrived_s))
        free_s = arrived_s
    return found


def report(config: NotingConfig, found: Mapping[str, Spans], place: Any) -> Report:
    """One row a side: a step, and the part of communication that computing hides."""
    samples, rows = {}, []
    for name, spans in found.items():
        zero_s = spans.begun_s[0]
        begun = [begun_s - zero_s for begun_s in spans.begun_s]
        step_s = median(after - before for before, after in itertools.pairwise(begun[1:]))
        samples[name] = {
            "begun_s": begun,
            "computed": [(what, a - zero_s, b - zero_s) for what, a, b in joined(spans.computed)],
            "sent": [(a - zero_s, b - zero_s) for a, b in busy(spans.sent)],
            "step_s": step_s,
        }
        rows.append((name, f"{1e3 * step_s:.0f}", str(len(spans.sent) // NUM_STEPS)))
    assert config.profile is not None
    compute_s = config.profile.forward_s + config.profile.backward_s
    size = f"{config.num_bytes / 1e6:.1f} MB of gradients and their traffic are real"
    notes = (
        f"Layers sleep {compute_s * 1e3:.0f} ms per step; {size}",
        "One rank's two typical steps. A bucket's bar begins when it is sent, or when the one before it has arrived",
    )
    return Report(
        name=f"timeline-{config.workload}-{place.label}",
        question="What does a rank compute, and what is on its link meanwhile?",
        columns=("side", "step ms", "buckets"),
        rows=tuple(rows),
        verdicts=(),
        notes=notes,
        config=config,
        summaries={name: {"step_s": sample["step_s"]} for name, sample in samples.items()},
        samples=samples,
        provenance=collect(place.num_ranks),
        place=place.describe(),
    )


def main(
    workload: Annotated[str, typer.Option(help="Workload whose layers sleep.")] = "resnet50",
    sides: Sides = "torch,ours,ours-forward",
    hosts: Hosts = 4,
    rate: Rate = "1Gbit",
    compute_s: ComputeS = 0.9,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Note what a rank does in some steps, and draw it."""
    scale = 1.0
    if quick:
        hosts, compute_s, scale = 0, 0.05, 64.0
    profile = default_profile(workload).taking(compute_s)
    config = NotingConfig(workload, profile, parse_names(sides), 1, NUM_STEPS, scale, is_forced=quick)
    place = cluster_or_loopback(hosts, rate)
    with place as where:
        found = where.run(measure, config, f"timeline, {workload}", ENVIRONMENTS[Allocator.KEEP])[0]
    conclude(report(config, found, place), report_folder, as_json, draw)


def typical(begun_s: Sequence[float], step_s: float) -> int:
    """Return where the steps begin that together are nearest to as many typical ones; never a turn's first."""
    places = range(1, len(begun_s) - NUM_SHOWN)
    return min(places, key=lambda i: abs(begun_s[i + NUM_SHOWN] - begun_s[i] - NUM_SHOWN * step_s))


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw what each side did, from a stored report; all sides over the same stretch of time."""
    samples = record["samples"]
    first, *_, last = samples
    until_ms = 1e3 * NUM_SHOWN * max(sample["step_s"] for sample in samples.values())
    panels = []
    for name, sample in samples.items():
        shown = typical(sample["begun_s"], sample["step_s"])
        since_s = sample["begun_s"][shown]
        panels.append(
            Lanes(
                f"{look_of(name).name}: {1e3 * sample['step_s']:,.0f} ms per step",
                "ms" if name == last else "",
                {
                    "computes": _shown(sample["computed"], since_s, until_ms),
                    "link": _shown([("communication", *span) for span in sample["sent"]], since_s, until_ms),
                },
                {
                    lane: [(1e3 * (begun - since_s), "") for begun in sample["begun_s"][shown + 1 :]]
                    for lane in ("computes", "link")
                },
                until_ms,
            )
        )
    ratio = samples[last]["step_s"] / samples[first]["step_s"]
    name = workload_name(record["config"]["workload"])
    whose = f"{look_of(first).name}'s"
    title = f"With {look_of(last).option} a step is {show_ratio(ratio, whose)}"
    place = record["place"]
    hosts = place["hosts x ranks"].partition(" ")[0] if "hosts x ranks" in place else "no"
    where = f"{hosts} emulated hosts behind {place.get('rate', 'no')} links"
    return draw_figure(path, title, panels, f"{name}, {where}. {'. '.join(record['notes'])}.", columns=1)


def _shown(spans: Sequence[Sequence[Any]], since_s: float, until_ms: float) -> list[tuple[str, float, float]]:
    """The part of spans that lies in the picture, in ms."""
    found = [
        (what, max(0.0, 1e3 * (a - since_s)), min(until_ms, 1e3 * (b - since_s))) for what, a, b in spans
    ]
    return [(what, begin, end) for what, begin, end in found if begin < end]
