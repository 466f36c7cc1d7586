"""`paceline run`: torchrun, with its flags, and errors that say what to do next."""

from __future__ import annotations

import sys
from typing import Any

import typer

SETTINGS: dict[str, Any] = {
    "add_help_option": False,  # torchrun's parser has its own
    "context_settings": {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
    },
}


def run(context: typer.Context) -> None:
    """Start one process of a script per rank, like torchrun and with its flags."""
    from paceline.launch import launch, parse

    launch(parse(context.args), note=_note)


def _note(line: str) -> None:
    print(f"paceline run: {line}", file=sys.stderr)
