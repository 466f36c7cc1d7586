"""Figure 12: do several process groups that take buckets in turn help, and why?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.lab.bench.studies.calibration import scale_for
from paceline.lab.bench.studies.measure import Block, Outcome
from paceline.lab.bench.studies.published import BREAKDOWN, GROUP_SECONDS, GROUPS
from paceline.lab.bench.studies.study import ClusterStudy, Findings, StudyOptions
from paceline.lab.bench.studies.variant import PAPERS_CAP_MB, Variant
from paceline.lab.report.figures import OTHER, PAPER, SIDE_COLORS, Line, Panel, draw_panels

FLOWS_A_LINK = 3  # with the cap, a connection gets this part of the link
_CONDITIONS = {"no cap": None, f"a flow gets 1/{FLOWS_A_LINK} of the link": FLOWS_A_LINK}


class RoundRobinStudy(ClusterStudy):
    """1, 3 and 5 groups; links that one connection fills, and links that it can't."""

    name = "round-robin"
    figure = "Li et al. 2020, figure 12"
    defaults = StudyOptions(num_ranks=4, rate="100Mbit", compute_s=0.3, num_rounds=2)
    quick = StudyOptions(num_ranks=2, rate="100Mbit", compute_s=0.02, num_rounds=1, quick=True)

    def blocks(self, options: StudyOptions) -> tuple[Block, ...]:
        """Return one: all variants take turns."""
        profile = options.profile("bert")
        ratio = BREAKDOWN["bert", "NCCL"].communication_to_compute
        scale = scale_for(profile, options.num_ranks, options.rate_bytes_per_s, ratio)
        groups = GROUPS[:2] if options.quick else GROUPS
        variants = [
            Variant(
                side,
                options.num_ranks,
                cap_mb=PAPERS_CAP_MB,
                num_groups=number,
                flow_bytes_per_s=None if divisor is None else options.rate_bytes_per_s / divisor,
            )
            for divisor in _CONDITIONS.values()
            for number in groups
            for side in ("torch", "ours")
        ]
        return (Block("bert", profile, scale, tuple(variants)),)

    def find(self, outcomes: Sequence[Outcome], options: StudyOptions) -> Findings:
        """Set steps over the step of one group beside the published ones."""
        rows, summaries = [], {}
        for condition, divisor in _CONDITIONS.items():
            found = {
                (x.variant.side, x.variant.num_groups): x
                for x in outcomes
                if (x.variant.flow_bytes_per_s is None) == (divisor is None)
            }
            numbers = sorted({number for _, number in found})
            relative = {
                side: [found[side, number].step.median / found[side, 1].step.median for number in numbers]
                for side in ("torch", "ours")
            }
            for i, number in enumerate(numbers):
                rows.append(
                    (
                        condition,
                        str(number),
                        *[found[side, number].step.text(1e3, 0) for side in ("torch", "ours")],
                        *[f"{relative[side][i]:.2f}" for side in ("torch", "ours")],
                        *[f"{seconds[i] / seconds[0]:.2f}" for seconds in _published().values()],
                    )
                )
            summaries[condition] = {"groups": numbers, **relative}
        summaries["published"] = {
            key: [s / seconds[0] for s in seconds] for key, seconds in _published().items()
        }
        return Findings(
            "Do several process groups that take buckets in turn help?",
            (
                "link",
                "groups",
                "torch ms",
                "ours ms",
                "torch / 1",
                "ours / 1",
                *[f"paper {x}" for x in _published()],
            ),
            rows,
            (
                "the cap is on each TCP connection (SO_MAX_PACING_RATE); a group has one connection to each neighbour",
                "paper: on 16 GPUs, over the step with one group; only BERT on NCCL gained",
                "torch's own round-robin group was removed in 2024; here a communication hook hands out the groups",
            ),
            summaries,
        )

    def draw(self, findings: Findings, path: Path) -> None:
        """One panel a condition."""
        colors = (PAPER, OTHER)
        panels = []
        for condition in _CONDITIONS:
            found = findings.summaries[condition]
            lines = [
                Line(f"paper, {key}", list(zip(found["groups"], values, strict=False)), color, "--", "x")
                for (key, values), color in zip(findings.summaries["published"].items(), colors, strict=True)
            ]
            lines += [
                Line(f"here, {side}", list(zip(found["groups"], found[side], strict=True)), SIDE_COLORS[side])
                for side in ("torch", "ours")
            ]
            panels.append(
                Panel(
                    condition,
                    "process groups",
                    "step / step with one group",
                    lines,
                    found["groups"],
                    linear_x=True,
                )
            )
        draw_panels(
            path, "Round-robin process groups (figure 12), BERT, timed compute on emulated hosts", panels
        )


def _published() -> dict[str, tuple[float, ...]]:
    return {f"BERT {backend}": GROUP_SECONDS["bert", backend] for backend in ("NCCL", "Gloo")}
