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
    int | None,
    typer.Option(
        "--hosts",
        "--nnodes",
        help="Number of hosts of an emulated cluster.",
        show_default="none: this machine",
    ),
]
Rounds = Annotated[int, typer.Option(help="Number of measuring rounds. Each side runs twice per round.")]
ReportFolder = Annotated[Path, typer.Option("--report", help="Folder for the JSON file and the figure.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, progress to stderr.")]


@bench.command()
@cluster_options(*LINKS)
def step(
    cluster: dict[str, Any],
    workload: Annotated[
        str | None,
        typer.Option(
            help="Name of a shipped model. `paceline bench workloads` lists them.", show_default="resnet50"
        ),
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(
            help="Your model: a file that `paceline plan record` wrote, or a script, which is run and recorded."
        ),
    ] = None,
    vs: Annotated[str, typer.Option(help="Sides to compare Paceline with, comma-separated.")] = "torch",
    hosts: Hosts = None,
    rounds: Rounds = 5,
    steps: Annotated[int, typer.Option(help="Number of timed steps per turn.")] = 1,
    compute: Annotated[str, typer.Option(help="timed: layers sleep; real: they compute.")] = "timed",
    compute_s: Annotated[
        str | None,
        typer.Option(
            help="Time of forward and backward together: 0.5, 0.5s or 500ms.",
            show_default="published or recorded",
        ),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="File that `paceline bench profile` wrote.")] = None,
    scale: Annotated[
        float, typer.Option(help="Divisor of the gradients' bytes, so that they fit into memory.")
    ] = 1.0,
    report: ReportFolder = Path("paceline-report"),
    as_json: AsJson = False,
) -> None:
    """Measure how long a training step is under each side, and how far that is from the limit.

    `paceline bench step --workload resnet50 --hosts 4 --rate 1Gbit`
    """
    from paceline_lab.bench.commands import StepOptions, bench_step
    from paceline_lab.bench.ranks import choose_place

    place = choose_place(hosts, **cluster)
    options = StepOptions(workload, vs, rounds, steps, compute, compute_s, profile, scale, recording)
    bench_step(options, place, report, as_json)


@bench.command()
@cluster_options(*LINKS)
def allreduce(
    cluster: dict[str, Any],
    sizes: Annotated[str, typer.Option(help="Sizes of the buffers, comma-separated.")] = "64KiB,1MiB,25MiB",
    vs: Annotated[
        str, typer.Option(help="Sides to compare, comma-separated. The first is the baseline.")
    ] = "gloo,paceline",
    hosts: Hosts = None,
    rounds: Rounds = 5,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print which algorithm Paceline chose, and why.")
    ] = False,
    report: ReportFolder = Path("paceline-report"),
    as_json: AsJson = False,
) -> None:
    """Measure how long an all-reduce takes, and which share of the link's rate it reaches.

    `paceline bench allreduce --sizes 1MiB,25MiB`
    """
    from paceline_lab.bench.commands import bench_allreduce
    from paceline_lab.bench.ranks import choose_place

    place = choose_place(hosts, **cluster)
    bench_allreduce(sizes, vs, rounds, place, report, as_json, explain=explain)


@bench.command()
def profile(
    workload: Annotated[str, typer.Option(help="`paceline bench workloads` lists them.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(help="Number of timed steps. The median counts.")] = 5,
) -> None:
    """Record how long each layer of a workload computes, for `bench step --profile`.

    `paceline bench profile --workload resnet50 --out profile.json`
    """
    from paceline_lab.bench.commands import bench_profile

    found = bench_profile(workload, out, device, steps)
    print(
        f"{out}: {len(found.layers)} layers, forward {found.forward_s * 1e3:.1f} ms, backward "
        f"{found.backward_s * 1e3:.1f} ms, optimizer {found.optimizer_s * 1e3:.1f} ms; {found.source}"
    )


@bench.command()
def workloads(as_json: AsJson = False) -> None:
    """List the workloads, their sizes, and how long timed compute takes by default."""
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
