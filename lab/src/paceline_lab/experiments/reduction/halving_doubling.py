"""Compute how much faster halving-doubling is than the ring, by an alpha-beta model. Nothing is measured.

A ring of P hosts takes 2 (P - 1) rounds, halving-doubling 2 log2 P, and both send 2 (P - 1) / P of the bytes. So their
ratio lies between (P - 1) / log2 P, where messages are small, and 1. On emulated hosts it is measured by

    paceline bench allreduce --hosts 32 --rate 1Gbit --delay 2ms --vs gloo,paceline-ring,paceline-halving_doubling

Source: Goyal et al. 2017, section 4.1, "3 times" on 32 servers, which had 50 Gbit/s; their latency is not given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.schedules import halving_doubling
from paceline.schedules.flat import ring
from paceline.schedules.price import price
from paceline.schedules.schedule import Schedule
from paceline.schedules.topology import Link, Links, Topology
from paceline_lab.bench.provenance import collect
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, ReportFolder
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.publication import Report

SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "ring": ring.all_reduce,
    "halving-doubling": halving_doubling.all_reduce,
}


@dataclass(frozen=True)
class Config:
    """Hosts of one rank each; links by name, as seconds and bytes per second; bytes of a vector."""

    counts: tuple[int, ...] = (8, 32, 256)
    links: tuple[tuple[str, float, float], ...] = (
        ("50 Gbit/s, 30 µs", 30e-6, 6.25e9),
        ("1 Gbit/s, 2 ms", 2e-3, 1.25e8),
    )
    sizes_bytes: tuple[int, ...] = (2**16, 2**20, 100 * 2**20)


def main(as_json: AsJson = False, report_folder: ReportFolder = REPORT_FOLDER) -> None:
    """Price both schedules."""
    config = Config()
    summaries: dict[str, dict[str, dict[str, Any]]] = {}
    rows = []
    for name, latency_s, rate in config.links:
        links = Links(Link(latency_s, rate), Link(latency_s, rate))
        for num_hosts in config.counts:
            found = summaries.setdefault(name, {}).setdefault(str(num_hosts), {})
            for size in config.sizes_bytes:
                times = {
                    side: price(build(num_hosts), size, Topology.one_rank_a_host(num_hosts), links).time_s
                    for side, build in SCHEDULES.items()
                }
                found[str(size)] = times | {"faster": times["ring"] / times["halving-doubling"]}
            rows.append(
                (name, str(num_hosts), *(f"{found[str(size)]['faster']:.2f}" for size in config.sizes_bytes))
            )
    report = Report(
        name="halving-doubling",
        question="How many times as fast as the ring is halving-doubling, by its price?",
        columns=("link", "hosts", *(f"{size / 2**20:g} MiB" for size in config.sizes_bytes)),
        rows=tuple(rows),
        verdicts=(),
        notes=("an alpha-beta model: rounds and bytes only",),
        config=config,
        summaries=summaries,
        samples={},
        provenance=collect(1),
    )
    conclude(report, report_folder, as_json)
