"""Measure how much memory a rank needs to fit a kernel SVM, above what it had before.

Each rank keeps its own rows only (`rows="own"`). It resets the kernel's high-water mark of its resident memory, fits,
and reads it. Everything counts, the row cache, numba and torch included. Compiled code is there before, from a small
fit.

`bound` is what the design allows. It adds the cache's budget, a copy of the rank's rows in each precision, and vectors
of `VECTOR_BYTES` per sample. It also has the rows of samples that were ever in a working set, at most all, twice.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer

from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks
from paceline_lab.experiments.kernel_svm.data_sets import HELP, load
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.publication import Report

# Of a sample of the whole problem: numbers, targets, coefficients, bounds, gradients, their copies.
VECTOR_BYTES = 40 * 8
WORK_BYTES = 48e6  # a working set's block, tiles, candidates


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    data: str
    folder: str | None
    cache_megabytes: float


@dataclass(frozen=True)
class Memory:
    """The memory of one rank, in bytes."""

    own_rows: int
    peak: int
    bound: int
    num_support: int


def measure(config: Config, tell: TellProgress) -> Memory:
    """Fit once on all ranks. Collective."""
    from paceline_svm import SVC

    split = load(config.data, Path(config.folder) if config.folder else None)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    X, y = split.X[mine].copy(), split.y[mine].copy()
    num, width = split.X.shape
    settings: dict[str, Any] = {"C": split.cost, "gamma": split.gamma, "cache_size": config.cache_megabytes}
    del split
    SVC(**{**settings, "cache_size": 8}).fit(X[:2_000], y[:2_000])
    tell(0.5)
    dist.barrier()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model = SVC(**settings).fit(X, y)
    peak = _status("VmHWM") - before
    bound = (
        config.cache_megabytes * 1e6 + 2 * X.nbytes + 2 * num * width * 8 + num * VECTOR_BYTES + WORK_BYTES
    )
    return Memory(X.nbytes, peak, int(bound), len(model.support_))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(
    data: Annotated[str, typer.Option(help=f"One of: {HELP}.")] = "synthetic-50000x40",
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the real data sets, see kernel_svm/data_sets.py.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "1,2,4",
    caches: Annotated[str, typer.Option(help="Cache sizes in megabytes, comma-separated.")] = "50,500",
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Measure the resident memory of every rank."""
    if quick:
        data, ranks, caches = "synthetic-4000x8", "1,2", "20"
    found, rows = {}, []
    for num in map(int, ranks.split(",")):
        for cache in map(float, caches.split(",")):
            config = Config(data, str(folder) if folder else None, cache)
            memories = LoopbackRanks(num).run(measure, config, f"memory, {num} rank(s)")
            worst = max(memories, key=lambda memory: memory.peak)
            found[f"{num} ranks, {cache:g} MB"] = [asdict(memory) for memory in memories]
            numbers = (worst.own_rows, worst.peak, worst.bound)
            rows.append((str(num), f"{cache:g}", *(f"{number / 1e6:.0f}" for number in numbers)))
    report = Report(
        name=f"svm-memory{'-quick' if quick else ''}",
        question=f"How much memory does a fit of {data} take on a rank?",
        columns=("ranks", "cache MB", "own rows MB", "peak MB", "bound MB"),
        rows=tuple(rows),
        verdicts=(),
        notes=("resident memory above what the rank had before the fit; of all ranks the most",),
        config=Config(data, str(folder) if folder else None, 0.0),
        summaries={name: {"peak": max(one["peak"] for one in memories)} for name, memories in found.items()},
        samples=found,
        provenance=collect(1),
    )
    conclude(report, report_folder, as_json)
