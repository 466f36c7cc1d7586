"""How much longer does Adasum take than the mean, and how many bytes does it send?

One bucket of float32 is reduced again and again, by the mean and by Adasum in turn (A B B A), each launch awaited; a
barrier before each. So this is communication and arithmetic alone: in training, part of it hides behind backward.
Bytes are counted in Adasum's transport, from the data itself; the limit is 2 (P-1)/P of the bucket. The mean over
Gloo is Gloo's ring; over `paceline` it is folded in shared memory, which Adasum does not use.
"""

import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.options import RESULTS_FOLDER, AsJson, Quick, ResultsFolder, Rounds, run_cli
from paceline.comm.collectives import allocate_zeros
from paceline.lab.bench.protocol import turns
from paceline.lab.bench.provenance import collect, load_average
from paceline.lab.bench.rank_program import TellProgress
from paceline.lab.bench.ranks import LoopbackRanks
from paceline.lab.report.publication import Report, publish
from paceline.lab.report.summary import Summary, ratios
from paceline.reductions import Adasum, Mean, Message

SIDES = ("mean", "adasum")
BACKENDS = ("gloo", "paceline")
SHAPES: dict[str, tuple[int, ...]] = {
    "64 KiB in 16 tensors": (1024,) * 16,
    "1 MiB in 4": (65536,) * 4,
    "4 MiB in 1,000": (1048,) * 1000,
    "25 MiB in 25": (262144,) * 25,
}


@dataclass(frozen=True)
class Config:
    """What is measured."""

    num_ranks: int
    num_rounds: int
    shapes: tuple[str, ...]


@dataclass(frozen=True)
class Timed:
    """One bucket over one backend, on rank 0."""

    seconds: list[list[float]]  # by side, then by turn
    bytes_sent: int  # by Adasum, a launch


def measure(config: Config, tell: TellProgress) -> dict[str, Timed]:
    """Time every shape over every backend. Collective."""
    results: dict[str, Timed] = {}
    for backend in BACKENDS:
        group: Any = dist.new_group(backend=backend)
        for shape in config.shapes:
            results[f"{backend}: {shape}"] = _measure_bucket(group, SHAPES[shape], config.num_rounds)
            tell(len(results) / len(BACKENDS) / len(config.shapes))
    return results


def _measure_bucket(group: Any, sizes: tuple[int, ...], num_rounds: int) -> Timed:
    flat = allocate_zeros(group, sum(sizes), torch.float32, torch.device("cpu"))
    views = list(flat.split(sizes))
    message = Message(0, True, flat, flat.numel(), views, views, group)
    adasum = Adasum()
    reductions = (Mean(), adasum)
    for reduction in reductions:
        _seconds(reduction, message)
        _seconds(reduction, message)
    seconds: list[list[float]] = [[], []]
    before = _bytes_sent(adasum)
    for turn in turns(len(SIDES), num_rounds):
        seconds[turn.side_index].append(_seconds(reductions[turn.side_index], message))
    return Timed(seconds, (_bytes_sent(adasum) - before) // len(seconds[1]))


def _seconds(reduction: Any, message: Message) -> float:
    torch.manual_seed(message.process_group.rank())
    message.flat.normal_()
    dist.barrier()
    start = time.perf_counter()
    reduction.begin_step()
    reduction.launch(message).wait()
    return time.perf_counter() - start


def _bytes_sent(adasum: Adasum) -> int:
    over_ranks = adasum._connection._over_ranks  # type: ignore[union-attr]
    return over_ranks.transport.bytes_sent  # type: ignore[union-attr]


def report(config: Config, results: dict[str, Timed], load_before: float) -> Report:
    """Turn the samples into one row per backend and bucket."""
    rows, summaries = [], {}
    for name, timed in results.items():
        mean, adasum = (Summary.of([s * 1e3 for s in side]) for side in timed.seconds)
        ratio = Summary.of(ratios(timed.seconds[1], timed.seconds[0]))
        size_bytes = 4 * sum(SHAPES[name.partition(": ")[2]])
        limit = 2 * (config.num_ranks - 1) / config.num_ranks * size_bytes
        summaries[name] = {"mean_ms": mean, "adasum_ms": adasum, "ratio": ratio}
        rows.append((name, mean.text(), adasum.text(), ratio.text(), f"{timed.bytes_sent / limit:.3f}"))
    return Report(
        name=f"adasum-{config.num_ranks}ranks" + ("-quick" if len(config.shapes) == 1 else ""),
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
        provenance=collect(config.num_ranks, load_before),
    )


def main(
    ranks: Annotated[int, typer.Option(min=2, help="How many processes.")] = 2,
    rounds: Rounds = 10,
    quick: Quick = False,
    as_json: AsJson = False,
    results_folder: ResultsFolder = RESULTS_FOLDER,
) -> None:
    """Time a bucket by Adasum and by the mean, over Gloo and over our backend."""
    config = Config(ranks, 2, tuple(SHAPES)[:1]) if quick else Config(ranks, rounds, tuple(SHAPES))
    load_before = load_average()
    results = LoopbackRanks(ranks).run(measure, config, "adasum")[0]
    publish(report(config, results, load_before), results_folder, as_json)


if __name__ == "__main__":
    run_cli(main)
