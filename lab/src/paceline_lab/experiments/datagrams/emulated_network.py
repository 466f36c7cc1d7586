"""Measure how long sums and pushes take on emulated hosts, by bounded loss over UDP and over TCP.

Sides alternate call by call within one job. TCP is the cluster's: cubic as the kernel has it, or tuned, BBR with a
smallest retransmission timeout of 5 ms. Each is a cluster of its own. A push is what workers send a parameter server:
all to rank 0, timed there from a barrier until all of it is in.

    paceline study emulated-network --case sum-1MB

Limit: all hosts share this machine's cores; see `busy` in the output, and repeat what is above 90 %.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigurationError
from paceline_lab.bench.provenance import collect, load_average
from paceline_lab.emulation import ClusterSpec
from paceline_lab.experiments.datagrams.rank_jobs import TCP, keep, run_job
from paceline_lab.experiments.options import REPORT_FOLDER, ReportFolder

_RANK_PROGRAM = Path(__file__).with_name("emulated_network_rank.py")
NAME = "emulated-network"
BOUNDS = {"ours, bound 0": 0.0, "ours, bound 5 %": 0.05}


@dataclass(frozen=True)
class Case:
    """One transfer, and its cluster.

    Attributes:
        hosts: Number of hosts, with one rank each.
        num_bytes: Size of the vector.
        is_push: Whether it is sent to rank 0; otherwise it is summed for all.
        repeats: Repeats of every side.
        loss: Losses, as `--loss` of `paceline emulate`; one cluster each.
        queue: Capacity of a switch port's queue.
        rate: Rate of each link.
    """

    hosts: int
    num_bytes: int
    is_push: bool
    repeats: int
    loss: tuple[str, ...] = ("0%",)
    queue: str = "256KB"
    rate: str = "100mbit"


CASES = {
    "sum-1MB": Case(4, 1_000_000, False, 25, ("0%", "1%", "3%")),
    "sum-25MB": Case(4, 25_000_000, False, 3, ("0%", "1%")),
    "push": Case(9, 100_000, True, 120, queue="64KB"),
    "push-shallow": Case(9, 100_000, True, 100, queue="16KB"),
}


def main(
    case: Annotated[str, typer.Option(help=f"One of {', '.join(CASES)}.")] = "sum-1MB",
    tcp: Annotated[str, typer.Option(help="TCP to compare with: cubic or tuned.", show_default="both")] = "",
    report_folder: ReportFolder = REPORT_FOLDER,
) -> None:
    """Measure one case, and keep its samples beside those of the others."""
    if case not in CASES or tcp not in ("", *TCP):
        raise ConfigurationError(f"--case {case} or --tcp {tcp} must be one of {', '.join([*CASES, *TCP])}.")
    load = load_average()
    path = report_folder / f"{NAME}.json"
    chosen = CASES[case]
    for kind in [tcp] if tcp else list(TCP):
        for loss in chosen.loss:
            spec = ClusterSpec.parse(
                hosts=chosen.hosts, rate=chosen.rate, loss=loss, queue=chosen.queue, **TCP[kind]
            )
            samples, busy = run_job(spec, _RANK_PROGRAM, asdict(chosen) | {"bounds": BOUNDS})
            key = f"{case}, loss {loss}, {kind}"
            rounded = {side: [round(ms, 2) for ms in values] for side, values in samples.items()}
            record = {"case": asdict(chosen), "busy": round(busy, 2), "ms": rounded}
            summary = {side: _summary(ms) for side, ms in rounded.items()}
            keep(path, key, record, summary, provenance=asdict(collect(chosen.hosts, load)))
            print(f"{key}; busy {busy:.0%}")
            for side, values in samples.items():
                print(
                    f"  {side:16s} median {statistics.median(values):8.1f} ms   worst {max(values):8.1f} ms"
                )


def _summary(ms: list[float]) -> dict[str, float]:
    ordered = sorted(ms)
    return {"median_ms": statistics.median(ms), "p99_ms": ordered[min(len(ms) - 1, int(0.99 * len(ms)))]}
