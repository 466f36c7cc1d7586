"""Measure how computing and communication grow with the cells of an mLSTM: do larger models scale better?

Both grow with n^2 for n cells. A step multiplies matrices of 5 n^2 elements B T times forward, and twice that
backward; an all-reduce sends 5 n^2 elements. Their ratio then does not depend on n, and neither does efficiency. Only
the fixed costs of either depend on n. Here they are measured, on real cores and on an emulated link. The sizes of the
paper's models compute on one rank after another, as the memory of a small machine does not hold two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from paceline.host.processes import available_bytes
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import ClusterRanks, gather
from paceline_lab.experiments.papers.cluster_study import StudyOptions, TimeStudy
from paceline_lab.experiments.runner import Findings, Measured
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, OURS
from paceline_lab.report.panels import Line, Lines
from paceline_lab.report.summary import Summary, slowest_rank
from paceline_lab.workloads.mlstm import Mlstm

CELLS = (64, 128, 256, 512, 1024, 2048)
PAPERS_CELLS = (4096, 8192)
NUM_ROWS, SEGMENT, EMBEDDING = 16, 16, 64
_NUM_WARM_UP, _NUM_LARGE_STEPS = 2, 6
_LARGE = 2048  # cells from which a step takes seconds
_COPIES = 10  # of all parameters that backward holds at its peak, about


@dataclass(frozen=True)
class SizesConfig:
    """The measurements of one job."""

    cells: tuple[int, ...]
    num_steps: int
    in_turn: bool  # ranks compute one after another


@dataclass(frozen=True)
class SizeOutcome:
    """One size; times of the slowest rank.

    Attributes:
        num_cells: n.
        num_parameters: All of them.
        compute_s: Forward and backward, alone, all ranks at once or in turn.
        communication_s: All gradients in one all-reduce, alone.
    """

    num_cells: int
    num_parameters: int
    compute_s: tuple[float, ...]
    communication_s: tuple[float, ...]


def _that_fit(cells: Sequence[int], num_at_once: int) -> tuple[int, ...]:
    free = available_bytes()
    return tuple(n for n in cells if num_at_once * _COPIES * 4 * 5 * n * n < free)


def _seconds(compute: Callable[[], None], in_turn: bool) -> float:
    """Return how long this rank computes, all ranks at once or one after another. Collective."""
    taken_s = 0.0
    for rank in range(dist.get_world_size()) if in_turn else [dist.get_rank()]:
        dist.barrier()
        if rank == dist.get_rank():
            start_s = time.perf_counter()
            compute()
            taken_s = time.perf_counter() - start_s
    return taken_s


def measure_sizes(config: SizesConfig, tell: TellProgress) -> list[SizeOutcome]:
    """Compute and reduce in turn. Collective; every rank returns the same."""
    outcomes = []
    for i, num_cells in enumerate(config.cells):
        num_steps = min(config.num_steps, _NUM_LARGE_STEPS) if num_cells >= _LARGE else config.num_steps
        model = Mlstm(EMBEDDING, num_cells)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        tokens = torch.randint(0, 256, (NUM_ROWS, SEGMENT))
        zeros = torch.zeros(NUM_ROWS, num_cells)
        computing, reducing = [], []

        def compute(model: Mlstm = model, tokens: Tensor = tokens, zeros: Tensor = zeros) -> None:
            logits = model(tokens, (zeros, zeros))[0]
            functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            model.zero_grad(set_to_none=True)

        for _ in range(_NUM_WARM_UP + num_steps):
            computing.append(_seconds(compute, config.in_turn))
            flat = torch.ones(num_parameters)  # zeros would get their pages within the reduction
            dist.barrier()
            start_s = time.perf_counter()
            dist.all_reduce(flat)
            reducing.append(time.perf_counter() - start_s)
            del flat
        both = [slowest_rank(gather(times[_NUM_WARM_UP:])) for times in (computing, reducing)]
        outcomes.append(SizeOutcome(num_cells, num_parameters, tuple(both[0]), tuple(both[1])))
        tell((i + 1) / (len(config.cells) + 1))
    return outcomes


class ModelSizeStudy(TimeStudy[StudyOptions]):
    """Real computing on two cores, a real all-reduce over an emulated link."""

    name = "model-size"
    figure = "a claim of the sentiment-discovery page on scaling"
    defaults = StudyOptions(num_ranks=2, rate="1Gbit", compute_s=1.0, num_rounds=12)
    quick = StudyOptions(num_ranks=2, rate="1Gbit", compute_s=1.0, num_rounds=2, quick=True)

    def measure(self, options: StudyOptions) -> Measured:
        """Run all sizes in one job."""
        jobs = [(SizesConfig(CELLS[:3], options.num_rounds, in_turn=False), Allocator.KEEP)]
        if not options.quick:
            at_once, in_turn = _that_fit(CELLS, options.num_ranks), _that_fit(PAPERS_CELLS, 1)
            jobs = [
                (SizesConfig(at_once, options.num_rounds, in_turn=False), Allocator.KEEP),
                (SizesConfig(in_turn, options.num_rounds, in_turn=True), Allocator.GLIBC),
            ]
        with ClusterRanks(options.cluster()) as ranks:
            found = [ranks.run(measure_sizes, job, self.name, ENVIRONMENTS[how])[0] for job, how in jobs]
            place = {**ranks.describe(), "compute": "real, one thread a rank"}
        outcomes = [outcome for of_job in found for outcome in of_job]
        return Measured(
            outcomes, {"outcomes": [vars(outcome) for outcome in outcomes]}, (), place, options.num_ranks
        )

    def find(self, outcomes: Sequence[Any], options: StudyOptions) -> Findings:
        """Set ratio and efficiency beside what n^2 alone would give."""
        rows, summaries = [], []
        for outcome in outcomes:
            n = outcome.num_cells
            compute_s, communication_s = (
                Summary.of(times).median for times in (outcome.compute_s, outcome.communication_s)
            )
            operations = 30.0 * n * n * NUM_ROWS * SEGMENT
            sent = 4.0 * outcome.num_parameters  # what a ring of two ranks sends each way
            found = {
                "num_cells": n,
                "compute_s": compute_s,
                "communication_s": communication_s,
                "operations_per_s": operations / compute_s,
                "sent_bytes_per_s": sent / communication_s,
                "parameters_per_n2": outcome.num_parameters / (5.0 * n * n),
                "ratio": compute_s / communication_s,
                "efficiency": compute_s / (compute_s + communication_s),
            }
            summaries.append(found)
            rows.append(
                (
                    str(n),
                    f"{outcome.num_parameters / 1e6:.2f}",
                    Summary.of(outcome.compute_s).text(1e3, 1),
                    Summary.of(outcome.communication_s).text(1e3, 1),
                    f"{found['operations_per_s'] / 1e9:.1f}",
                    f"{found['sent_bytes_per_s'] / options.rate_bytes_per_s:.2f}",
                    f"{found['parameters_per_n2']:.2f}",
                    f"{found['ratio']:.2f}",
                    f"{found['efficiency']:.0%}",
                )
            )
        return Findings(
            "Do larger models scale better?",
            (
                "cells n",
                "million parameters",
                "compute ms",
                "all-reduce ms",
                "10^9 useful op/s",
                "share of the link",
                "parameters / 5n^2",
                "compute / all-reduce",
                "efficiency",
            ),
            rows,
            (
                (
                    f"{NUM_ROWS} rows of {SEGMENT} bytes on each of {options.num_ranks} ranks; useful operations: "
                    "30 n^2 a byte (5 n^2 products, forward once, backward twice)"
                ),
                "with n^2 alone, compute / all-reduce would be the same in every row",
                f"sizes from {PAPERS_CELLS[0]} on compute on one rank after another, the others on all at once",
            ),
            {"sizes": summaries},
        )

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        """Compute and all-reduce over n squared, each over its value at the largest size, and efficiency."""
        found = record["summaries"]["sizes"]
        ticks = {float(row["num_cells"]): str(row["num_cells"]) for row in found}

        def over_last(key: str) -> list[tuple[float, float]]:
            scaled = [row[key] / row["num_cells"] ** 2 for row in found]
            return [(row["num_cells"], value / scaled[-1]) for row, value in zip(found, scaled, strict=True)]

        efficiency = [(row["num_cells"], 100 * row["efficiency"]) for row in found]
        panels = [
            Lines(
                "efficiency without overlap",
                "cells of the mLSTM, n",
                "%",
                [Line("compute / (compute + all-reduce)", efficiency, OURS)],
                ticks,
                log_x=True,
                top=100,
            ),
            Lines(
                "why: time divided by n²",
                "cells of the mLSTM, n",
                f"time / n², over that of n = {found[-1]['num_cells']}",
                [
                    Line("compute", over_last("compute_s"), OURS),
                    Line("all-reduce", over_last("communication_s"), BASELINE),
                ],
                ticks,
                log_x=True,
            ),
        ]
        smallest, largest = found[0]["num_cells"], found[-1]["num_cells"]
        least, most = (bound(percent for _, percent in efficiency) for bound in (min, max))
        rate = record["place"]["rate"]
        return draw_figure(
            path,
            f"From {smallest} to {largest} cells, an mLSTM's efficiency stays between {least:.0f} and {most:.0f} %",
            panels,
            f"Real compute on two cores, a real all-reduce over an emulated link of {rate}; no overlap.",
            columns=1,
        )
