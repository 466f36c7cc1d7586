"""`paceline plan`: will it scale before I rent it?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup


class _PredictsByDefault(TyperGroup):
    """`paceline plan SCRIPT` is `paceline plan predict SCRIPT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `predict` in front of what names no subcommand."""
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["predict", *args] if args else ["--help"]
        found: list[str] = super().parse_args(ctx, args)
        return found


class _TakesAScript(TyperCommand):
    """A command that takes a script. Words behind the script are its own arguments; `--` is optional."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Divide the words at the script."""
        at = self._place_of_script(args)
        if at is not None:
            own, rest = [word for word in args[: at + 1] if word != "--"], args[at + 1 :]
            rest = rest[1:] if rest[:1] == ["--"] else rest
            known = {name for param in self.params for name in param.opts}
            for word in rest:
                if word.split("=")[0] in known:
                    print(
                        f"paceline plan: {word} stands after {args[at]}, so the script gets it. Options of plan stand "
                        "before the script.",
                        file=sys.stderr,
                    )
            args = [*own, "--", *rest]
        found: list[str] = super().parse_args(ctx, args)
        return found

    def _place_of_script(self, args: list[str]) -> int | None:
        """Return where the first word stands that is neither an option nor its value, if that word is a script."""
        takes_value = {
            name: not getattr(param, "is_flag", False) for param in self.params for name in param.opts
        }
        at = 0
        while at < len(args):
            word = args[at]
            if not word.startswith("-"):
                return at if word.endswith(".py") else None
            at += 2 if takes_value.get(word, False) else 1
        return None


plan = typer.Typer(
    cls=_PredictsByDefault, help="Predict how a training script scales, from a measurement on what is here."
)


def register(commands: typer.Typer) -> None:
    """Add `plan` to `paceline`'s commands; the entry point `paceline.commands` names this function."""
    commands.add_typer(plan, name="plan")


ReportFolder = Annotated[
    Path, typer.Option("--report", help="Folder for the numbers, the figure and the predictions.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, progress to stderr.")]
Scratch = Annotated[
    bool,
    typer.Option("--scratch", help="Run the script in a copy of this folder, which is removed afterwards."),
]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(help="The script's own arguments, as after torchrun.")
]


@plan.command(cls=_TakesAScript)
def predict(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(help="A training script, a recorded workload, or a shipped one such as resnet50.")
    ],
    arguments: ScriptArguments = None,
    to: Annotated[int, typer.Option(help="The largest number of devices.")] = 256,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-host",
            "--nproc-per-node",
            help="Number of devices on each host.",
            show_default="8, as in most GPU servers",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Rate of each host's link, for example 1Gbit.", show_default="25Gbit, unless measured"
        ),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(help="Latency of one message between hosts.", show_default="30us, unless measured"),
    ] = None,
    within: Annotated[
        str | None, typer.Option(help="Rate within a host, all its devices together.", show_default="800Gbit")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="Share of packets that the network loses, for example 0.1%.")
    ] = None,
    bucket_cap_mb: Annotated[
        float | None,
        typer.Option(
            help="Bucket size, as DistributedDataParallel's argument of this name.",
            show_default="torch's: 1, then 25",
        ),
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option(help="Algorithm of the all-reduce: ring, halving_doubling, hierarchical_ring, auto ..."),
    ] = "ring",
    half: Annotated[bool, typer.Option("--half", help="Gradients are sent in 16 bits.")] = False,
    sync_every: Annotated[
        int | None,
        typer.Option(
            help="Number of micro-steps per step. The last one synchronizes.", show_default="as recorded"
        ),
    ] = None,
    servers: Annotated[int, typer.Option(help="Number of parameter servers. 0: an all-reduce.")] = 0,
    server_rate: Annotated[
        str | None, typer.Option(help="Rate of each parameter server's link.", show_default="as --rate")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Number of samples per device and forward.", show_default="as recorded")
    ] = None,
    epoch_samples: Annotated[
        int | None, typer.Option(help="Number of samples per epoch. Prints the time of an epoch.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price per device and hour. Prints the cost of an epoch.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps to record, after two of warm-up.", show_default="20")
    ] = None,
    scratch: Scratch = False,
    report: ReportFolder = Path("paceline-report"),
    as_json: AsJson = False,
) -> None:
    """Predict the step on 2, 4, ... devices, what limits it, what would help, and the cost of an epoch.

    `paceline plan predict resnet50 --to 64 --rate 10Gbit`
    """
    from paceline_plan.forecast import forecast
    from paceline_plan.request import PlanRequest

    forecast(PlanRequest.from_options(context.params), report, as_json=as_json)


@plan.command(cls=_TakesAScript)
def record(
    script: Annotated[Path, typer.Argument(help="A training script.")],
    arguments: ScriptArguments = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("workload.json"),
    steps: Annotated[int, typer.Option(help="Number of steps to record, after two of warm-up.")] = 20,
    scratch: Scratch = False,
) -> None:
    """Record how long each layer of a script computes, and which gradients it has; for `plan predict`.

    `paceline plan record train.py`
    """
    from paceline_plan.script_recording import record_into

    found = record_into(out, script, arguments or [], steps, scratch=scratch)
    accumulates = f"{found.num_micro_steps} micro-steps a step, each " if found.num_micro_steps > 1 else ""
    print(
        f"{out}: {len(found.layers)} layers, {found.gradient_bytes / 1e6:,.1f} MB of gradients, {accumulates}forward "
        f"{found.forward_s * 1e3:.1f} ms, backward {found.backward_s * 1e3:.1f} ms, optimizer "
        f"{found.optimizer_s * 1e3:.1f} ms; {found.source}"
    )


@plan.command()
def score(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="What paceline_plan.record_workload wrote in real runs.")
    ] = None,
    report: ReportFolder = Path("paceline-report"),
    as_json: AsJson = False,
) -> None:
    """Compare predictions with real runs. Without a trace, show the score so far.

    `paceline plan score`
    """
    from paceline_plan.scoring import show_scores

    show_scores(report, traces or [], as_json=as_json)
