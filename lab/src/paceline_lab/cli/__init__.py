"""The laboratory's commands: `paceline bench`, `emulate` and `study`."""

from __future__ import annotations

import typer

from paceline_lab.cli import bench, emulate, studies


def register(app: typer.Typer) -> None:
    """Add the commands to `paceline`'s; the entry point `paceline.commands` names this function."""
    bench.bench.command("study")(studies.paper_figure)
    bench.bench.command("scaling")(studies.scaling)
    app.add_typer(bench.bench)
    app.command("emulate", **emulate.SETTINGS)(emulate.emulate)
    app.add_typer(studies.app, name="study")
