"""Figures 6 to 8 of Li et al. (overlap, bucket size) again: the parts of a step under torch's DDP and Paceline's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline_lab.bench.limit import StepLimit
from paceline_lab.experiments.papers.cluster_study import (
    LIKE_NOTE,
    PAPERS_NOTE,
    Block,
    ClusterStudy,
    StudyOptions,
    VariantOutcome,
    case_name,
    emulated,
)
from paceline_lab.experiments.papers.published import (
    BREAKDOWN,
    BUCKET_CAPS,
    BUCKET_SECONDS,
    realisable,
    scale_for,
)
from paceline_lab.experiments.papers.variants import PAPERS_CAP_MB, Variant
from paceline_lab.experiments.runner import Findings
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, LIMIT, OURS, PAPER, look_of, workload_name
from paceline_lab.report.panels import Line, Lines, Stacks

PHASES, OVERLAPPING = ("forward", "backward", "communication", "optimizer"), "step with overlap"
# Side and bucket cap of the steps with overlap.
OVERLAPPED = {"torch": ("torch", None), "ours, 25 MB": ("ours", PAPERS_CAP_MB), "ours": ("ours", None)}


class OverlapStudy(ClusterStudy):
    """Four proportions of communication to computing; phases alone, and steps with overlap."""

    name = "overlap"
    figure = "Li et al. 2020, figure 6"
    defaults = StudyOptions(num_ranks=4, rate="100Mbit", compute_s=0.3, num_rounds=3)
    quick = StudyOptions(num_ranks=2, rate="100Mbit", compute_s=0.02, num_rounds=1, quick=True)

    def blocks(self, options: StudyOptions) -> tuple[Block, ...]:
        """Return one for each workload and backend of the figure; the proportion is the backend's."""
        settings = (("after", None), *OVERLAPPED.values())
        variants = tuple(Variant(side, options.num_ranks, cap_mb=cap) for side, cap in settings)
        blocks = []
        for (workload, backend), published in BREAKDOWN.items():
            profile = options.profile(workload)
            ratio = published.communication_to_compute
            scale = scale_for(profile, options.num_ranks, options.rate_bytes_per_s, ratio)
            blocks.append(Block(f"{workload}, {backend}-like", profile, scale, variants))
        return tuple(blocks)

    def find(self, outcomes: Sequence[VariantOutcome], options: StudyOptions) -> Findings:
        """Set shares of the step without overlap beside the published ones."""
        rows, summaries = [], {}
        found = zip(_by_block(outcomes).values(), BREAKDOWN.items(), strict=True)
        for block, ((workload, _), published) in found:
            limit = _limit(block["after"])
            total = limit.no_overlap_s
            steps = {side: block[side].step.median for side in OVERLAPPED}
            phases = (limit.forward_s, limit.backward_s, limit.communication_s, limit.optimizer_s)
            possible = realisable(
                options.profile(workload), limit.communication_s / (limit.forward_s + limit.backward_s)
            )
            shares = [phase / total for phase in phases]
            rows.append(
                (
                    block["after"].block,
                    f"{total * 1e3:.0f}",
                    " ".join(f"{share:.2f}" for share in shares),
                    *[
                        f"{1 - steps[side] / total:.1%} ({limit.realised(steps[side]):.2f})"
                        for side in OVERLAPPED
                    ],
                    f"{possible:.2f}",
                    f"{1 - published.overlapped:.1%} ({published.realised:.2f})",
                )
            )
            summaries[block["after"].block] = {
                "shares": shares,
                "overlapped": {side: steps[side] / total for side in OVERLAPPED},
                "realised": {side: limit.realised(steps[side]) for side in OVERLAPPED},
                "ideal": limit.ideal_s / total,
                "realisable": possible,
                "published": vars(published),
            }
        return Findings(
            "What does overlapping communication with backward save?",
            (
                "model, link",
                "no overlap ms",
                "fwd bwd comm opt",
                *[f"{side} saves" for side in OVERLAPPED],
                "possible",
                "paper saves",
            ),
            rows,
            (
                "in brackets: the share of the gain that perfect overlap would bring",
                "possible: what the order in which gradients get ready leaves of it, one after the other on the link",
                "torch and `ours, 25 MB` cut buckets as the paper; `ours` by its default for several hosts, 1 to 5 MB",
                "no overlap is one all-reduce of everything after backward: measured, not added up",
                (
                    "NCCL-like and Gloo-like are proportions of communication to computing, the paper's on 32 GPUs; "
                    "everything here is Gloo"
                ),
            ),
            summaries,
        )

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        """Stack the phases, and put the overlapped steps below them."""
        panels = []
        for label, found in record["summaries"].items():
            published = found["published"]
            bars = {
                "paper, no overlap": [(name, published[name]) for name in PHASES],
                "paper, torch": [(OVERLAPPING, published["overlapped"])],
                "no overlap": list(zip(PHASES, found["shares"], strict=True)),
                "torch": [(OVERLAPPING, found["overlapped"]["torch"])],
                "Paceline, 25 MB": [(OVERLAPPING, found["overlapped"]["ours, 25 MB"])],
                "Paceline": [(OVERLAPPING, found["overlapped"]["ours"])],
                "ideal overlap": [(OVERLAPPING, found["ideal"])],
            }
            colors = {
                "paper, torch": PAPER,
                "torch": BASELINE,
                "Paceline, 25 MB": look_of("ours-25").color,
                "Paceline": OURS,
                "ideal overlap": LIMIT,
            }
            panels.append(Stacks(case_name(label), "step / step without overlap", bars, colors))
        saved = [1 - step for found in record["summaries"].values() for step in found["overlapped"].values()]
        return draw_figure(
            path,
            f"Overlapping communication with backward saves {100 * min(saved):.0f} to {100 * max(saved):.0f} % of a "
            "step",
            panels,
            f"{emulated(record)}. {PAPERS_NOTE.format(number='6')} {LIKE_NOTE} By default Paceline's buckets are "
            "smaller than the 25 MB of the paper and of torch.",
        )


def _by_block(outcomes: Sequence[VariantOutcome]) -> dict[str, dict[str, VariantOutcome]]:
    names = {setting: name for name, setting in OVERLAPPED.items()}
    found: dict[str, dict[str, VariantOutcome]] = {}
    for outcome in outcomes:
        name = names.get((outcome.variant.side, outcome.variant.cap_mb), outcome.variant.side)
        found.setdefault(outcome.block, {})[name] = outcome
    return found


def _limit(after: VariantOutcome) -> StepLimit:
    return StepLimit(
        after.phase_s("forward_s"),
        after.phase_s("backward_s"),
        after.phase_s("communication_s"),
        after.phase_s("optimizer_s"),
    )


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

    def find(self, outcomes: Sequence[VariantOutcome], options: StudyOptions) -> Findings:
        """Set steps over the best cap's step beside the published ones."""
        rows, summaries = [], {}
        for workload in BUCKET_CAPS:
            found = {(x.variant.side, x.variant.cap_mb): x for x in outcomes if x.block == workload}
            caps = sorted({cap for _, cap in found if cap is not None})
            best_s = min(x.step.median for x in found.values())
            published = _relative_seconds(workload)
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
                *[f"paper {label}" for label in _relative_seconds("bert")],
            ),
            rows,
            ("paper: step over the best cap's step of the same backend and number of GPUs",),
            summaries,
        )

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        """One panel a model; caps are evenly spaced, as in the paper."""
        panels, apart, best_is_between = [], [], True
        for workload, found in record["summaries"].items():
            caps = [cap for cap, _ in found["ours"]]
            apart += [
                abs(ours - torch) for (_, ours), (_, torch) in zip(found["ours"], found["torch"], strict=True)
            ]
            for side in ("torch", "ours"):
                best = min(found[side], key=lambda point: point[1])
                best_is_between &= caps[0] < best[0] < caps[-1]
            published = [
                Line.published(f"paper, {label}", _placed(points, caps))
                for label, points in found["published"].items()
                if label.endswith("32")
            ]
            ours = [
                Line(look_of(side).name, _placed(found[side], caps), look_of(side).color)
                for side in ("torch", "ours")
            ]
            ticks = {float(i): f"{cap:g}" for i, cap in enumerate(caps)}
            label = "step / step of the best cap"
            panels.append(
                Lines(
                    workload_name(workload), "bucket cap, MB", label, [*published, *ours], ticks, bottom=None
                )
            )
        return draw_figure(
            path,
            "The best bucket cap is neither none nor the largest, for both wrappers"
            if best_is_between
            else record["question"],
            panels,
            f"{emulated(record)}. {PAPERS_NOTE.format(number='7 and 8, 32 GPUs')} Paceline and torch differ by at "
            f"most {max(apart):.2f}.",
            columns=1,
        )


def _relative_seconds(workload: str) -> dict[str, list[tuple[float, float]]]:
    caps = BUCKET_CAPS[workload]
    found = {}
    for (name, backend, num_gpus), seconds in BUCKET_SECONDS.items():
        if name == workload:
            relative = [second / min(seconds) for second in seconds]
            found[f"{backend} {num_gpus}"] = list(zip(caps, relative, strict=True))
    return found


def _placed(points: Sequence[tuple[float, float]], caps: Sequence[float]) -> list[tuple[float, float]]:
    return [(caps.index(cap), value) for cap, value in points if cap in caps]
