"""Measure how much longer Adasum takes than the mean, and how many bytes it sends.

One bucket is reduced again and again, by the mean and by Adasum in turn (A B B A). A barrier precedes each launch,
which is then awaited. So this is communication and arithmetic alone: in training, part of it hides behind backward.
Bytes are counted in Adasum's transport, from the data itself. The limit is 2 (P-1)/P of the bucket. Over Gloo messages
are sent on one host, too: the mean by Gloo's ring, Adasum's by Gloo with PACELINE_SHARED_MEMORY=0. Over `paceline` on
one host both are computed in shared memory, and nothing is sent.
"""

import itertools
import os
import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from paceline.comm.collectives import allocate_zeros
from paceline.reductions import Mean, Message
from paceline_adasum import Adasum
from paceline_lab.bench.protocol import turns
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import Ranks, choose_place
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder, Rounds
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.publication import Report
from paceline_lab.report.summary import Summary, ratios

SIDES = ("mean", "adasum")
BACKENDS = ("gloo", "paceline")
SHAPES: dict[str, tuple[int, ...]] = {
    "64 KiB in 16 tensors": (1024,) * 16,
    "1 MiB in 4": (65536,) * 4,
    "4 MiB in 1,000": (1048,) * 1000,
    "25 MiB in 25": (262144,) * 25,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    num_ranks: int
    num_rounds: int
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Timed:
    """One bucket over one backend, on rank 0."""

    seconds: list[list[float]]  # by side, then by turn
    bytes_sent: int  # by Adasum, a launch


def measure(config: Config, tell: TellProgress) -> dict[str, Timed]:
    """Time every shape over every backend. Collective."""
    results: dict[str, Timed] = {}
    for backend in BACKENDS:
        os.environ["PACELINE_SHARED_MEMORY"] = "0" if backend == "gloo" else "1"  # this rank's alone
        group: Any = dist.new_group(backend=backend)
        for shape, dtype in itertools.product(config.shapes, config.dtypes):
            timed = _measure_bucket(group, SHAPES[shape], DTYPES[dtype], config.num_rounds)
            results[name_of(backend, shape, dtype)] = timed
            tell(len(results) / len(BACKENDS) / len(config.shapes) / len(config.dtypes))
    return results


def name_of(backend: str, shape: str, dtype: str) -> str:
    """The name of a row: sizes are those in float32."""
    return f"{backend}: {shape}" + ("" if dtype == "float32" else f", as {dtype}")


def _measure_bucket(group: Any, sizes: tuple[int, ...], dtype: torch.dtype, num_rounds: int) -> Timed:
    flat = allocate_zeros(group, sum(sizes), dtype, torch.device("cpu"))
    views = list(flat.split(sizes))
    message = Message(0, True, flat, flat.numel(), views, views, group)
    adasum = Adasum()
    reductions = (Mean(), adasum)
    for reduction in reductions:
        _seconds(reduction, message)
        _seconds(reduction, message)
    seconds: list[list[float]] = [[], []]
    before = adasum.bytes_sent
    for turn in turns(len(SIDES), num_rounds):
        seconds[turn.side_index].append(_seconds(reductions[turn.side_index], message))
    return Timed(seconds, (adasum.bytes_sent - before) // len(seconds[1]))


def _seconds(reduction: Any, message: Message) -> float:
    torch.manual_seed(message.process_group.rank())
    message.flat.normal_()
    dist.barrier()
    start = time.perf_counter()
    reduction.begin_step(message.process_group.size())
    reduction.launch(message).wait()
    return time.perf_counter() - start


def report(config: Config, results: dict[str, Timed], ranks: Ranks) -> Report:
    """Turn the samples into one row per backend, bucket and dtype."""
    rows, summaries = [], {}
    for backend, shape, dtype in itertools.product(BACKENDS, config.shapes, config.dtypes):
        name = name_of(backend, shape, dtype)
        timed = results[name]
        mean, adasum = (Summary.of([s * 1e3 for s in side]) for side in timed.seconds)
        ratio = Summary.of(ratios(timed.seconds[1], timed.seconds[0]))
        size_bytes = DTYPES[dtype].itemsize * sum(SHAPES[shape])
        limit = 2 * (config.num_ranks - 1) / config.num_ranks * size_bytes
        summaries[name] = {"mean_ms": mean, "adasum_ms": adasum, "ratio": ratio}
        rows.append((name, mean.text(), adasum.text(), ratio.text(), f"{timed.bytes_sent / limit:.3f}"))
    return Report(
        name=f"adasum-{ranks.label}" + ("-quick" if len(config.shapes) == 1 else ""),
        question="How long does a bucket take by Adasum and by the mean?",
        columns=("bucket", "mean ms", "adasum ms", "adasum / mean", "bytes / limit"),
        rows=tuple(rows),
        verdicts=(),
        notes=("communication alone, nothing hides behind backward; two cores serve all ranks",),
        config=config,
        summaries=summaries,
        samples={
            name: {"seconds": timed.seconds, "bytes_sent": timed.bytes_sent}
            for name, timed in results.items()
        },
        place=ranks.describe(),
        provenance=collect(config.num_ranks),
    )


def main(
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-host",
            "--nproc-per-node",
            min=1,
            help="Number of processes on each host.",
            show_default="2; with --hosts 1",
        ),
    ] = None,
    hosts: Annotated[
        int | None, typer.Option("--hosts", "--nnodes", min=2, help="Number of hosts of an emulated cluster.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Rate of each host's link, for example 1Gbit.")] = None,
    rounds: Rounds = 10,
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Time a bucket by Adasum and by the mean, over Gloo and over our backend."""
    with choose_place(hosts, ranks_per_host=ranks, rate=rate) as place:
        config = Config(place.num_ranks, rounds, tuple(SHAPES), tuple(DTYPES))
        if quick:
            config = Config(place.num_ranks, 2, tuple(SHAPES)[:1], tuple(DTYPES)[:1])
        results = place.run(measure, config, "adasum")[0]
        made = report(config, results, place)
    conclude(made, report_folder, as_json)
