"""The command `paceline serve`: run a parameter server until it is stopped."""

from __future__ import annotations

from typing import Annotated

import typer


def register(commands: typer.Typer) -> None:
    """Add `serve` to `paceline`'s commands. The entry point `paceline.commands` names this function."""
    commands.command("serve")(serve)


def serve(
    listen: Annotated[
        str,
        typer.Option(
            help="Address of this machine and port; port 0 takes a free one. Printed once it listens."
        ),
    ] = "127.0.0.1:0",
) -> None:
    """Run a parameter server until it is stopped. Ranks reach it by paceline run --servers HOST:PORT.

    `paceline serve --listen 10.0.0.5:29600`
    """
    from paceline_servers.process import serve_on  # noqa: PLC0415  `paceline --help` does not need it

    serve_on(listen)
