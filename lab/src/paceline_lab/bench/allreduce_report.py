"""Report of `paceline bench allreduce`: a row for each size and side, the link's limit next to it, and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline_lab.bench.allreduce import Measured, ReduceConfig, launches
from paceline_lab.bench.allreduce_sides import REDUCE_SIDES, ResidentExchange
from paceline_lab.bench.limit import bus_rate, ring_bytes_per_rank
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import Ranks
from paceline_lab.emulation.quantities import show_size
from paceline_lab.report.figures import draw_figure, show_time
from paceline_lab.report.look import LIMIT, look_of
from paceline_lab.report.panels import Line, Lines
from paceline_lab.report.publication import Report
from paceline_lab.report.summary import Summary, ratios

COLUMNS = (
    "size",
    "side",
    "time ms",
    "ratio",
    "algbw MB/s",
    "busbw MB/s",
    "link limit ms",
    "of the link's rate",
)


def explain(config: ReduceConfig, ranks: Ranks) -> tuple[str, ...]:
    """Return for each size which algorithm Paceline's backend takes on these ranks, and why."""
    title = f"what the backend chooses on {ranks.num_ranks} ranks"
    return tuple(ranks.run(_choices, config, title)[0])


def _choices(config: ReduceConfig, tell: TellProgress) -> list[str]:
    ours = ResidentExchange("paceline")
    return [ours.explain(size) for size in config.sizes_bytes]


def report(
    config: ReduceConfig,
    measured: Measured,
    ranks: Ranks,
    load_before: float,
    choices: tuple[str, ...] = (),
) -> Report:
    """Turn times into rows: one per size and side; `choices` become notes."""
    rows, summaries, times = [], [], measured.times_s
    for size in config.sizes_bytes:
        for name in config.side_names:
            summary = _summary(config, times, ranks, size, name)
            summaries.append(summary)
            rows.append(_row(summary))
    base = config.side_names[0]
    return Report(
        name=f"allreduce-{ranks.label}",
        question=f"How long does an all-reduce take on {ranks.num_ranks} ranks?",
        columns=tuple(f"ratio to {base}" if column == "ratio" else column for column in COLUMNS),
        rows=tuple(rows),
        verdicts=(),
        notes=(*_notes(config, ranks), *_memory_notes(measured, ranks), *choices),
        config=config,
        summaries={"cases": summaries, "copy_bytes_per_s": measured.copy_bytes_per_s},
        samples={
            name: {str(size): list(values) for size, values in by.items()} for name, by in times.items()
        },
        provenance=collect(ranks.num_ranks, load_before),
        place=ranks.describe(),
    )


def _summary(
    config: ReduceConfig, times: Mapping[str, Mapping[int, list[float]]], ranks: Ranks, size: int, name: str
) -> dict[str, Any]:
    own, base = times[name][size], times[config.side_names[0]][size]
    time = Summary.of(own)
    rate = ranks.rate_bytes_per_s
    link_s = ring_bytes_per_rank(ranks.num_ranks, size) / rate if rate else None
    return {
        "size_bytes": size,
        "side": name,
        "time_s": asdict(time),
        "ratio": asdict(Summary.of(ratios(own, base))),
        "algbw_bytes_per_s": size / time.median,
        "busbw_bytes_per_s": asdict(Summary.of([bus_rate(ranks.num_ranks, size, one_s) for one_s in own])),
        "link_s": link_s,
        "link_share": link_s / time.median if link_s else None,
    }


def _row(summary: Mapping[str, Any]) -> tuple[str, ...]:
    link_s, share = summary["link_s"], summary["link_share"]
    return (
        show_size(summary["size_bytes"]),
        summary["side"],
        Summary(**summary["time_s"]).text(1e3),
        Summary(**summary["ratio"]).text(digits=3),
        f"{summary['algbw_bytes_per_s'] * 1e-6:.1f}",
        f"{summary['busbw_bytes_per_s']['median'] * 1e-6:.1f}",
        "-" if link_s is None else f"{link_s * 1e3:.2f}",
        "-" if share is None else f"{share:.0%}",
    )


def _notes(config: ReduceConfig, ranks: Ranks) -> tuple[str, ...]:
    alternate = len(launches(config.side_names)) > 1
    return (
        "busbw = 2(P-1)/P * bytes / time; the link limit is a flat ring's, its bytes over the slowest link's rate",
        *(["sides that cannot share a process ran in alternating launches"] if alternate else []),
        *[REDUCE_SIDES[name].note for name in config.side_names if REDUCE_SIDES[name].note],
        *([] if ranks.rate_bytes_per_s else ["no link has a rate here: the network's limit is not known"]),
    )


def _memory_notes(measured: Measured, ranks: Ranks) -> tuple[str, ...]:
    """Return how near Paceline comes to the memory's limit, where no network is between the ranks."""
    if "paceline" not in measured.times_s or ranks.rate_bytes_per_s:
        return ()
    rate = measured.copy_bytes_per_s
    shares = [
        f"{show_size(size)}: {2 * size / rate / Summary.of(times).median:.0%}"
        for size, times in measured.times_s["paceline"].items()
    ]
    note = f"memory: copying reads and writes {rate * 1e-9:.1f} GB/s per rank while all copy; "
    note += (
        f"paceline reads and writes twice the message per rank, and reaches of that rate {', '.join(shares)}"
    )
    return (note,)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw time over size, one line a side, both logarithmic. Returns whether it was drawn.

    Args:
        record: A report of this module, as it is stored.
        path: Gets the picture.
    """
    points: dict[str, list[tuple[float, Summary]]] = {}
    link: dict[float, float] = {}
    for case in record["summaries"]["cases"]:
        size, time = float(case["size_bytes"]), Summary(**case["time_s"])
        points.setdefault(case["side"], []).append((size, time))
        if case["link_s"] is not None:
            link[size] = case["link_s"]
    lines = []
    for side, found in points.items():
        look = look_of(side)
        name = f"{look.name}: {show_time(found[-1][1].median)}"
        lines.append(Line.of(name, found, look.color))
    if link:
        last = show_time(list(link.values())[-1])
        lines.append(Line(f"flat ring at the link's rate: {last}", list(link.items()), LIMIT, ":", ""))
    medians = [time.median for found in points.values() for _, time in found]
    decades, steps = range(-6, 2), (1,) if max(medians) > 100 * min(medians) else (1, 2, 5)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    sizes = [size for size, _ in next(iter(points.values()))]
    panel = Lines(
        "",
        "size of the message",
        "time",
        lines,
        ticks={size: show_size(size) for size in sizes},
        log_x=True,
        y_ticks={tick: f"{1e3 * tick:g} ms" for tick in ticks},
    )
    place, num_ranks = record["place"], record["provenance"]["num_ranks"]
    where = "one host"
    if "rate" in place:
        num_hosts, num_each = place["hosts x ranks"].split(" x ")
        where = f"{num_hosts} emulated hosts, ranks on each: {num_each}, links of {place['rate']}"
    fastest = min(points, key=lambda side: points[side][-1][1].median)
    base = points[next(iter(points))][-1][1].median
    title = (
        f"{look_of(fastest).name} reduces {show_size(sizes[-1])} among {num_ranks} ranks "
        f"{base / points[fastest][-1][1].median:.1f} times as fast as {look_of(next(iter(points))).name}"
    )
    if fastest == next(iter(points)):
        title = f"Among {num_ranks} ranks, {look_of(fastest).name} is the fastest for {show_size(sizes[-1])}"
    return draw_figure(
        path, title, [panel], f"{where}; calls back to back; medians, in the band of their quartiles."
    )
