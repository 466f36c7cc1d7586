"""The `paceline` command: registers all commands; errors are one paragraph, exit code 2 for usage and 1 for failure.

Other packages add theirs by an entry point of the group `paceline.commands`: a function that is called with `app`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from paceline import __version__
from paceline.cli import demo, doctor, explain
from paceline.errors import ConfigurationError, PacelineError
from paceline.extras import COMMANDS, added, raise_if_missing
from paceline.quantities import seconds


class _Commands(typer.core.TyperGroup):
    """The group of commands. It answers one whose package is missing with the line that installs the package."""

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        name = words[0] if words else ""
        if self.get_command(context, name) is None:
            raise_if_missing(COMMANDS, name, f"`paceline {name}`")
        return super().resolve_command(context, words)


app = typer.Typer(
    name="paceline",
    cls=_Commands,
    help="Data-parallel training on PyTorch. Begin with `paceline demo survive`.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
)
# What the parser raises for bad usage; typer has moved it between packages.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_HELP = ["-h", "--help"]

_WORDS = {
    "Input should be a valid integer, unable to parse string as an integer": "it has to be a whole number, such as 2",
    "Input should be a valid number, unable to parse string as a number": "it has to be a number, such as 0.5",
    "Input should be greater than or equal to": "it has to be at least",
    "Input should be less than or equal to": "it has to be at most",
    "Invalid value for": "This value is not possible for",
}


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


# torchrun's parser reads `run`'s options, and has a help of its own
_LEAVES_OPTIONS = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}


@app.command("run", add_help_option=False, context_settings=_LEAVES_OPTIONS)
def _run(context: typer.Context) -> None:
    """Start one process of a script per rank, like torchrun and with its flags.

    `paceline run --nproc-per-node 4 train.py`
    """
    from paceline.launch import launch, parse

    launch(parse(context.args), note=lambda line: print(f"paceline run: {line}", file=sys.stderr))


app.add_typer(demo.app, name="demo")


@app.command("shadow", cls=doctor.TakesACommand)
def _shadow(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder of the checkpoints; made if it is not there.")],
    keep: Annotated[int, typer.Option(min=1, help="Number of checkpoints to keep: the newest.")] = 3,
    write_every: Annotated[
        str, typer.Option(help="Time between two checkpoints, such as 30s or 500ms.")
    ] = "30s",
    peers: Annotated[
        str | None, typer.Option(help="Where the hosts of the job are, as PACELINE_PEERS. Default: here.")
    ] = None,
    spare: Annotated[
        bool, typer.Option(help="Take the place of a lost rank. Set by `paceline run`.", hidden=True)
    ] = False,
    agent: Annotated[
        str | None, typer.Option(help="Socket of the agent that starts this, which sets it.", hidden=True)
    ] = None,
) -> None:
    """Follow every step of a job, and write checkpoints without stopping it.

    `paceline shadow checkpoints -- train.py ARGS` follows `paceline run --min-ranks 2 train.py ARGS`. It runs the same
    script up to `paceline.Elastic`. If all ranks are lost, it writes the last completed step.
    """
    from paceline.elastic.agent_connection import ShadowOrders
    from paceline.launch.shadow_command import follow

    words = context.meta[doctor.COMMAND]
    write_every_s = seconds(write_every, "--write-every", is_bare_possible=True)
    if write_every_s < 0:
        raise ConfigurationError(f"--write-every {write_every} is negative. Pass a time such as 30s.")
    orders = ShadowOrders(str(folder), keep, write_every_s, agent or "", spare, is_started=agent is not None)
    follow(orders, words or [], lambda line: print(f"paceline shadow: {line}", file=sys.stderr), peers)


app.command("doctor", cls=doctor.TakesACommand)(doctor.doctor)


@app.command("trace", cls=doctor.TakesACommand)
def _trace(
    context: typer.Context,
    run: doctor.RunFolder = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("trace.json"),
    last: Annotated[int, typer.Option(min=1, help="Number of steps to show: the last ones.")] = 500,
    record: doctor.Record = None,
) -> int:
    """Write all ranks' steps as one timeline, for ui.perfetto.dev or chrome://tracing.

    `paceline trace -- train.py` runs a script, `paceline trace -- --nproc-per-node 4 train.py` four ranks of it, and
    `paceline trace -- torchrun ...` any command. `paceline trace RUN` reads a run folder.
    """
    from paceline.report.files import trace_command, write_timeline

    command = context.meta[doctor.COMMAND]
    if (command is None) == (run is None) or command == []:
        raise ConfigurationError(
            "Pass a run folder, or a command behind --, as in `paceline trace -- train.py`; not both."
        )
    if command is not None:
        return trace_command(command, out, last, _note_trace, record)
    if record is not None:
        raise ConfigurationError(
            "--record is for a command. Pass one behind --, as in `paceline trace -- train.py`."
        )
    assert run is not None
    _note_trace(write_timeline(run, out, last))
    return 0


def _note_trace(text: str) -> None:
    print(f"paceline trace: {text}", file=sys.stderr, flush=True)


@app.command("report")
def _report(
    run: Annotated[Path, typer.Argument(help="A run folder that was recorded.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write a run as one page of HTML: what delays its steps, and the evidence.

    The page needs no network and no other file. `paceline doctor --record RUN -- COMMAND` records a run. Then
    `paceline report RUN` writes the page.
    """
    from paceline.report.files import write_page

    print(write_page(run, out))


app.command("explain")(explain.explain)
for _package in added(COMMANDS).values():
    _package.load()(app)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the `paceline` command on these words, this process's own if None, and exit."""
    try:
        code = command_of(app)(arguments, prog_name="paceline", standalone_mode=False)
    except ConfigurationError as error:
        _leave(str(error), 2)
    except PacelineError as error:
        # A launch that a signal ended says so the way shells do: 128 + the signal's number.
        received = getattr(error, "signal", None)
        _leave(str(error), 1 if received is None else 128 + received)
    except _UsageError as error:
        if not str(error):  # a group of commands without a command, whose help has been shown
            sys.exit(2)
        _leave(_usage(error), 2)
    except (KeyboardInterrupt, typer.Abort) as error:
        # Of some file: the parser takes it for Ctrl-D at a question.
        if isinstance(error.__cause__, EOFError):
            raise error.__cause__ from None
        _leave("stopped.", 130)
    sys.exit(code if isinstance(code, int) else 0)


def command_of(made: typer.Typer, path: str = "paceline") -> Any:
    """Return the command of a typer app. `-h` shows its help, and options without a value show no type.

    Help shows the command as `path`.
    """
    root = typer.main.get_command(made)
    left: list[tuple[str, Any]] = [(path, root)]
    while left:
        path, command = left.pop()
        command.context_settings.setdefault("help_option_names", _HELP)
        _begin_with_example(path, command)
        left += [(f"{path} {name}", each) for name, each in getattr(command, "commands", {}).items()]
        options = [
            *command.params,
            command.get_help_option(command.context_class(command, help_option_names=_HELP)),
        ]
        for option in options:
            if getattr(option, "is_flag", False):
                option.metavar = ""
    return root


def _begin_with_example(path: str, command: Any) -> None:
    """Put an example at the top of a command's help: the first one in the help, or the command with its arguments.

    Lists of commands show the help without it.
    """
    paragraphs = [" ".join(each.split()) for each in (command.help or "").split("\n\n")]
    quoted = re.search(rf"`({path}(?: [^`]+)?)`", "\n".join(paragraphs))
    if quoted is None and hasattr(command, "commands") and not command.invoke_without_command:
        return
    needed = [
        each.name.upper() for each in command.params if each.required and not each.opts[0].startswith("-")
    ]
    example = quoted[1] if quoted else " ".join([path, *needed])
    command.short_help = command.short_help or paragraphs[0]
    others = [each for each in paragraphs if each != f"`{example}`"]
    command.help = "\n\n".join([f"Example: {example}", *others])


def _usage(error: Any) -> str:
    """Return the message for an error of the parser. It names the command whose help says more."""
    words: str = getattr(error, "format_message", error.__str__)()
    for theirs, ours in _WORDS.items():
        words = words.replace(theirs, ours)
    words = words.rstrip(".")
    # Named by the class: which package it is in, typer has changed.
    if type(error).__name__ == "MissingParameter" and getattr(error.param, "help", None):
        words += f": {error.param.help.rstrip('.')}"
    words += "" if words.endswith("?") else "."
    where = getattr(error.ctx, "command_path", "paceline") if getattr(error, "ctx", None) else "paceline"
    if where == "paceline":
        return f"{words} `paceline --help` lists the commands, `paceline COMMAND --help` its options."
    return f"{words} `{where} --help` lists its options, `paceline --help` the commands."


def _leave(paragraph: str, code: int) -> NoReturn:
    print(f"paceline: {' '.join(paragraph.split())}", file=sys.stderr)
    sys.exit(code)
