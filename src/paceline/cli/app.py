"""The `paceline` command: registers all commands; errors are one paragraph, exit code 2 for usage and 1 for failure."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from paceline import __version__
from paceline.cli import bench, demo, emulate, run, studies, svm
from paceline.errors import ConfigurationError, PacelineError

app = typer.Typer(
    name="paceline",
    help="Data-parallel training on PyTorch.",
    add_completion=False,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
)
# What the parser raises for bad usage; typer has moved it between packages.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _front_door(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    del version
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command("run", **run.SETTINGS)(run.run)
app.command("demo")(demo.demo)
bench.bench.command("study")(studies.paper_figure)
bench.bench.command("scaling")(studies.scaling)
app.add_typer(bench.bench)
app.command("emulate", **emulate.SETTINGS)(emulate.emulate)
app.add_typer(studies.app, name="study")
app.add_typer(svm.app, name="svm")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the `paceline` command and exit.

    Args:
        arguments: The words after `paceline`; this process's own if None.
    """
    try:
        code = app(arguments, standalone_mode=False)
    except ConfigurationError as error:
        _leave(str(error), 2)
    except PacelineError as error:
        # A launch that a signal ended says so the way shells do: 128 + the signal's number.
        received = getattr(error, "signal", None)
        _leave(str(error), 1 if received is None else 128 + received)
    except _UsageError as error:
        message: str = getattr(error, "format_message", error.__str__)()
        _leave(
            f"{message.rstrip('.')}. `paceline --help` lists the commands, `paceline COMMAND --help` its options.",
            2,
        )
    except (KeyboardInterrupt, typer.Abort):
        _leave("stopped.", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(paragraph: str, code: int) -> NoReturn:
    print(f"paceline: {' '.join(paragraph.split())}", file=sys.stderr)
    sys.exit(code)
