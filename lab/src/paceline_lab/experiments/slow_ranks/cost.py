"""Measure what a step costs more because Paceline's DDP always keeps records of the last ones.

Two ranks, one job. Blocks of steps with records and without take turns, in the order A B B A, so a machine that slows
down affects both. A step's clock and its processor time (of the whole process, all threads) are compared block by
block.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer

import paceline
from paceline_lab.bench.protocol import turns
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks, gather
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.publication import Report, Verdict

NAME = "doctor-cost"
_NUM_RANKS, _TARGET = 2, 1.005
_WITH, _WITHOUT = 0, 1


@dataclass(frozen=True)
class Config:
    """The settings of the comparison.

    Attributes:
        rounds: Number of rounds, each with two blocks of either side.
        steps: Number of steps per block.
        compute_s: Approximate time of a step's arithmetic.
    """

    rounds: int
    steps: int
    compute_s: float


@dataclass(frozen=True)
class Block:
    """A block of one rank: its side, and seconds of a step."""

    side: int
    clock_s: float
    cpu_s: float


def main(
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of two blocks with records, two without.")] = 40,
    steps: Annotated[int, typer.Option(min=5, help="Steps of a block.")] = 25,
    step_ms: Annotated[float, typer.Option(min=1, help="Arithmetic of a step, in milliseconds, about.")] = 25,
    quick: Quick = False,
    report: ReportFolder = REPORT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Measure what always keeping records costs a step."""
    config = Config(2, 5, 0.005) if quick else Config(rounds, steps, 1e-3 * step_ms)
    blocks = LoopbackRanks(_NUM_RANKS).run(measure, config, "steps with and without records")[0]
    conclude(_report(blocks, config), report, as_json)


def measure(config: Config, tell: TellProgress) -> list[list[Block]]:
    """Train blocks in turn; of each rank its blocks. Collective; the same on every rank."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    model = paceline.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    batch = torch.randn(64, 256)

    def step() -> None:
        until_s = time.thread_time() + config.compute_s
        while time.thread_time() < until_s:
            torch.mm(batch, batch.T)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(10):
        step()
    recorder = cast("Any", model.membership.model).recording.recorder
    schedule = list(turns(2, config.rounds))
    found = []
    for number, turn in enumerate(schedule):
        recorder._is_detached = turn.side_index == _WITHOUT
        step()
        began = time.perf_counter(), time.process_time()
        for _ in range(config.steps):
            step()
        clock_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
        found.append(Block(turn.side_index, clock_s / config.steps, cpu_s / config.steps))
        tell((number + 1) / len(schedule))
    blocks: list[list[Block]] = gather(found)
    dist.barrier()
    return blocks


def _ratios(blocks: list[list[Block]], name: str) -> list[float]:
    """Return the ratios with records over without, of each two neighbours in time, on every rank."""
    found = []
    for of_rank in blocks:
        for a, b in zip(of_rank[::2], of_rank[1::2], strict=True):
            kept, other = (a, b) if a.side == _WITH else (b, a)
            found.append(getattr(kept, name) / getattr(other, name))
    return found


def _report(blocks: list[list[Block]], config: Config) -> Report:
    rows, verdicts, summaries = [], [], {}
    for title, name in (("clock", "clock_s"), ("processor", "cpu_s")):
        ratios = _ratios(blocks, name)
        low, middle, high = quantiles(ratios, n=4)
        without_s = median(getattr(x, name) for of_rank in blocks for x in of_rank if x.side == _WITHOUT)
        rows.append((title, f"{1e3 * without_s:.2f} ms", f"{middle:.4f}", f"{low:.4f} to {high:.4f}"))
        verdicts.append(Verdict(f"{title}, of a step without records", middle, _TARGET, "times"))
        summaries[title] = {"without_s": without_s, "ratio": middle, "quartiles": [low, high]}
    samples: Mapping[str, Any] = {"ranks": [[asdict(x) for x in of_rank] for of_rank in blocks]}
    return Report(
        NAME,
        "What does it cost a step that records of the last ones are always kept?",
        ("of a step", "without records", "ratio", "quartiles"),
        tuple(rows),
        tuple(verdicts),
        (f"ratios of neighbouring blocks of {config.steps} steps, on both ranks",),
        config,
        summaries,
        dict(samples),
        collect(_NUM_RANKS),
        {"ranks": f"{_NUM_RANKS} on this machine"},
    )
