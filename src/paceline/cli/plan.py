"""`paceline plan`: will it scale before I rent it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class _PredictsByDefault(TyperGroup):
    """`paceline plan SCRIPT` is `paceline plan predict SCRIPT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `predict` in front of what names no subcommand."""
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["predict", *args] if args else ["--help"]
        found: list[str] = super().parse_args(ctx, args)
        return found


plan = typer.Typer(
    cls=_PredictsByDefault,
    help="Predict how a training script scales, from a measurement on what is here.",
)

ReportFolder = Annotated[Path, typer.Option("--report", help="Folder for numbers, figure and predictions.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, progress to stderr.")]
ScriptArguments = Annotated[list[str] | None, typer.Argument(help="The script's own arguments, after --.")]


@plan.command()
def predict(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(help="A training script, a recorded workload, or a shipped one such as resnet50.")
    ],
    arguments: ScriptArguments = None,
    to: Annotated[int, typer.Option(help="The largest number of devices.")] = 256,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Devices on each host.", show_default="8")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Of each host's link.", show_default="25Gbit")] = None,
    latency: Annotated[
        str | None, typer.Option(help="Of one message between hosts.", show_default="30us")
    ] = None,
    within: Annotated[
        str | None, typer.Option(help="Among a host's devices, together.", show_default="800Gbit")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="Of packets, for example 0.1%.")] = None,
    bucket_cap_mb: Annotated[
        float | None, typer.Option(help="As DistributedDataParallel's.", show_default="torch's: 1, then 25")
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help="Of the all-reduce: ring, halving_doubling, hierarchical_ring, auto ...")
    ] = "ring",
    half: Annotated[bool, typer.Option("--half", help="Gradients travel in 16 bits.")] = False,
    sync_every: Annotated[
        int | None,
        typer.Option(help="Micro-steps a step, of which the last synchronizes.", show_default="as recorded"),
    ] = None,
    servers: Annotated[int, typer.Option(help="Parameter servers instead of an all-reduce.")] = 0,
    server_rate: Annotated[
        str | None, typer.Option(help="Of each server's link.", show_default="as --rate")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples of a device and forward.", show_default="as recorded")
    ] = None,
    epoch_samples: Annotated[int | None, typer.Option(help="Samples of an epoch: shows its time.")] = None,
    price: Annotated[float | None, typer.Option(help="Of a device and hour: shows an epoch's cost.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps to record, after two of warm-up.", show_default="20")
    ] = None,
    report: ReportFolder = Path("paceline-report"),
    as_json: AsJson = False,
) -> None:
    """How long is a step on 2, 4, ... devices, what limits it, what would help, what does an epoch cost?"""
    from paceline.plan.forecast import forecast
    from paceline.plan.request import PlanRequest

    forecast(PlanRequest.from_options(context.params), report, as_json=as_json)


@plan.command()
def record(
    script: Annotated[Path, typer.Argument(help="A training script.")],
    arguments: ScriptArguments = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("workload.json"),
    steps: Annotated[int, typer.Option(help="Steps to record, after two of warm-up.")] = 20,
) -> None:
    """Record how long each layer of a script computes, and which gradients it has; for `plan predict`."""
    from paceline.plan.script_recording import record_into

    found = record_into(out, script, arguments or [], steps)
    accumulates = f"{found.num_micro_steps} micro-steps a step, each " if found.num_micro_steps > 1 else ""
    print(
        f"{out}: {len(found.layers)} layers, {found.gradient_bytes / 1e6:,.1f} MB of gradients, {accumulates}forward "
        f"{found.forward_s * 1e3:.1f} ms, backward {found.backward_s * 1e3:.1f} ms, optimizer "
        f"{found.optimizer_s * 1e3:.1f} ms; {found.source}"
    )


@plan.command()
def score(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="What paceline.record_workload wrote in real runs.")
    ] = None,
    report: ReportFolder = Path("paceline-report"),
    as_json: AsJson = False,
) -> None:
    """Compare predictions with real runs; without any, show the score so far."""
    from paceline.plan.scoring import show_scores

    show_scores(report, traces or [], as_json=as_json)
