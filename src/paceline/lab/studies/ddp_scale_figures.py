"""More ranks, rarer synchronization, several process groups: figures 9, 10 and 12 of Li et al., again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.lab.report.figures import OTHER, PAPER, SIDE_COLORS, Line, Panel, draw_panels
from paceline.lab.studies.cluster_study import Block, ClusterStudy, StudyOptions, VariantOutcome
from paceline.lab.studies.description import Findings
from paceline.lab.studies.published import (
    BREAKDOWN,
    GROUP_SECONDS,
    GROUPS,
    SCALING_GPUS,
    SCALING_SECONDS,
    SKIPPED_ALONE_S,
    SKIPPED_EVERY,
    SKIPPED_SECONDS,
    scale_for,
)
from paceline.lab.studies.variants import PAPERS_CAP_MB, Variant

_BACKWARD_RATIO = 2 / 3  # of forward and backward together; what communication hides behind
FLOWS_A_LINK = 3  # with the cap, a connection gets this part of the link
_CONDITIONS = {"no cap": None, f"a flow gets 1/{FLOWS_A_LINK} of the link": FLOWS_A_LINK}


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

    def find(self, outcomes: Sequence[VariantOutcome], options: StudyOptions) -> Findings:
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

    def draw(self, outcomes: Sequence[Any], findings: Findings, path: Path) -> None:
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

    def find(self, outcomes: Sequence[VariantOutcome], options: StudyOptions) -> Findings:
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

    def draw(self, outcomes: Sequence[Any], findings: Findings, path: Path) -> None:
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

    def find(self, outcomes: Sequence[VariantOutcome], options: StudyOptions) -> Findings:
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
                        *[f"{seconds[i] / seconds[0]:.2f}" for seconds in _group_seconds().values()],
                    )
                )
            summaries[condition] = {"groups": numbers, **relative}
        summaries["published"] = {
            key: [s / seconds[0] for s in seconds] for key, seconds in _group_seconds().items()
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
                *[f"paper {x}" for x in _group_seconds()],
            ),
            rows,
            (
                "the cap is on each TCP connection (SO_MAX_PACING_RATE); a group has one connection to each neighbour",
                "paper: on 16 GPUs, over the step with one group; only BERT on NCCL gained",
                "torch's own round-robin group was removed in 2024; here it is `paceline.process_group.round_robin`",
            ),
            summaries,
        )

    def draw(self, outcomes: Sequence[Any], findings: Findings, path: Path) -> None:
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


def _group_seconds() -> dict[str, tuple[float, ...]]:
    return {f"BERT {backend}": GROUP_SECONDS["bert", backend] for backend in ("NCCL", "Gloo")}
