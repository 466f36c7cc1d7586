"""Measure what a compressor costs a rank, compared with a copy of memory, which is the lower bound.

One rank and one thread, so that nothing waits for a network. A bucket is compressed and its own payload decoded, as a
rank does for itself; `memcpy` copies the bucket there and back. Sides take turns at each size; a compressor's time is
set against memcpy's of the same round. A time is that of the thread (time.thread_time), which leaves out other
programs. GB/s are bytes of gradients (float32) by time. Gathered payloads are decoded once per rank, so on P ranks add
P-1 times the decoding.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from paceline.compression import BY_NAME, Layout, Seeds
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator, turns
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import LoopbackRanks
from paceline_lab.emulation.quantities import show_size
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder, Rounds
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import OURS, PAPER
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.publication import Report
from paceline_lab.report.summary import Summary, ratios

BASELINE = "memcpy"
SEEDS = Seeds(common=1, private=2)


@dataclass(frozen=True)
class Config:
    """The settings of a measurement."""

    side_names: tuple[str, ...]  # the first is memcpy
    sizes_kib: tuple[int, ...]
    num_rounds: int


@dataclass(frozen=True)
class Cost:
    """Thread seconds for one bucket."""

    compress_s: float
    decode_s: float

    @property
    def both_s(self) -> float:
        """Return compressing + decoding."""
        return self.compress_s + self.decode_s


@dataclass(frozen=True)
class Side:
    """Two functions of no arguments, and how many bytes pass between them."""

    compress: Callable[[], Tensor]
    decode: Callable[[Tensor], object]
    payload_bytes: int


Samples = dict[str, list[Cost]]  # by side, two a round


def make_side(name: str, flat: Tensor) -> Side:
    """Return a side over one bucket, seen as matrices of a thousand columns and their biases."""
    target = torch.empty_like(flat)
    if name == BASELINE:
        between = torch.empty_like(flat)
        return Side(lambda: between.copy_(flat), target.copy_, flat.nbytes)
    layout, compressor = _layout(flat), BY_NAME[name]()
    return Side(
        lambda: compressor.compress(flat, layout, SEEDS),
        lambda payload: compressor.add_decoded(target, payload, layout, SEEDS.common),
        compressor.payload_bytes(layout),
    )


def _layout(flat: Tensor) -> Layout:
    """Parameters of a million elements, each with a thousand more, as far as the bucket reaches."""
    sizes: list[int] = []
    left = flat.numel()
    while left:
        sizes.append(min(left, 1_000_000 if len(sizes) % 2 == 0 else 1_000))
        left -= sizes[-1]
    return Layout.of(*flat.split(sizes))


def measure(config: Config, tell: TellProgress) -> dict[str, Samples]:
    """Return, by size, the samples of every side."""
    results = {}
    for place, size_kib in enumerate(config.sizes_kib):
        flat = torch.randn(size_kib * 256, generator=torch.Generator().manual_seed(1))
        sides = [make_side(name, flat) for name in config.side_names]
        repeats = max(1, min(50, 4096 // size_kib))
        samples: Samples = {name: [] for name in config.side_names}
        for side in sides:
            _time(side, 2)
        for turn in turns(len(sides), config.num_rounds):
            samples[config.side_names[turn.side_index]].append(_time(sides[turn.side_index], repeats))
        results[str(size_kib)] = samples
        tell((place + 1) / len(config.sizes_kib))
    return results


def _time(side: Side, repeats: int) -> Cost:
    start = time.thread_time()
    for _ in range(repeats):
        payload = side.compress()
    middle = time.thread_time()
    for _ in range(repeats):
        side.decode(payload)
    return Cost((middle - start) / repeats, (time.thread_time() - middle) / repeats)


def _per_round(costs: list[Cost]) -> list[float]:
    return [(a.both_s + b.both_s) / 2 for a, b in zip(costs[::2], costs[1::2], strict=True)]


def report(config: Config, results: dict[str, Samples]) -> Report:
    """Turn the samples into one row per size and side."""
    rows, summaries = [], {}
    for size_kib, samples in results.items():
        num_bytes = int(size_kib) * 1024
        for name, costs in samples.items():
            compress, decode = (
                Summary.of([num_bytes / getattr(cost, phase) / 1e9 for cost in costs])
                for phase in ("compress_s", "decode_s")
            )
            beside = Summary.of(ratios(_per_round(costs), _per_round(samples[BASELINE])))
            payload = make_side(name, torch.zeros(int(size_kib) * 256)).payload_bytes
            summaries[f"{size_kib} KiB/{name}"] = {
                "compress_gb_per_s": asdict(compress),
                "decode_gb_per_s": asdict(decode),
                "times_memcpy": asdict(beside),
                "payload_ratio": payload / num_bytes,
            }
            rows.append(
                (
                    f"{size_kib} KiB",
                    name,
                    f"{payload / num_bytes:.4f}",
                    compress.text(),
                    decode.text(),
                    beside.text(),
                )
            )
    return Report(
        name="compression" + ("-quick" if len(config.sizes_kib) == 1 else ""),
        question="What does a compressor cost one rank? GB/s of float32 gradients, one thread",
        columns=("bucket", "side", "payload", "compress GB/s", "decode GB/s", "both / memcpy"),
        rows=tuple(rows),
        verdicts=(),
        notes=("one rank: gathered payloads are decoded once for every rank, those that are summed once",),
        config=config,
        summaries=summaries,
        samples={
            size: {name: [asdict(cost) for cost in costs] for name, costs in samples.items()}
            for size, samples in results.items()
        },
        provenance=collect(1),
    )


def main(
    rounds: Rounds = 15,
    sizes_kib: Annotated[str, typer.Option(help="Bucket sizes, comma-separated, in KiB.")] = "64,1024,25600",
    quick: Quick = False,
    as_json: AsJson = False,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Measure every compressor's encoding and decoding beside a copy of the same bytes."""
    sizes = (64,) if quick else tuple(int(size) for size in sizes_kib.split(","))
    config = Config((BASELINE, *BY_NAME), sizes, 2 if quick else rounds)
    results = LoopbackRanks(1).run(measure, config, "compression", ENVIRONMENTS[Allocator.KEEP])[0]
    result = report(config, results)
    conclude(result, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw a bar for each compressor, at the largest bucket."""
    last = f"{record['config']['sizes_kib'][-1]} KiB/"
    found = {
        key.removeprefix(last): (Summary(**summary["times_memcpy"]), summary["payload_ratio"])
        for key, summary in record["summaries"].items()
        if key.startswith(last)
    }
    bars = [
        Bar(f"{name}, {100 * payload:.0f} % of the bytes", times, PAPER if name == BASELINE else OURS)
        for name, (times, payload) in found.items()
    ]
    costs = [times.median for name, (times, _) in found.items() if name != BASELINE]
    size = show_size(1024 * record["config"]["sizes_kib"][-1])
    return draw_figure(
        path,
        f"Compressing {size} and decoding it takes {min(costs):.1f} to {max(costs):.1f} times as long as copying it "
        "there and back",
        [Bars("", "multiple of the copy", bars)],
        "One thread, no network. Medians; whiskers: quartiles.",
    )
