"""The command line's table of contents."""

from __future__ import annotations


def main() -> None:
    """Run the `paceline` command."""
    raise SystemExit("paceline: not yet")
