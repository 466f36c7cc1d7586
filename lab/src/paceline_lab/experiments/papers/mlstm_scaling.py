"""The mLSTM page's chart: speed-up over ranks for several model sizes, links and precisions.

All ranks of the largest number are hosts of one job per link; fewer ranks are the first of them. The study reduced
everything once after backward, in 16 bits: that is the variant its curves are compared with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigurationError
from paceline_lab.bench.layer_profile import Profile, default_profile
from paceline_lab.bench.limit import ring_bytes_per_rank
from paceline_lab.bench.timed_model import gradient_bytes
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder, compute_seconds
from paceline_lab.experiments.papers.cluster_study import (
    Block,
    Rounds,
    StudyConfig,
    StudyOptions,
    TimeStudy,
    VariantOutcome,
    emulated,
    how,
    record,
    run_blocks,
)
from paceline_lab.experiments.papers.published import (
    MLSTM_GPUS,
    MLSTM_SLOW_COMMUNICATION_TO_COMPUTE,
    MLSTM_SPEED_UP,
    scale_for,
)
from paceline_lab.experiments.papers.variants import Variant
from paceline_lab.experiments.runner import Findings, Measured, run_study
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import CURVE_COLORS, LIMIT, OURS, PAPER
from paceline_lab.report.panels import Line, Lines

if TYPE_CHECKING:
    from paceline_lab.emulation import ClusterSpec

METHODS = {"all-reduce after backward, 16 bits": ("after", True), "the same, 32 bits": ("after", False)} | {
    "Paceline, 16 bits": ("ours", True),
}
STUDYS_METHOD, SINGLE = list(METHODS)[:2]


_RANKS = "1,2,4,8,16"


@dataclass(frozen=True)
class ScalingOptions(StudyOptions):
    """The options of the scaling study's command line. `rate` is that of the fastest link.

    Attributes:
        workloads: Names of the workloads; the first one sets the scale.
        rates: Rates of the links, in proportion.
        counts: Numbers of ranks; 1 is always measured.
    """

    workloads: tuple[str, ...] = ("mlstm-4k", "mlstm-8k")
    rates: tuple[float, ...] = (10.0, 1.0)
    counts: tuple[int, ...] = (1, 2, 4, 8, 16)

    @classmethod
    def parse(cls, base: ScalingOptions, workloads: str, rates: str, ranks: str) -> ScalingOptions:
        """Read the lists of the command line.

        Raises:
            ConfigurationError: One of them can't be.
        """
        try:
            proportions = tuple(float(word) for word in rates.split(":"))
        except ValueError as error:
            raise ConfigurationError(f"--rates {rates!r} has to be like 10:1.") from error
        try:
            counts = tuple(sorted({1, *(int(word) for word in ranks.split(","))}))
        except ValueError as error:
            raise ConfigurationError(f"--ranks {ranks!r} has to be like 1,2,4,8,16.") from error
        if not all(0 < rate < float("inf") for rate in proportions) or len(set(proportions)) != len(
            proportions
        ):
            raise ConfigurationError(f"--rates {rates!r} has to hold different numbers above 0, like 10:1.")
        if counts[0] < 1:
            raise ConfigurationError(f"--ranks {ranks!r} has to hold numbers from 1 on, like 1,2,4,8,16.")
        names = tuple(word.strip() for word in workloads.split(","))
        for name in names:
            default_profile(name)
        return replace(base, workloads=names, rates=proportions, counts=counts, num_ranks=counts[-1])

    def link(self, proportion: float) -> ClusterSpec:
        """Return the cluster of one of the rates."""
        fastest = self.rate_bytes_per_s * 8
        bits_per_s = fastest * proportion / max(self.rates)
        return replace(self, rate=f"{bits_per_s / 1e3:.0f}kbit").cluster()

    def model(self, workload: str) -> Profile:
        """Return a model; the first takes `compute_s`, the others as much longer as published."""
        first, own = (default_profile(name) for name in (self.workloads[0], workload))
        return self.profile(workload, (own.forward_s + own.backward_s) / (first.forward_s + first.backward_s))

    def scale(self) -> float:
        """Return what all models' bytes are divided by: the first one on the slowest link is as published."""
        profile = self.model(self.workloads[0])
        slowest = self.rate_bytes_per_s * min(self.rates) / max(self.rates)
        half_bytes = gradient_bytes(profile) // 2
        return scale_for(profile, self.num_ranks, slowest, MLSTM_SLOW_COMMUNICATION_TO_COMPUTE, half_bytes)


class ScalingStudy(TimeStudy[ScalingOptions]):
    """One job a link."""

    name = "mlstm-scaling"
    figure = "Puri et al. 2018 and the sentiment-discovery page on scaling"
    defaults = ScalingOptions(num_ranks=16, rate="500Mbit", compute_s=0.25, num_rounds=1)
    quick = ScalingOptions(
        num_ranks=2,
        rate="500Mbit",
        compute_s=0.02,
        num_rounds=1,
        quick=True,
        counts=(1, 2),
        rates=(10.0, 1.0),
    )

    def measure(self, options: ScalingOptions) -> Measured:
        """Run all sizes, numbers of ranks and methods on each link."""
        found: list[tuple[str, VariantOutcome]] = []
        place: dict[str, str] = {}
        blocks = _blocks(options)
        for proportion in options.rates:
            label = link_label(proportion)
            spec = options.link(proportion)
            outcomes, place = run_blocks(spec, StudyConfig(blocks, options.num_rounds), f"{label} link")
            found += [(label, outcome) for outcome in outcomes]
        place["rate"] = ", ".join(
            f"{link_label(x)}: {dict(options.link(x).describe())['rate']}" for x in options.rates
        )
        samples = [{"link": label, **record(outcome)} for label, outcome in found]
        return Measured(found, {"outcomes": samples}, how(blocks), place, options.num_ranks)

    def find(self, outcomes: Sequence[Any], options: ScalingOptions) -> Findings:
        """Set efficiencies at the largest number of ranks beside the published ones."""
        rows: list[tuple[str, ...]] = []
        curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        sent: dict[str, list[tuple[int, float, float]]] = {}
        for proportion in options.rates:
            for workload in options.workloads:
                label = link_label(proportion)
                found = {
                    (x.variant.side, x.variant.half, x.variant.num_ranks): x
                    for link, x in outcomes
                    if link == label and x.block == workload
                }
                alone_s = found["none", False, 1].step.median
                for count in options.counts[1:]:
                    steps = {m: found[side, half, count] for m, (side, half) in METHODS.items()}
                    for method, outcome in steps.items():
                        curve = curves.setdefault(f"{workload}, {label}", {}).setdefault(method, [(1, 1.0)])
                        curve.append((count, count * alone_s / outcome.step.median))
                    both = [steps[m].sent_bytes_per_step for m in (STUDYS_METHOD, SINGLE)]
                    sent.setdefault(f"{workload}, {label}", []).append((count, *both))
                    rows.append(
                        (
                            label,
                            workload,
                            str(count),
                            *[_speed_up(curves[f"{workload}, {label}"][method][-1]) for method in METHODS],
                            f"{both[0] / 1e6:.2f} : {both[1] / 1e6:.2f} = {both[0] / both[1]:.2f}",
                        )
                    )
        notes = [
            "speed-up, in brackets efficiency; weak scaling: every rank computes as much as one alone",
            _published_note(),
            _published_costs_note(),
            *_claims(curves, options),
            *_costs(outcomes, options),
        ]
        return Findings(
            "How does training an mLSTM scale, by size, link and precision?",
            ("link", "model", "ranks", *METHODS, "MB sent a step, 16 : 32 bits"),
            rows,
            notes,
            {"speed_up": curves, "sent_bytes": sent, "published": {"gpus": MLSTM_GPUS, **MLSTM_SPEED_UP}},
        )

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        """The study's chart, ours of the same method, and what precision and overlap change on the slowest link."""
        curves, published = record["summaries"]["speed_up"], dict(record["summaries"]["published"])
        gpus = published.pop("gpus")
        rates = dict(words.split(": ") for words in record["place"]["rate"].split(", "))
        names = {}
        for label in curves:
            workload, link = label.split(", ")
            names[label] = f"{workload.removeprefix('mlstm-')}, {rates[link]}"
        paper = [
            Line.published(
                label, _efficiencies((x, y) for x, y in zip(gpus, ys, strict=True) if y is not None), color
            )
            for (label, ys), color in zip(published.items(), CURVE_COLORS, strict=False)
        ]
        ours = [
            Line(names[label], _efficiencies(curve[STUDYS_METHOD]), color)
            for (label, curve), color in zip(curves.items(), CURVE_COLORS, strict=False)
        ]
        slowest = list(curves)[-len({label.partition(",")[0] for label in curves})]
        colors = {STUDYS_METHOD: PAPER, SINGLE: LIMIT}
        methods = [
            Line(method, _efficiencies(points), colors.get(method, OURS))
            for method, points in curves[slowest].items()
        ]
        ticks = {float(x): str(x) for x, _ in next(iter(curves.values()))[STUDYS_METHOD]}
        most = max(ticks)
        panels = [
            _over_ranks("the study's chart", "GPUs", paper, {float(x): str(x) for x in gpus}),
            _over_ranks("the study's method on emulated hosts", "ranks", ours, ticks),
            _over_ranks(f"emulated hosts, {names[slowest]}", "ranks", methods, ticks),
        ]
        last = {names[label]: curve[STUDYS_METHOD][-1][1] / most for label, curve in curves.items()}
        best, worst = (choose(last, key=last.__getitem__) for choose in (max, min))
        return draw_figure(
            path,
            f"On {most:g} ranks an mLSTM reaches {100 * last[best]:.0f} % of linear speed-up at best ({best}) and "
            f"{100 * last[worst]:.0f} % at worst ({worst})",
            panels,
            f"{emulated(record)}. The links' rates stand 10 : 1 as the study's InfiniBand and Ethernet do; the "
            "study's method is an all-reduce after backward, in 16 bits.",
        )


def _over_ranks(title: str, x_label: str, lines: Sequence[Line], ticks: Mapping[float, str]) -> Lines:
    return Lines(title, x_label, "% of linear speed-up", lines, ticks, log_x=True, top=105.0)


def _efficiencies(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, 100 * y / x) for x, y in points]


def link_label(proportion: float) -> str:
    """Return the name of a link in the report."""
    return f"rate {proportion:g}"


def _blocks(options: ScalingOptions) -> tuple[Block, ...]:
    scale = options.scale()
    blocks = []
    for workload in options.workloads:
        profile = options.model(workload)
        for count in options.counts:
            settings = METHODS.values() if count > 1 else (("none", False),)
            variants = tuple(Variant(side, count, half=half) for side, half in settings)
            blocks.append(Block(workload, profile, scale, variants))
    return tuple(blocks)


def _speed_up(point: tuple[int, float]) -> str:
    count, speed_up = point
    return f"{speed_up:.2f} ({speed_up / count:.0%})"


def _published_note() -> str:
    last = ", ".join(
        f"{label} {ys[-1] / MLSTM_GPUS[-1]:.0%}" for label, ys in MLSTM_SPEED_UP.items() if ys[-1]
    )
    return f"the study's efficiency on {MLSTM_GPUS[-1]} GPUs: {last}"


def published_overheads_s() -> dict[str, float]:
    """Return the time per step beyond computing in the study's InfiniBand curves; "fixed" depends on no byte.

    Two models that differ in bytes by a known factor make two equations: overhead = fixed + bytes * rest.
    """
    profiles = {size: default_profile(f"mlstm-{size}") for size in ("4k", "8k")}
    overhead = {
        size: (profile.forward_s + profile.backward_s)
        * (MLSTM_GPUS[-1] / (MLSTM_SPEED_UP[f"{size}, InfiniBand"][-1] or 1) - 1)
        for size, profile in profiles.items()
    }
    factor = gradient_bytes(profiles["8k"]) / gradient_bytes(profiles["4k"])
    by_bytes = (overhead["8k"] - overhead["4k"]) / (factor - 1)
    return {**overhead, "fixed": overhead["4k"] - by_bytes}


def _published_costs_note() -> str:
    found = published_overheads_s()
    return (
        f"on InfiniBand the study lost {found['4k']:.2f} s a step (4k) and {found['8k']:.2f} s (8k, 4 x the bytes), "
        f"if a step computed as long as its training times say: {found['fixed']:.2f} s of it, whatever the size"
    )


def _costs(outcomes: Sequence[Any], options: ScalingOptions) -> list[str]:
    """Return notes on the cost of an all-reduce at the largest number of ranks: fixed and per byte (least squares)."""
    notes = []
    for proportion in options.rates:
        points = [
            (ring_bytes_per_rank(options.num_ranks, _reduced_bytes(x, options)), x.phase_s("communication_s"))
            for link, x in outcomes
            if link == link_label(proportion)
            and (x.variant.side, x.variant.num_ranks) == ("after", options.num_ranks)
        ]
        slope, fixed_s = statistics.linear_regression(*zip(*points, strict=True))
        link_bytes_per_s = options.rate_bytes_per_s * proportion / max(options.rates)
        rate_ratio = 1 / slope / link_bytes_per_s if slope > 0 else math.inf
        by_bytes = (
            f"its bytes go at {rate_ratio:.0%} of the link's rate"
            if rate_ratio <= 1.1
            else "its bytes cost next to nothing: the ranks' cores bound it, not the link"
        )
        notes.append(
            f"{link_label(proportion)}: an all-reduce among {options.num_ranks} ranks takes {fixed_s * 1e3:.0f} ms "
            f"whatever its size, and {by_bytes}"
        )
    return notes


def _reduced_bytes(outcome: VariantOutcome, options: ScalingOptions) -> int:
    num_bytes = gradient_bytes(options.model(outcome.block), options.scale())
    return num_bytes // 2 if outcome.variant.half else num_bytes


def _claims(curves: dict[str, Any], options: ScalingOptions) -> list[str]:
    """The study's two claims, decided by the study's own method at the largest number of ranks."""
    most = options.counts[-1]

    def efficiency(workload: str, proportion: float) -> float:
        return float(curves[f"{workload}, {link_label(proportion)}"][STUDYS_METHOD][-1][1] / most)

    def all_of(pairs: Sequence[tuple[float, float]]) -> str:
        words = ", ".join(f"{a:.1%} against {b:.1%}" for a, b in pairs)
        return f"{words}: {'yes' if all(a - b > 0.02 for a, b in pairs) else 'no, or less than 2 points'}"

    fast, slow = max(options.rates), min(options.rates)
    small, large = options.workloads[0], options.workloads[-1]
    return [
        f"faster links scale better ({', '.join(options.workloads)}; {most} ranks)? "
        + all_of([(efficiency(name, fast), efficiency(name, slow)) for name in options.workloads]),
        f"larger models scale better ({large} against {small}; each link)? "
        + all_of([(efficiency(large, rate), efficiency(small, rate)) for rate in options.rates]),
    ]


draw = ScalingStudy().draw


def main(
    workload: Annotated[
        str, typer.Option(help="Workloads, comma-separated. The first one sets the scale.")
    ] = "mlstm-4k,mlstm-8k",
    rates: Annotated[str, typer.Option(help="Rates of the links in proportion, for example 10:1.")] = "10:1",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = _RANKS,
    rate: Annotated[
        str | None,
        typer.Option(help="Rate of the fastest link, for example 500Mbit.", show_default="500Mbit"),
    ] = None,
    compute_s: Annotated[
        float | None,
        typer.Option(
            parser=compute_seconds,
            metavar="TIME",
            help="Time of forward and backward of the first workload: 0.5, 0.5s or 500ms.",
            show_default="0.25",
        ),
    ] = None,
    rounds: Rounds = None,
    quick: Quick = False,
    report_folder: ReportFolder = REPORT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Measure how training scales over ranks, by model size, link and precision: the mLSTM study's chart."""
    study = ScalingStudy()
    base = study.given(quick, {"rate": rate, "compute_s": compute_s, "num_rounds": rounds})
    options = ScalingOptions.parse(base, workload, rates, "1,2" if quick and ranks == _RANKS else ranks)
    run_study(study, options, report_folder, as_json)
