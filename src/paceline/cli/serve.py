"""`paceline serve`: a parameter server by itself, on a host that has a fat link and no ranks."""

from __future__ import annotations

from typing import Annotated

import typer


def serve(
    listen: Annotated[
        str,
        typer.Option(
            help="Address of this machine and port; port 0 takes a free one. Printed once it listens."
        ),
    ] = "127.0.0.1:0",
) -> None:
    """Run a parameter server until it is stopped; ranks name it: paceline run --servers HOST:PORT."""
    from paceline.servers.process import serve_on

    serve_on(listen)
