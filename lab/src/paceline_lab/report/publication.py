"""Publishing a finished result: to the terminal, to JSON, and into a folder next to its figures."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from paceline.errors import ConfigurationError
from paceline.given import parse_json

if TYPE_CHECKING:
    from paceline_lab.bench.provenance import Provenance


@dataclasses.dataclass(frozen=True)
class ReportFolder:
    """The folder of a report's files.

    Attributes:
        path: The folder; it exists and can be written to.
    """

    path: Path

    @classmethod
    def prepare(cls, path: Path) -> ReportFolder:
        """Make the folder before the measurement whose result it will hold.

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


def stored_report(path: Path) -> dict[str, Any]:
    """Return the content of a stored report.

    Raises:
        ConfigurationError: It cannot be read, or is none.
    """
    try:
        record = parse_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"the report {path} cannot be read ({error.strerror}). Pass another."
        ) from error
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("samples"), dict):
        raise ConfigurationError(f"{path} is no report of a study: JSON with samples by name. Pass another.")
    return record


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One figure against its target."""

    figure: str
    value: float
    target: float
    unit: str

    @property
    def met(self) -> bool:
        """Return whether the value is on the right side; a target of overlap is a lower bound, all others upper."""
        return self.value >= self.target if self.unit == "of ideal" else self.value <= self.target

    def text(self) -> str:
        """Return one line for the terminal."""
        relation = ">=" if self.unit == "of ideal" else "<="
        word = "met   " if self.met else "MISSED"
        return f"{word} {self.figure}: {self.value:.3f} {self.unit} (target {relation} {self.target})"


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of one benchmark."""

    name: str  # also the file name, e.g. "step_time-resnet50-2ranks"
    question: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]  # among them what this machine cannot show
    config: Any  # a dataclass
    summaries: dict[str, Any]
    samples: dict[str, Any]  # raw
    provenance: Provenance
    place: dict[str, str] = dataclasses.field(default_factory=dict)  # rows on where the ranks ran

    def to_json(self) -> str:
        """Return the report as JSON, one line per innermost list."""
        record = {
            **dataclasses.asdict(self),
            "verdicts": [_verdict_record(verdict) for verdict in self.verdicts],
        }
        return json.dumps(record, indent=1, default=_jsonable)

    def record(self) -> dict[str, Any]:
        """Return the report as it is read back from its file. Pictures are drawn from this."""
        record: dict[str, Any] = json.loads(self.to_json())
        return record


def publish(report: Report, results_folder: Path, as_json: bool) -> Path:
    """Write the JSON file; print the same JSON or a table. Returns the file's path."""
    results_folder.mkdir(parents=True, exist_ok=True)
    path = results_folder / f"{report.name}.json"
    path.write_text(report.to_json() + "\n")
    if as_json:
        print(report.to_json())
    else:
        _print_table(report, path)
    return path


def figure_path(report: Report, results_folder: Path) -> Path:
    """Return where this report's figure goes."""
    return results_folder / f"{report.name}.png"


def _print_table(report: Report, path: Path) -> None:
    console = Console(width=max(Console().width, 120))
    table = Table(title=report.question)
    for index, column in enumerate(report.columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in report.rows:
        table.add_row(*row)
    console.print(table)
    for line in (
        *[verdict.text() for verdict in report.verdicts],
        *[f"note   {note}" for note in report.notes],
    ):
        console.print(line, highlight=False)
    if report.place:
        console.print(
            "place  " + ", ".join(f"{name}: {value}" for name, value in report.place.items()), highlight=False
        )
    origin = report.provenance
    console.print(
        f"{origin.git_hash[:10]}{' (dirty)' if origin.git_dirty else ''}, torch {origin.torch_version}, "
        f"{origin.cpu_model}, {origin.num_cores} cores, {origin.num_ranks} rank(s), "
        f"load {origin.load_average_before} -> {origin.load_average_after}",
        highlight=False,
    )
    console.print(f"samples: {path}", highlight=False, soft_wrap=True)


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    return {**dataclasses.asdict(verdict), "met": verdict.met}


def _jsonable(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} does not go into a benchmark's JSON; convert it first")
