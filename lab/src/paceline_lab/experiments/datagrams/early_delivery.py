"""Measure whether `BoundedLoss(deliver="early")` shortens steps, or their tail, where packets are lost.

A VGG-16 whose layers sleep trains on emulated hosts. Its gradients and their traffic are real. In each round every side
takes one step, in random order. Without loss, sides use Gloo (the cluster's TCP) and datagrams. With each bound, they
deliver by default and early. Ratios are taken within a round.

    paceline study early-delivery --loss 1%
    paceline study early-delivery --loss 3%

The results of every case are stored side by side. Limits: all hosts share this machine's cores, see "busy" and the
load; a 99th percentile of a hundred steps is the second largest. The stored sums and pushes in virtual time were made
by a simulator that is in commit cb30c809.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigurationError
from paceline_lab.bench.provenance import collect, load_average
from paceline_lab.emulation import ClusterSpec
from paceline_lab.experiments.datagrams.rank_jobs import TCP, keep, run_job
from paceline_lab.experiments.options import REPORT_FOLDER, ComputeS, ReportFolder
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, OURS, look_of
from paceline_lab.report.panels import Bar, Bars

NAME = "early_delivery"
_RANK_PROGRAM = Path(__file__).with_name("bounded_loss_rank.py")
GLOO, EXACT, PERCENTS = "Gloo", "bound 0", (1, 5, 10)
SIDES: dict[str, dict[str, Any] | None] = {
    GLOO: None,
    EXACT: {"bound": 0.0},
    **{
        f"bound {percent} %{suffix}": {"bound": percent / 100, "deliver": deliver}
        for percent in PERCENTS
        for suffix, deliver in (("", "all_sent"), (", early", "early"))
    },
}

Samples = Mapping[str, Sequence[Mapping[str, float]]]


def main(
    hosts: Annotated[int, typer.Option(min=2, help="Number of hosts, with one rank each.")] = 2,
    rate: Annotated[str, typer.Option(help="Rate of each link, for example 100Mbit.")] = "200mbit",
    loss: Annotated[str, typer.Option(help="Share of packets that each link loses at random.")] = "1%",
    delay: Annotated[str, typer.Option(help="Delay of a packet between two hosts, one way.")] = "",
    megabytes: Annotated[float, typer.Option(help="Megabytes of all gradients.")] = 8.0,
    compute_s: ComputeS = 0.1,
    repeats: Annotated[int, typer.Option(min=2, help="Number of rounds.")] = 100,
    tcp: Annotated[str, typer.Option(help="TCP of Gloo: cubic or tuned.")] = "cubic",
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Run one job; print percentiles, and keep all samples."""
    if tcp not in TCP:
        raise ConfigurationError(f"--tcp {tcp!r} must be one of {', '.join(TCP)}.")
    spec = ClusterSpec.parse(hosts=hosts, rate=rate, loss=loss, delay=delay or None, **TCP[tcp])
    case = {
        "kind": "step",
        "megabytes": megabytes,
        "compute_s": compute_s,
        "repeats": repeats,
        "sides": SIDES,
    }
    load = load_average()
    samples, busy = run_job(spec, _RANK_PROGRAM, case, timeout_s=60 + 20 * repeats)
    summary = summarise(samples)
    parts = [f"{hosts} hosts", rate, f"loss {loss}", *([f"delay {delay}"] if delay else []), tcp]
    name = ", ".join([f"{megabytes:g} MB", *parts])
    record = {"case": case, "busy": round(busy, 2), "load_after": load_average(), "sides": samples}
    record["provenance"] = asdict(collect(hosts, load))
    keep(report_folder / f"{NAME}.json", name, record, summary)
    print(f"{name}; {repeats} rounds, busy {busy:.0%}, load {load} before and {load_average()} after")
    for side, row in summary.items():
        print(f"  {side:18s} " + "  ".join(f"{column} {value:.4g}" for column, value in row.items()))


def summarise(samples: Samples) -> dict[str, dict[str, float]]:
    """Percentiles of each side's steps in ms; medians of the lost part in %, and of ratios within a round."""
    exact = samples[EXACT]
    found = {}
    for side, taken in samples.items():
        ordered = sorted(sample["ms"] for sample in taken)
        row = {f"p{percent}_ms": _percentile(ordered, percent) for percent in (50, 95, 99)}
        row["of_bound_0"] = _ratio(taken, exact)
        if (default := side.removesuffix(", early")) != side:
            row["of_default"] = _ratio(taken, samples[default])
        if side != GLOO:
            row["lost_percent"] = 100 * statistics.median(sample["lost"] for sample in taken)
        found[side] = row
    return found


def _percentile(ordered: Sequence[float], percent: int) -> float:
    if percent == 50:
        return statistics.median(ordered)
    return ordered[math.ceil(percent * len(ordered) / 100) - 1]


def _ratio(ours: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]) -> float:
    return statistics.median(one["ms"] / other["ms"] for one, other in zip(ours, others, strict=True))


_SHOWN = {
    "sum, two hosts, 1 % lost": "simulated sum, 4 MB, 2 hosts, 200mbit, loss 1%, cubic",
    "sum, two hosts, 3 % lost": "simulated sum, 4 MB, 2 hosts, 200mbit, loss 3%, cubic",
    "push, eight workers, 1 % lost": "simulated push, 1 MB, 9 hosts, 100mbit, loss 1%, cubic",
    "push, eight workers, 3 % lost": "simulated push, 1 MB, 9 hosts, 100mbit, loss 3%, cubic",
}


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw medians of simulated sums and pushes by side, with 99th percentiles, from the stored cases."""
    cases = {title: record["summaries"][name] for title, name in _SHOWN.items()}
    colors = {GLOO: BASELINE} | {side: look_of("ours-early").color for side in SIDES if "early" in side}
    panels = [
        Bars(
            title,
            "median, ms (99th percentile)",
            [
                Bar(
                    "TCP cubic" if side == GLOO else side,
                    row["p50_ms"],
                    colors.get(side, OURS),
                    f"{row['p50_ms']:.0f} ({row['p99_ms']:.0f})",
                )
                for side, row in case.items()
            ],
        )
        for title, case in cases.items()
    ]
    gained = max(
        1 - case[f"bound {p} %, early"]["p50_ms"] / case[f"bound {p} %"]["p50_ms"]
        for case in record["summaries"].values()
        for p in PERCENTS
    )
    return draw_figure(
        path,
        f"Delivering early gains at most {gained:.1%} of the median, in any case".replace("%", " %"),
        panels,
        "In virtual time, by the transport's own code: sums of 4 MB at 200 Mbit/s, forty a side; pushes of 1 MB to one "
        "server behind 100 Mbit/s, twelve a side.",
        columns=2,
    )
