"""Figure 9: how does a step grow with the number of ranks?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.lab.bench.studies.calibration import scale_for
from paceline.lab.bench.studies.measure import Block, Outcome
from paceline.lab.bench.studies.published import BREAKDOWN, SCALING_GPUS, SCALING_SECONDS
from paceline.lab.bench.studies.study import ClusterStudy, Findings, StudyOptions
from paceline.lab.bench.studies.variant import PAPERS_CAP_MB, Variant
from paceline.lab.report.figures import PAPER, SIDE_COLORS, Line, Panel, draw_panels


class RankCountStudy(ClusterStudy):
    """1, 2, 4, ... ranks with the same link and model each; weak scaling, as published."""

    name = "rank-count"
    figure = "Li et al. 2020, figure 9"
    defaults = StudyOptions(num_ranks=16, rate="100Mbit", compute_s=0.35, num_rounds=1)
    quick = StudyOptions(num_ranks=2, rate="100Mbit", compute_s=0.02, num_rounds=1, quick=True)

    def blocks(self, options: StudyOptions) -> tuple[Block, ...]:
        """Return one for each model, backend and number of ranks."""
        blocks = []
        for (workload, backend), published in BREAKDOWN.items():
            profile = options.profile(workload)
            ratio = published.communication_to_compute
            scale = scale_for(profile, options.num_ranks, options.rate_bytes_per_s, ratio)
            for num_ranks in _counts(options):
                sides = ("none",) if num_ranks == 1 else ("torch", "ours")
                variants = tuple(Variant(side, num_ranks, cap_mb=PAPERS_CAP_MB) for side in sides)
                blocks.append(Block(f"{workload}, {backend}-like", profile, scale, variants))
        return tuple(blocks)

    def find(self, outcomes: Sequence[Outcome], options: StudyOptions) -> Findings:
        """Set steps over the step of one rank beside the published ones."""
        rows, summaries = [], {}
        for (workload, backend), seconds in SCALING_SECONDS.items():
            label = f"{workload}, {backend}-like"
            found = {
                (x.variant.side, x.variant.num_ranks): x.step.median for x in outcomes if x.block == label
            }
            alone_s = found["none", 1]
            counts = _counts(options)
            relative = {
                side: [1.0, *[found[side, num_ranks] / alone_s for num_ranks in counts[1:]]]
                for side in ("torch", "ours")
            }
            published = [second / seconds[0] for second in seconds]
            for i, num_ranks in enumerate(counts):
                ours = [relative[side][i] for side in ("torch", "ours")]
                paper = dict(zip(SCALING_GPUS, published, strict=True)).get(num_ranks)
                words = "" if paper is None else f"{paper:.2f} ({1 / paper:.0%})"
                rows.append((label, str(num_ranks), *[f"{x:.2f} ({1 / x:.0%})" for x in ours], words))
            summaries[label] = {"ranks": counts, **relative, "published": [SCALING_GPUS, published]}
        return Findings(
            "How does a step grow with the number of ranks?",
            ("model, link", "ranks", "torch / one rank", "ours / one rank", "paper"),
            rows,
            (
                "in brackets: efficiency, the step of one rank over the step",
                (
                    "one rank, one link; the paper had 8 GPUs in a server behind one link, and shared machines "
                    "beyond 32 GPUs"
                ),
            ),
            summaries,
        )

    def draw(self, findings: Findings, path: Path) -> None:
        """One panel a model and link."""
        panels = []
        for label, found in findings.summaries.items():
            gpus, published = found["published"]
            lines = [Line("paper, torch DDP", list(zip(gpus, published, strict=True)), PAPER, "--", "x")]
            lines += [
                Line(f"here, {side}", list(zip(found["ranks"], found[side], strict=True)), SIDE_COLORS[side])
                for side in ("torch", "ours")
            ]
            panels.append(Panel(label, "ranks", "step / step of one rank", lines, ticks=(1, 4, 16, 64, 256)))
        draw_panels(path, "A step by number of ranks (figure 9), timed compute on emulated hosts", panels)


def _counts(options: StudyOptions) -> list[int]:
    return [2**i for i in range(options.num_ranks.bit_length()) if 2**i <= options.num_ranks]
