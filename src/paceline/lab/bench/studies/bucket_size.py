"""Figures 7 and 8: how long is a step, by how many bytes close a bucket?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.lab.bench.studies.calibration import scale_for
from paceline.lab.bench.studies.measure import Block, Outcome
from paceline.lab.bench.studies.published import BREAKDOWN, BUCKET_CAPS, BUCKET_SECONDS
from paceline.lab.bench.studies.study import ClusterStudy, Findings, StudyOptions
from paceline.lab.bench.studies.variant import Variant
from paceline.lab.report.figures import OTHER, PAPER, SIDE_COLORS, Line, Panel, draw_panels


class BucketSizeStudy(ClusterStudy):
    """Every cap of the figures, both wrappers, with NCCL's proportion of communication to computing."""

    name = "bucket-size"
    figure = "Li et al. 2020, figures 7 and 8"
    defaults = StudyOptions(num_ranks=4, rate="100Mbit", compute_s=0.3, num_rounds=2)
    quick = StudyOptions(num_ranks=2, rate="100Mbit", compute_s=0.02, num_rounds=1, quick=True)

    def blocks(self, options: StudyOptions) -> tuple[Block, ...]:
        """Return one a model."""
        blocks = []
        for workload, caps in BUCKET_CAPS.items():
            profile = options.profile(workload)
            ratio = BREAKDOWN[workload, "NCCL"].communication_to_compute
            scale = scale_for(profile, options.num_ranks, options.rate_bytes_per_s, ratio)
            chosen = caps[:: len(caps) - 1] if options.quick else caps
            variants = [
                Variant(side, options.num_ranks, cap_mb=cap) for cap in chosen for side in ("torch", "ours")
            ]
            defaults = [Variant(side, options.num_ranks) for side in ("torch", "ours")]
            blocks.append(Block(workload, profile, scale, (*variants, *defaults)))
        return tuple(blocks)

    def find(self, outcomes: Sequence[Outcome], options: StudyOptions) -> Findings:
        """Set steps over the best cap's step beside the published ones."""
        rows, summaries = [], {}
        for workload in BUCKET_CAPS:
            found = {(x.variant.side, x.variant.cap_mb): x for x in outcomes if x.block == workload}
            caps = sorted({cap for _, cap in found if cap is not None})
            best_s = min(x.step.median for x in found.values())
            published = _published(workload)
            for cap in caps:
                steps = [found[side, cap] for side in ("torch", "ours")]
                rows.append(
                    (
                        workload,
                        f"{cap:g}",
                        str(steps[0].num_buckets),
                        *[f"{x.step.median * 1e3:.0f}" for x in steps],
                        *[f"{x.step.median / best_s:.2f}" for x in steps],
                        *[f"{dict(points)[cap]:.2f}" for points in published.values()],
                    )
                )
            defaults = [found[side, None] for side in ("torch", "ours")]
            rows.append(
                (
                    workload,
                    "default",
                    "/".join(str(x.num_buckets) for x in defaults),
                    *[f"{x.step.median * 1e3:.0f}" for x in defaults],
                    *[f"{x.step.median / best_s:.2f}" for x in defaults],
                    *[""] * len(published),
                )
            )
            summaries[workload] = {
                side: [(cap, found[side, cap].step.median / best_s) for cap in caps]
                for side in ("torch", "ours")
            } | {
                "defaults": {x.variant.side: x.step.median / best_s for x in defaults},
                "published": published,
            }
        return Findings(
            "How long is a step, by bucket size?",
            (
                "model",
                "cap MB",
                "buckets",
                "torch ms",
                "ours ms",
                "torch / best",
                "ours / best",
                *[f"paper {label}" for label in _published("bert")],
            ),
            rows,
            ("paper: step over the best cap's step of the same backend and number of GPUs",),
            summaries,
        )

    def draw(self, findings: Findings, path: Path) -> None:
        """One panel a model; caps are evenly spaced, as in the paper."""
        panels = []
        for workload, found in findings.summaries.items():
            caps = [cap for cap, _ in found["ours"]]
            published = [
                Line(
                    f"paper, {label}", _placed(points, caps), PAPER if "NCCL" in label else OTHER, style, "x"
                )
                for (label, points), style in zip(
                    found["published"].items(), ("--", "--", ":", ":"), strict=True
                )
            ]
            ours = [
                Line(f"here, {side}", _placed(found[side], caps), SIDE_COLORS[side])
                for side in ("torch", "ours")
            ]
            panels.append(
                Panel(
                    workload,
                    "bucket cap, MB",
                    "step / step of the best cap",
                    [*published, *ours],
                    ticks=tuple(range(len(caps))),
                    tick_labels=[f"{cap:g}" for cap in caps],
                    linear_x=True,
                    from_zero=False,
                )
            )
        draw_panels(path, "A step by bucket size (figures 7 and 8), timed compute on emulated hosts", panels)


def _published(workload: str) -> dict[str, list[tuple[float, float]]]:
    caps = BUCKET_CAPS[workload]
    found = {}
    for (name, backend, num_gpus), seconds in BUCKET_SECONDS.items():
        if name == workload:
            relative = [second / min(seconds) for second in seconds]
            found[f"{backend} {num_gpus}"] = list(zip(caps, relative, strict=True))
    return found


def _placed(points: Sequence[tuple[float, float]], caps: Sequence[float]) -> list[tuple[float, float]]:
    return [(caps.index(cap), value) for cap, value in points if cap in caps]
