"""`paceline bench`: is it faster here, and how far from the limit?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline_lab.cli.cluster_options import LINKS, cluster_options

bench = typer.Typer(
    name="bench",
    help="Measure training steps and all-reduces against torch's DDP and other peers.",
    no_args_is_help=True,
)

Hosts = Annotated[
    int | None, typer.Option(help="Hosts of an emulated cluster.", show_default="none: loopback")
]
NumRanks = Annotated[
    int | None, typer.Option("--ranks", help="Processes on loopback, without --hosts.", show_default="2")
]
Rounds = Annotated[int, typer.Option(help="Every side takes two turns in each.")]
ReportFolder = Annotated[Path, typer.Option("--report", help="Folder for the JSON and the figure.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, progress to stderr.")]


@bench.command()
@cluster_options(*LINKS)
def step(
    cluster: dict[str, Any],
    workload: Annotated[str, typer.Option(help="`paceline bench workloads` lists them.")] = "resnet50",
    vs: Annotated[str, typer.Option(help="Sides to measure ours against, comma-separated.")] = "torch",
    hosts: Hosts = None,
    ranks: NumRanks = None,
    rounds: Rounds = 5,
    steps: Annotated[int, typer.Option(help="Timed steps at a turn.")] = 1,
    compute: Annotated[str, typer.Option(help="timed: layers sleep; real: they compute.")] = "timed",
    compute_s: Annotated[
        float | None,
        typer.Option(help="Forward and backward together.", show_default="published or recorded"),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="From `paceline bench profile`.")] = None,
    scale: Annotated[float, typer.Option(help="Divide the gradients' bytes, to fit memory.")] = 1.0,
    report: ReportFolder = Path("paceline-report"),
    as_json: AsJson = False,
) -> None:
    """How long is a training step under each side, and how far is that from the limit?"""
    from paceline_lab.bench.commands import StepOptions, bench_step
    from paceline_lab.bench.ranks import choose_place

    place = choose_place(hosts, ranks, **cluster)
    options = StepOptions(workload, vs, rounds, steps, compute, compute_s, profile, scale)
    bench_step(options, place, report, as_json)


@bench.command()
@cluster_options(*LINKS)
def allreduce(
    cluster: dict[str, Any],
    sizes: Annotated[str, typer.Option(help="Of the buffers, comma-separated.")] = "64KiB,1MiB,25MiB",
    vs: Annotated[
        str, typer.Option(help="Sides, comma-separated; the first is the baseline.")
    ] = "gloo,paceline",
    hosts: Hosts = None,
    ranks: NumRanks = None,
    rounds: Rounds = 6,
    explain: Annotated[bool, typer.Option("--explain", help="Which algorithm ours took, and why.")] = False,
    report: ReportFolder = Path("paceline-report"),
    as_json: AsJson = False,
) -> None:
    """How long does an all-reduce take, and which share of the link's rate does it reach?"""
    from paceline_lab.bench.commands import bench_allreduce
    from paceline_lab.bench.ranks import choose_place

    place = choose_place(hosts, ranks, **cluster)
    bench_allreduce(sizes, vs, rounds, place, report, as_json, explain=explain)


@bench.command()
def profile(
    workload: Annotated[str, typer.Option(help="`paceline bench workloads` lists them.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(help="Timed steps; the median counts.")] = 5,
) -> None:
    """Record how long each layer of a workload computes, for `bench step --profile`."""
    from paceline_lab.bench.commands import bench_profile

    found = bench_profile(workload, out, device, steps)
    print(
        f"{out}: {len(found.layers)} layers, forward {found.forward_s * 1e3:.1f} ms, backward "
        f"{found.backward_s * 1e3:.1f} ms, optimizer {found.optimizer_s * 1e3:.1f} ms; {found.source}"
    )


@bench.command()
def workloads(as_json: AsJson = False) -> None:
    """List what can be trained, its size, and how long timed compute takes by default."""
    from rich.console import Console

    from paceline_lab.bench.commands import workload_rows
    from paceline_lab.report import table

    rows = workload_rows()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    columns = ("workload", "tensors", "parameters", "gradients MB", "compute s", "from")
    texts = [
        (
            row["workload"],
            f"{row['tensors']:,}",
            f"{row['parameters']:,}",
            f"{4e-6 * row['parameters']:.1f}",
            f"{row['compute_s']:.3f}",
            row["from"],
        )
        for row in rows
    ]
    Console().print(table("Workloads; gradients in float32", columns, texts))
    for row in rows:
        if row["from"] == "published":
            print(f"{row['workload']}: {row['source']}")
