"""The `paceline` command: a file for each longer command, and no torch until a command needs it."""

from __future__ import annotations

from paceline.cli.app import main

__all__ = ["main"]
