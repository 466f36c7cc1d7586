"""The `paceline` command: one file a command, and no torch until a command needs it."""

from __future__ import annotations

from paceline.cli.app import main

__all__ = ["main"]
