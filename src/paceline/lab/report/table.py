"""Rows to a table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column names the row and whose other columns are numbers."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left")
    for row in rows:
        made.add_row(*row)
    return made
