"""The laboratory's commands: `paceline bench`, `emulate` and `study`."""

from __future__ import annotations

import typer

from paceline_lab.cli import bench, emulate, study


def register(app: typer.Typer) -> None:
    """Add the commands to `paceline`'s; the entry point `paceline.commands` names this function."""
    app.add_typer(bench.bench)
    app.command("emulate", **emulate.SETTINGS)(emulate.emulate)
    app.add_typer(study.app)
