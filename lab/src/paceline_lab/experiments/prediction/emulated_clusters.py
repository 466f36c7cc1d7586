"""Measure how well the simulator predicts emulated clusters: fitted on three of them, it predicts the others.

It is fitted on 2, 4 and 16 equal hosts. From few ranks alone, a message's processor time cannot be told from a round's
latency. It predicts 8 equal hosts, a rank that computes half as fast, a link at a quarter of the rate, a delay, and
losses. Each cluster is alone on the machine while it is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline_lab.experiments.papers.cluster_study import (
    Block,
    StudyConfig,
    StudyOptions,
    TimeStudy,
    how,
    run_blocks,
)
from paceline_lab.experiments.papers.published import BREAKDOWN, scale_for
from paceline_lab.experiments.papers.variants import PAPERS_CAP_MB, Variant
from paceline_lab.experiments.prediction.predicted_runs import Errors, Run, fit, run_of, samples, summary
from paceline_lab.experiments.runner import Findings, Measured
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import OURS
from paceline_lab.report.panels import Dots
from paceline_plan import HostLink

if TYPE_CHECKING:
    from paceline_lab.emulation import ClusterSpec

FITTED = "fitted on"
_CAPS_MB = (5.0, PAPERS_CAP_MB, 1e6)  # the last: one bucket


@dataclass(frozen=True)
class _Place:
    num_ranks: int
    is_fitted: bool = False
    slow_link: float = 1.0
    delay: str | None = None
    loss: str | None = None
    slow_rank: float = 1.0

    def label(self) -> str:
        words = [f"{self.num_ranks} hosts"]
        words += [f"one link 1/{1 / self.slow_link:g} of the rate"] if self.slow_link != 1 else []
        words += [f"delay {self.delay}"] if self.delay else []
        words += [f"loss {self.loss}"] if self.loss else []
        words += [f"one rank {self.slow_rank:g} times slower"] if self.slow_rank != 1 else []
        return ", ".join(words)


_PLACES = (
    _Place(2, is_fitted=True),
    _Place(4, is_fitted=True),
    _Place(8),
    _Place(16, is_fitted=True),
    _Place(4, slow_link=0.25),
    _Place(4, slow_rank=2.0),
    _Place(4, delay="1ms"),
    _Place(4, loss="0.1%"),
    _Place(8, slow_link=0.5, slow_rank=1.5),
)
_QUICK_PLACES = (_Place(2, is_fitted=True), _Place(2, slow_link=0.5, slow_rank=1.5))


class PredictionStudy(TimeStudy[StudyOptions]):
    """Several clusters, one after another."""

    name = "prediction"
    figure = ""
    defaults = StudyOptions(num_ranks=16, rate="100Mbit", compute_s=0.3, num_rounds=2)
    quick = StudyOptions(num_ranks=2, rate="100Mbit", compute_s=0.02, num_rounds=1, quick=True)

    def measure(self, options: StudyOptions) -> Measured:
        """Run every cluster that has at most as many ranks as the options say."""
        runs: list[tuple[_Place, Run]] = []
        blocks: tuple[Block, ...] = ()
        where: dict[str, str] = {}
        for place in _QUICK_PLACES if options.quick else _PLACES:
            if place.num_ranks > options.num_ranks:
                continue
            spec, links = _cluster(place, options)
            blocks = _blocks(place, options)
            outcomes, where = run_blocks(
                spec, StudyConfig(blocks, options.num_rounds), f"{self.name}: {place.label()}"
            )
            block_of = {block.label: block for block in blocks}
            for outcome in outcomes:
                block = block_of[outcome.block]
                run = run_of(
                    place.label(), outcome.variant, block.profile, block.scale, links, outcome.steps_s
                )
                runs.append((place, run))
        notes = (*how(blocks), "one cluster at a time, each alone on the machine")
        return Measured(runs, {}, notes, where, options.num_ranks)

    def find(self, outcomes: Sequence[tuple[_Place, Run]], options: StudyOptions) -> Findings:
        """Fit on some clusters, predict all."""
        fitted = fit([run for place, run in outcomes if place.is_fitted])
        by_place: dict[_Place, list[Run]] = {}
        for place, run in outcomes:
            by_place.setdefault(place, []).append(run)
        errors = [Errors.of(place.label(), runs, fitted) for place, runs in by_place.items()]
        predicted = [run for place, run in outcomes if not place.is_fitted]
        total = Errors.of("all predicted", predicted, fitted)
        rows = [
            (
                x.label,
                FITTED if place is not None and place.is_fitted else "predicted",
                str(x.num),
                f"{x.median_ratio:.1%}",
                f"{x.worst_ratio:+.1%}",
                x.worst,
            )
            for x, place in zip((*errors, total), (*by_place, None), strict=True)
        ]
        cost = fitted.emulation
        return Findings(
            "How well does the simulator predict steps on emulated clusters?",
            ("cluster", "", "runs", "median error", "worst", "which"),
            rows,
            (
                (
                    f"fitted: {fitted.goodput:.1%} of a link's rate, {fitted.latency_s * 1e6:.0f} us a round; "
                    f"emulation, of {cost.cores} cores: {cost.collective_s * 1e3:.2f} ms a collective and rank, "
                    f"{cost.message_s * 1e6:.0f} us a message, {cost.s_per_byte * 1e9:.2f} ns a byte, "
                    f"{cost.layer_s * 1e6:.0f} us a layer"
                ),
                "error: predicted over measured median, less 1; predictions contain what emulation costs",
                (
                    "not in the model: a delay is made by a process a link where the kernel has no netem, and with "
                    "losses every packet crosses the links alone; both take cores that equal hosts do not show"
                ),
            ),
            {**summary(fitted, (*errors, total)), "runs": samples([run for _, run in outcomes], fitted)},
        )

    def draw(self, record: Mapping[str, Any], path: Path) -> None:
        """Predicted over measured, one mark a run."""
        fitted = {row[0] for row in record["rows"] if row[1] == FITTED}
        runs = [run for run in record["summaries"]["runs"] if run["label"] not in fitted]
        draw_ratios(runs, path)


def draw_ratios(runs: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw predicted over measured steps, with and without what emulation costs; returns whether it was drawn.

    `runs` are predictions only: those that the simulator was fitted on say nothing about it.
    """
    panels = [
        _ratios("predicted with what emulation costs, over measured", runs, "predicted_s"),
        _ratios("predicted for the network alone, over measured", runs, "without_emulation_s"),
    ]
    title = (
        f"Half of {len(runs)} predicted steps are within {_middle_error(runs, 'predicted_s'):.1f} %; "
        f"within {_middle_error(runs, 'without_emulation_s'):.1f} % without the cost of emulation"
    )
    note = "Emulated clusters, layers sleep. A dot is a run. Fitted runs are left out."
    return draw_figure(path, title, panels, note, columns=1)


def _middle_error(runs: Sequence[Mapping[str, Any]], key: str) -> float:
    return 100 * median(abs(float(run[key]) / float(run["measured_s"]) - 1) for run in runs)


def _ratios(x_label: str, runs: Sequence[Mapping[str, Any]], key: str) -> Dots:
    by_label: dict[str, list[float]] = {}
    for run in runs:
        by_label.setdefault(run["label"], []).append(run[key] / run["measured_s"])
    most = max(map(len, by_label.values()))
    columns = [[found[i] if i < len(found) else None for found in by_label.values()] for i in range(most)]
    ticks = {0.5: "0.5", 0.6: "0.6", 0.8: "0.8", 1.0: "1", 1.25: "1.25"}
    sides = [("", OURS, column) for column in columns]  # the figure's note says what a dot is
    return Dots("", x_label, list(by_label), sides, ticks, ("equal", 1.0))


def _cluster(place: _Place, options: StudyOptions) -> tuple[ClusterSpec, list[HostLink]]:
    from paceline_lab.emulation import ClusterSpec  # not for --help

    bits_per_s = [options.rate_bytes_per_s * 8] * place.num_ranks
    bits_per_s[-1] *= place.slow_link
    lossy = place.loss is not None
    spec = ClusterSpec.parse(
        hosts=place.num_ranks,
        rate=",".join(f"{rate / 1e3:.0f}kbit" for rate in bits_per_s),
        offload=not lossy,
        queue="1MiB",
        delay=place.delay,
        loss=place.loss,
    )
    links = [HostLink(rate / 8, spec.delay_s, spec.loss_ratio[0]) for rate in bits_per_s]
    return spec, links


def _blocks(place: _Place, options: StudyOptions) -> tuple[Block, ...]:
    blocks = []
    caps = _CAPS_MB[1:2] if options.quick else _CAPS_MB
    for workload in ("resnet50",) if options.quick else ("resnet50", "bert"):
        profile = options.profile(workload)
        ratio = BREAKDOWN[workload, "NCCL"].communication_to_compute
        scale = scale_for(profile, 4, options.rate_bytes_per_s, ratio)
        variants = [
            Variant(side, place.num_ranks, cap_mb=cap, first_rank_slowness=place.slow_rank)
            for cap in caps
            for side in ("torch", "ours")
        ]
        variants.append(replace(variants[0], side="after", cap_mb=None, half=True))
        blocks.append(Block(workload, profile, scale, tuple(variants)))
    return tuple(blocks)
