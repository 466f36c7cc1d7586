"""Figure 6: where does a step's time go, and what does overlapping communication with backward save?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.lab.bench.limit import StepLimit
from paceline.lab.bench.studies.calibration import realisable, scale_for
from paceline.lab.bench.studies.measure import Block, Outcome
from paceline.lab.bench.studies.published import BREAKDOWN, Breakdown
from paceline.lab.bench.studies.study import ClusterStudy, Findings, StudyOptions
from paceline.lab.bench.studies.variant import PAPERS_CAP_MB, Variant
from paceline.lab.report.figures import Bars, draw_bars

PARTS = ("forward", "backward", "communication", "optimizer", "step with overlap")
SIDES = {
    "torch": ("torch", None),
    "ours, 25 MB": ("ours", PAPERS_CAP_MB),
    "ours": ("ours", None),
}  # and the cap


class OverlapStudy(ClusterStudy):
    """Four proportions of communication to computing; phases alone, and steps with overlap."""

    name = "overlap"
    figure = "Li et al. 2020, figure 6"
    defaults = StudyOptions(num_ranks=4, rate="100Mbit", compute_s=0.3, num_rounds=3)
    quick = StudyOptions(num_ranks=2, rate="100Mbit", compute_s=0.02, num_rounds=1, quick=True)

    def blocks(self, options: StudyOptions) -> tuple[Block, ...]:
        """Return one for each workload and backend of the figure; the proportion is the backend's."""
        settings = (("after", None), *SIDES.values())
        variants = tuple(Variant(side, options.num_ranks, cap_mb=cap) for side, cap in settings)
        blocks = []
        for (workload, backend), published in BREAKDOWN.items():
            profile = options.profile(workload)
            ratio = published.communication_to_compute
            scale = scale_for(profile, options.num_ranks, options.rate_bytes_per_s, ratio)
            blocks.append(Block(f"{workload}, {backend}-like", profile, scale, variants))
        return tuple(blocks)

    def find(self, outcomes: Sequence[Outcome], options: StudyOptions) -> Findings:
        """Set shares of the step without overlap beside the published ones."""
        rows, summaries = [], {}
        found = zip(_by_block(outcomes).values(), BREAKDOWN.items(), strict=True)
        for block, ((workload, _), published) in found:
            limit = _limit(block["after"])
            total = limit.no_overlap_s
            steps = {side: block[side].step.median for side in SIDES}
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
                    *[f"{1 - steps[side] / total:.1%} ({limit.realised(steps[side]):.2f})" for side in SIDES],
                    f"{possible:.2f}",
                    f"{_gain(published):.1%} ({published.realised:.2f})",
                )
            )
            summaries[block["after"].block] = {
                "shares": shares,
                "overlapped": {side: steps[side] / total for side in SIDES},
                "realised": {side: limit.realised(steps[side]) for side in SIDES},
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
                *[f"{side} saves" for side in SIDES],
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

    def draw(self, findings: Findings, path: Path) -> None:
        """Stack the phases, and put the overlapped steps beside them."""
        panels = []
        for label, found in findings.summaries.items():
            published = found["published"]
            stacked = [published[name] for name in PARTS[:4]]
            bars = {
                "paper, no overlap": [*stacked, 0.0],
                "paper, torch DDP": [0.0] * 4 + [published["overlapped"]],
                "here, no overlap": [*found["shares"], 0.0],
                "here, torch DDP": [0.0] * 4 + [found["overlapped"]["torch"]],
                "here, ours, 25 MB": [0.0] * 4 + [found["overlapped"]["ours, 25 MB"]],
                "here, ours": [0.0] * 4 + [found["overlapped"]["ours"]],
                "here, ideal": [0.0] * 4 + [found["ideal"]],
            }
            panels.append(Bars(label, "share of the step without overlap", PARTS, bars))
        draw_bars(
            path, "A step's time with and without overlap (figure 6), timed compute on emulated hosts", panels
        )


def _by_block(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Outcome]]:
    names = {setting: name for name, setting in SIDES.items()}
    found: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        name = names.get((outcome.variant.side, outcome.variant.cap_mb), outcome.variant.side)
        found.setdefault(outcome.block, {})[name] = outcome
    return found


def _limit(after: Outcome) -> StepLimit:
    return StepLimit(
        after.phase_s("forward_s"),
        after.phase_s("backward_s"),
        after.phase_s("communication_s"),
        after.phase_s("optimizer_s"),
    )


def _gain(published: Breakdown) -> float:
    return 1 - published.overlapped
