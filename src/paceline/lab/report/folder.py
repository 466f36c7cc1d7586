"""A folder that holds one run's report."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 120


@dataclass(frozen=True)
class ReportFolder:
    """Where a report's files go.

    Attributes:
        path: The folder; it exists and can be written to.
    """

    path: Path

    @classmethod
    def prepare(cls, path: Path) -> ReportFolder:
        """Make the folder, before the work whose result it is to hold.

        Raises:
            ConfigurationError: It cannot be made or written to.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the report folder {path} cannot be made ({error.strerror}). Pass another one with --report."
            ) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"the report folder {path} is not writable. Pass another one with --report."
            )
        return cls(path)

    def write_rows(self, name: str, rows: object) -> Path:
        """Write `rows` as JSON."""
        path = self.path / name
        path.write_text(json.dumps(rows, indent=2) + "\n")
        return path

    def write_figure(self, name: str, figure: Figure) -> Path:
        """Write a figure as a picture, in the format that the name's ending says."""
        path = self.path / name
        figure.savefig(path, dpi=_DOTS_PER_INCH)
        return path
