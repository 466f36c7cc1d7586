"""More ranks, rarer synchronization, several process groups: figures 9, 10 and 12 of Li et al., again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    GROUP_SECONDS,
    GROUPS,
    SCALING_GPUS,
    SCALING_SECONDS,
    SKIPPED_ALONE_S,
    SKIPPED_EVERY,
    SKIPPED_SECONDS,
    scale_for,
)
from paceline_lab.experiments.papers.variants import PAPERS_CAP_MB, Variant
from paceline_lab.experiments.runner import Findings
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import LIMIT, look_of
from paceline_lab.report.panels import Line, Lines

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

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        """One panel a model and link."""
        panels, most = [], {}
        for label, found in record["summaries"].items():
            gpus, published = found["published"]
            lines = [Line.published("paper", list(zip(gpus, published, strict=True)))]
            lines += [
                Line(
                    look_of(side).name,
                    list(zip(found["ranks"], found[side], strict=True)),
                    look_of(side).color,
                )
                for side in ("torch", "ours")
            ]
            most[label] = found["ours"][-1]
            ticks = {float(n): str(n) for n in (1, 4, 16, 64, 256)}
            panels.append(
                Lines(case_name(label), "ranks, or GPUs", "step / step of one rank", lines, ticks, log_x=True)
            )
        ranks = next(iter(record["summaries"].values()))["ranks"][-1]
        return draw_figure(
            path,
            f"With {ranks} ranks a step takes {min(most.values()):.1f} to {max(most.values()):.1f} times as long as "
            "with one, by model and by how much it communicates",
            panels,
            f"{emulated(record)}. {PAPERS_NOTE.format(number='9')} {LIKE_NOTE}",
        )


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

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        """One panel a backend."""
        panels, saved = [], []
        for backend, found in record["summaries"].items():
            every = found["every"]
            lines = [
                Line.published("paper, 256 GPUs", list(zip(every, found["published"], strict=True))),
                Line(
                    "computing + exposed / n",
                    list(zip(every, found["expected"], strict=True)),
                    LIMIT,
                    ":",
                    "",
                ),
                *[
                    Line(look_of(side).name, list(zip(every, found[side], strict=True)), look_of(side).color)
                    for side in ("torch", "ours")
                ],
            ]
            saved.append(1 - found["ours"][-1])
            label = "step / step with n = 1"
            ticks = {float(n): str(n) for n in every}
            title = f"{backend}'s share of communication"
            panels.append(Lines(title, "n: synchronized every n-th step", label, lines, ticks, log_x=True))
        last = next(iter(record["summaries"].values()))["every"][-1]
        return draw_figure(
            path,
            f"Synchronizing every {last}th step only saves {100 * min(saved):.0f} to {100 * max(saved):.0f} % "
            "of a step: the exposed communication is divided by n",
            panels,
            f"{emulated(record)}. {PAPERS_NOTE.format(number='10')}",
            columns=1,
        )


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
                "torch's own round-robin group was removed in 2024; here it is `paceline_lab.doubles.round_robin`",
            ),
            summaries,
        )

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        """One panel a condition."""
        panels, last = [], {}
        for condition in _CONDITIONS:
            found = record["summaries"][condition]
            groups = found["groups"]
            lines = [
                Line.published(f"paper, {key.removeprefix('BERT ')}", list(zip(groups, values, strict=False)))
                for key, values in record["summaries"]["published"].items()
                if condition == "no cap"  # the paper capped no connection
            ]
            lines += [
                Line(look_of(side).name, list(zip(groups, found[side], strict=True)), look_of(side).color)
                for side in ("torch", "ours")
            ]
            last[condition] = found["ours"][-1]
            label = "step / step with one group"
            title = (
                "a connection fills the link"
                if condition == "no cap"
                else condition.replace("flow", "connection")
            )
            panels.append(Lines(title, "process groups", label, lines, {float(n): str(n) for n in groups}))
        free, capped = last.values()
        return draw_figure(
            path,
            f"Several process groups help where one connection cannot fill the link (a step takes {capped:.2f} of what "
            f"it took), and not where it can ({free:.2f})",
            panels,
            f"BERT; {emulated(record)}. {PAPERS_NOTE.format(number='12')}",
        )


def _group_seconds() -> dict[str, tuple[float, ...]]:
    return {f"BERT {backend}": GROUP_SECONDS["bert", backend] for backend in ("NCCL", "Gloo")}
