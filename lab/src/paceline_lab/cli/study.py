"""`paceline study`: lists the experiments of the registry, runs one or all, and draws stored results again."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from paceline_lab.checkout import repository
from paceline_lab.experiments.registry import EXPERIMENTS, drawing_of

Folder = Annotated[Path, typer.Option("--report", help="Folder for the JSON files and figures.")]


class _Studies(typer.core.TyperGroup):
    """The group of studies. It lists them from the registry, and imports a study when it runs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, experiment in EXPERIMENTS.items():
            self.add_command(typer.core.TyperCommand(name, help=experiment.question))

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        name, command, rest = super().resolve_command(context, words)
        return name, self.loaded(name) if name in EXPERIMENTS else command, rest

    def loaded(self, name: str) -> Any:
        """Return an experiment's command with its options."""
        from paceline.cli.app import command_of

        made = typer.Typer(add_completion=False)
        made.command(name)(EXPERIMENTS[name].main())
        return command_of(made, f"paceline study {name}")


app = typer.Typer(name="study", cls=_Studies, help="Run an experiment. Without a name: list them all.")


@app.callback(invoke_without_command=True)
def _list(context: typer.Context) -> None:
    if context.invoked_subcommand is not None:
        return
    for each in EXPERIMENTS.values():
        facts = [f"target: {each.target}"] * bool(each.target) + [f"takes {each.takes}"]
        facts += [f"needs {each.needs}"] * bool(each.needs)
        print(f"{each.name:22}{each.question}\n{'':22}{'; '.join(facts)}")
    print(
        "\n`paceline study NAME --help` lists its options. `all` runs them all, `redraw` draws stored results."
    )


@app.command("all")
def run_all(
    quick: Annotated[
        bool, typer.Option("--quick", help="Quick smoke test. Its results are meaningless.")
    ] = False,
    report: Folder = Path("paceline-report"),
) -> None:
    """Run the experiments one after another, each by a command that is printed; go on after a failure."""
    failed = []
    for experiment in EXPERIMENTS.values():
        if experiment.runs and not experiment.is_possible:
            print(f"\nskipped: {experiment.name} needs {experiment.needs}", flush=True)
            continue
        for options in experiment.runs:
            words = ["study", experiment.name, *shlex.split(options), "--report", str(report)]
            words += ["--quick"] if quick else []
            print(f"\n$ paceline {shlex.join(words)}", flush=True)
            if subprocess.run([sys.executable, "-m", "paceline", *words], check=False).returncode:
                failed.append(f"{experiment.name} {options}".strip())
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


@app.command("redraw")
def redraw(
    report: Annotated[
        Path | None,
        typer.Option(help="Folder of stored reports.", show_default="lab/results of the checkout"),
    ] = None,
) -> None:
    """Draw every picture again from the stored reports; in a checkout those that a page shows. Nothing is measured."""
    from paceline.errors import ConfigurationError

    root = repository()
    if report is None and root is None:
        raise ConfigurationError(
            "there is no checkout whose lab/results could be drawn. Pass a folder: --report."
        )
    folder = report or Path(root or "", "lab/results")
    found = sorted(folder.glob("*.json")) if folder.is_dir() else []
    files = [file for file in found if file.name != "figures.json"]  # says where figures of pages are
    if not files:
        raise ConfigurationError(f"there are no stored reports in {folder}. Pass another folder: --report.")
    for file in files:
        draw = drawing_of(file.stem)
        if report is None and not file.with_suffix(".svg").exists():  # no page shows its picture
            continue
        if draw is not None and draw(json.loads(file.read_text()), file.with_suffix(".png")):
            print(file.with_suffix(".png"), flush=True)
