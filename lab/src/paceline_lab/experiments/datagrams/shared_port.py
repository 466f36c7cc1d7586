"""Measure how sums by bounded loss and a TCP connection (cubic) share a port that both send into, on emulated hosts.

All ranks but the last host's sum vectors without a pause; that one sends to the first by TCP. The result is what
arrives at the first host's port, second by second: of `--ranks` - 1 pairs, and of the one connection.

    paceline study shared-port --ranks 2
    paceline study shared-port --ranks 4

Limits: pairs' shares among themselves are not seen (a sum waits for all of them). All hosts share this machine's cores;
see "busy".
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline_lab.bench.provenance import collect, load_average
from paceline_lab.emulation import ClusterSpec
from paceline_lab.experiments.datagrams.rank_jobs import keep, run_job
from paceline_lab.experiments.options import REPORT_FOLDER, ReportFolder

NAME = "shared_port"
_RANK_PROGRAM = Path(__file__).with_name("shared_port_rank.py")


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Number of hosts that sum. One more sends over TCP.")] = 4,
    rate: Annotated[str, typer.Option(help="Rate of each link, for example 100Mbit.")] = "100mbit",
    queue: Annotated[str, typer.Option(help="Size of a switch port's queue.")] = "256KB",
    delay: Annotated[str, typer.Option(help="Delay of a packet between two hosts, one way.")] = "",
    megabytes: Annotated[float, typer.Option(help="Megabytes of a vector.")] = 1.0,
    seconds: Annotated[
        int, typer.Option(min=6, help="Seconds of measuring. The first third does not count.")
    ] = 20,
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Run one job; print the shares, and keep every second."""
    spec = ClusterSpec.parse(
        hosts=ranks + 1, rate=rate, queue=queue, delay=delay or None, congestion_control="cubic"
    )
    case = {"ranks": ranks, "megabytes": megabytes, "seconds": seconds}
    load = load_average()
    every_second, busy = run_job(spec, _RANK_PROGRAM, case, timeout_s=seconds + 60)
    summary = summarise(every_second, ranks - 1)
    name = f"{ranks} ranks, {rate}, queue {queue}" + (f", delay {delay}" if delay else "")
    record = {"case": case, "busy": busy, "provenance": asdict(collect(ranks + 1, load))}
    keep(report_folder / f"{NAME}.json", name, record | {"every_second": every_second}, summary)
    print(f"{name}; busy {busy:.0%}, load {load}")
    print("  ".join(f"{key} {value:.3g}" for key, value in summary.items()))


def summarise(every_second: list[dict[str, float]], pairs: int) -> dict[str, float]:
    """Means of the last two thirds, and Jain's index with what each pair has on average."""
    counted = every_second[len(every_second) // 3 :]
    ours, tcp = (sum(second[key] for second in counted) / len(counted) for key in ("ours_mbit", "tcp_mbit"))
    shares = [tcp] + [ours / pairs] * pairs
    jain = sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
    fair = (ours + tcp) / (pairs + 1)
    return {"ours_mbit": ours, "tcp_mbit": tcp, "tcp_of_fair": tcp / fair, "jain": jain}
