"""Figure 10: what does synchronizing every n-th step only (`no_sync`) save?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.lab.bench.studies.calibration import scale_for
from paceline.lab.bench.studies.measure import Block, Outcome
from paceline.lab.bench.studies.published import SKIPPED_ALONE_S, SKIPPED_EVERY, SKIPPED_SECONDS
from paceline.lab.bench.studies.study import ClusterStudy, Findings, StudyOptions
from paceline.lab.bench.studies.variant import PAPERS_CAP_MB, Variant
from paceline.lab.report.figures import OTHER, PAPER, SIDE_COLORS, Line, Panel, draw_panels

_BACKWARD_RATIO = 2 / 3  # of forward and backward together; what communication hides behind


class SkippedSyncStudy(ClusterStudy):
    """ResNet-50 with as much exposed communication as 256 GPUs had, synchronized every 1, 2, 4 and 8 steps."""

    name = "skipped-sync"
    figure = "Li et al. 2020, figure 10"
    defaults = StudyOptions(num_ranks=4, rate="100Mbit", compute_s=0.2, num_rounds=2)
    quick = StudyOptions(num_ranks=2, rate="100Mbit", compute_s=0.02, num_rounds=1, quick=True)

    def blocks(self, options: StudyOptions) -> tuple[Block, ...]:
        """Return one a backend; communication is what backward hides and what the figure shows beyond computing."""
        blocks = []
        for backend, seconds in SKIPPED_SECONDS.items():
            profile = options.profile("resnet50")
            ratio = _BACKWARD_RATIO + (seconds[0] - SKIPPED_ALONE_S) / SKIPPED_ALONE_S
            scale = scale_for(profile, options.num_ranks, options.rate_bytes_per_s, ratio)
            every = SKIPPED_EVERY[:2] if options.quick else SKIPPED_EVERY
            variants = [
                Variant(side, options.num_ranks, cap_mb=PAPERS_CAP_MB, sync_every=n)
                for n in every
                for side in ("torch", "ours")
            ]
            alone = Variant("none", options.num_ranks)
            blocks.append(Block(f"{backend}-like", profile, scale, (alone, *variants)))
        return tuple(blocks)

    def find(self, outcomes: Sequence[Outcome], options: StudyOptions) -> Findings:
        """Set savings beside the published ones and beside computing + exposed / n."""
        rows, summaries = [], {}
        for backend, seconds in SKIPPED_SECONDS.items():
            found = {
                (x.variant.side, x.variant.sync_every): x for x in outcomes if x.block == f"{backend}-like"
            }
            alone_s = found["none", 1].step.median
            every = sorted({n for side, n in found if side != "none"})
            relative = {
                side: [found[side, n].step.median / found[side, 1].step.median for n in every]
                for side in ("torch", "ours")
            }
            exposed = 1 - alone_s / found["ours", 1].step.median
            expected = [1 - exposed * (1 - 1 / n) for n in every]
            published = [second / seconds[0] for second in seconds]
            for i, n in enumerate(every):
                rows.append(
                    (
                        f"{backend}-like",
                        str(n),
                        *[found[side, n].step.text(1e3, 0) for side in ("torch", "ours")],
                        *[f"{1 - relative[side][i]:.0%}" for side in ("torch", "ours")],
                        f"{1 - expected[i]:.0%}",
                        f"{1 - published[i]:.0%}",
                    )
                )
            summaries[backend] = {
                "every": every,
                **relative,
                "expected": expected,
                "published": published[: len(every)],
                "computing_s": alone_s,
            }
        return Findings(
            "What does synchronizing every n-th step only save?",
            ("link", "n", "torch ms", "ours ms", "torch saves", "ours saves", "expected", "paper saves"),
            rows,
            (
                "a micro-step's mean length; expected: exposed communication (step less computing alone) divided by n",
                "paper: on 256 GPUs, whose exposed communication this has",
            ),
            summaries,
        )

    def draw(self, findings: Findings, path: Path) -> None:
        """One panel a backend."""
        panels = []
        for backend, found in findings.summaries.items():

            def line(label: str, key: str, color: str, style: str = "-", marker: str = "o") -> Line:
                return Line(label, list(zip(found["every"], found[key], strict=True)), color, style, marker)  # noqa: B023

            lines = [
                line("paper, 256 GPUs", "published", PAPER, "--", "x"),
                line("computing + exposed / n", "expected", OTHER, ":", ""),
                *[line(f"here, {side}", side, SIDE_COLORS[side]) for side in ("torch", "ours")],
            ]
            panels.append(
                Panel(
                    f"{backend}-like",
                    "steps a synchronization",
                    "step / step with n = 1",
                    lines,
                    found["every"],
                )
            )
        draw_panels(path, "Skipped synchronization (figure 10), timed compute on emulated hosts", panels)
