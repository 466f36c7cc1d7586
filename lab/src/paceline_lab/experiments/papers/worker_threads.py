"""One process a worker, or threads in one process? The mLSTM page's reason for processes: Python's global lock.

Threads do what a data-parallel process does: each has a replica and a batch of its own, and after every backward the
gradients are averaged. Computing is real, so at most as many workers as cores say anything. A small model spends its
time in Python between small operations; a large one within torch, which lets go of the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from paceline.ddp import DistributedDataParallel
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks
from paceline_lab.experiments.papers.cluster_study import StudyOptions, TimeStudy
from paceline_lab.experiments.runner import Findings, Measured
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, OURS, PAPER
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.summary import Summary
from paceline_lab.workloads.mlstm import Mlstm

NUM_WARM_UP = 3
KINDS = ("processes", "threads", "independent")
SIZES = {"Python-heavy": (32, 4), "compute-heavy": (512, 16)}  # cells, rows
_SEGMENT, _QUICK_SEGMENT = 64, 4
# Older page, thousand characters a second on Volta GPUs: threads (DataParallel) flat at 4 to 5.7 from 1 to 8 GPUs.
PAPER_PROCESSES = {1: 1.0, 8: 27 / 4.8}
PAPER_THREADS = {1: 1.0, 8: 5.7 / 4.8}


@dataclass(frozen=True)
class WorkersConfig:
    """What one launch measures.

    Attributes:
        num_threads: Workers within each process.
        num_steps: Timed, for each size.
        segment_length: Bytes a step and row.
        independent: Processes do not average their gradients, nor wait for each other.
    """

    num_threads: int
    num_steps: int
    segment_length: int
    independent: bool = False


@dataclass(frozen=True)
class WorkersOutcome:
    """Characters a second of all workers together, one value a step.

    Attributes:
        size: Which of SIZES.
        kind: One of KINDS.
        num_workers: Processes or threads.
        characters_per_s: Samples of all launches.
    """

    size: str
    kind: str
    num_workers: int
    characters_per_s: tuple[float, ...]


class _Worker:
    """A replica, its batch, and one step up to the gradients."""

    def __init__(self, size: str, config: WorkersConfig, seed: int, wrapped: bool) -> None:
        num_cells, num_rows = SIZES[size]
        torch.manual_seed(0)
        self.bare = Mlstm(16, num_cells)
        self.model: nn.Module = DistributedDataParallel(self.bare) if wrapped else self.bare
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 256, (num_rows, config.segment_length), generator=generator)
        self.state = (torch.zeros(num_rows, num_cells),) * 2

    def backward(self) -> None:
        self.bare.zero_grad(set_to_none=True)
        logits: Tensor = self.model(self.tokens, self.state)[0]
        functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()


def measure_workers(config: WorkersConfig, tell: TellProgress) -> dict[str, list[float]]:
    """Return seconds of every step, by size. Collective."""
    seconds = {}
    for i, size in enumerate(SIZES):
        if config.num_threads == 1:
            seconds[size] = _time_process(size, config)
        else:
            seconds[size] = _time_threads(size, config)
        tell((i + 1) / (len(SIZES) + 1))
    return seconds


def _time_process(size: str, config: WorkersConfig) -> list[float]:
    together = not config.independent and dist.get_world_size() > 1
    worker = _Worker(size, config, dist.get_rank(), wrapped=together)
    dist.barrier()
    seconds = []
    for _ in range(NUM_WARM_UP + config.num_steps):
        start_s = time.perf_counter()
        worker.backward()
        seconds.append(time.perf_counter() - start_s)
    return seconds[NUM_WARM_UP:]


def _time_threads(size: str, config: WorkersConfig) -> list[float]:
    """Threads, a barrier, and one of them that averages."""
    workers = [_Worker(size, config, seed, wrapped=False) for seed in range(config.num_threads)]
    marks: list[float] = []

    def average() -> None:
        for replicas in zip(*[list(worker.bare.parameters()) for worker in workers], strict=True):
            mean = torch.stack([replica.grad for replica in replicas if replica.grad is not None]).mean(0)
            for replica in replicas:
                replica.grad = mean
        marks.append(time.perf_counter())

    barrier = threading.Barrier(config.num_threads, action=average)

    def run(worker: _Worker) -> None:
        for _ in range(NUM_WARM_UP + config.num_steps):
            worker.backward()
            barrier.wait()

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [end - start for start, end in zip(marks[NUM_WARM_UP - 1 : -1], marks[NUM_WARM_UP:], strict=True)]


class ThreadsStudy(TimeStudy[StudyOptions]):
    """One and two workers, as processes and as threads; launches alternate."""

    name = "threads"
    figure = "sentiment-discovery's page on scaling, first version"
    defaults = StudyOptions(num_ranks=2, rate="1Gbit", compute_s=1.0, num_rounds=3)
    quick = StudyOptions(num_ranks=2, rate="1Gbit", compute_s=1.0, num_rounds=1, quick=True)

    def measure(self, options: StudyOptions) -> Measured:
        """Launch each arrangement in turn."""
        segment, steps = (_QUICK_SEGMENT, 2) if options.quick else (_SEGMENT, 30)
        arrangements = [("processes", 1), *[(kind, options.num_ranks) for kind in KINDS]]
        samples: dict[tuple[str, str, int], list[float]] = {}
        for _ in range(options.num_rounds):
            for kind, number in arrangements:
                num_processes, num_threads = (1, number) if kind == "threads" else (number, 1)
                config = WorkersConfig(num_threads, steps, segment, independent=kind == "independent")
                seconds = _launch(num_processes, config, f"{number} {kind}")
                for size, values in seconds.items():
                    characters = number * SIZES[size][1] * segment
                    samples.setdefault((size, kind, number), []).extend(
                        characters / value for value in values
                    )
        outcomes = [WorkersOutcome(*key, tuple(values)) for key, values in samples.items()]
        place = {"network": "loopback", "compute": "real", "threads of torch": "1 a worker"}
        return Measured(
            outcomes, {"outcomes": [vars(outcome) for outcome in outcomes]}, (), place, options.num_ranks
        )

    def find(self, outcomes: Sequence[Any], options: StudyOptions) -> Findings:
        """Set throughput over that of one worker."""
        found = {(x.size, x.kind, x.num_workers): Summary.of(x.characters_per_s) for x in outcomes}
        rows, summaries = [], {}
        most = options.num_ranks
        for size, (num_cells, num_rows) in SIZES.items():
            alone = found[size, "processes", 1]
            row = [f"{size}: {num_cells} cells, {num_rows} rows", alone.text(1e-3, 1)]
            for kind in KINDS:
                several = found[size, kind, most]
                row += [several.text(1e-3, 1), f"{several.median / alone.median:.2f}"]
                summaries[f"{size}, {kind}"] = [(1, 1.0), (most, several.median / alone.median)]
            rows.append(tuple(row))
        return Findings(
            "One process a worker, or threads in one process?",
            (
                "model",
                "1 worker, 1000 char/s",
                *[w for k in KINDS for w in (f"{most} {k}", "speed-up")],
            ),
            rows,
            (
                (
                    "the study: eight Volta GPUs with a process each 27 thousand characters/s, one 4.8 (5.6 times); "
                    "threads (DataParallel) 4 to 5.7, whatever the number"
                ),
                "the lock binds what Python does between operations; backward runs in torch without it",
            ),
            summaries,
        )

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        """Speed-up over workers, one panel a size, and the study's."""
        colors = {"processes": OURS, "threads": BASELINE, "independent": PAPER}
        names = {"independent": "processes that do not communicate"}
        study = [
            Bar("processes", PAPER_PROCESSES[8], PAPER),
            Bar("threads (DataParallel), at most", PAPER_THREADS[8], PAPER),
        ]
        panels = [Bars("the study, 8 GPUs", "speed-up over one worker", study, {"linear": 8.0})]
        faster = []
        for size in SIZES:
            found = {kind: record["summaries"][f"{size}, {kind}"][-1] for kind in KINDS}
            most = found["threads"][0]
            faster.append(found["threads"][1] / found["processes"][1])
            bars = [Bar(names.get(kind, kind), found[kind][1], colors[kind]) for kind in KINDS]
            title = f"here, {most} workers on two cores: {size}"
            panels.append(Bars(title, "speed-up over one worker", bars, {"linear": float(most)}))
        title = "Threads speed up an mLSTM as much as processes here, or more: the study's did not"
        return draw_figure(
            path,
            title if min(faster) > 1 else record["question"],
            panels,
            "Real compute. Threads share Python's lock. More than linear is noise of the one worker.",
        )


def _launch(num_processes: int, config: WorkersConfig, title: str) -> dict[str, list[float]]:
    task: Callable[[WorkersConfig, TellProgress], dict[str, list[float]]] = measure_workers
    with LoopbackRanks(num_processes) as ranks:
        return ranks.run(task, config, title)[0]
