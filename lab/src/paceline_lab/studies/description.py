"""What every study has: a way to measure, findings, a report and a picture; and how one is run.

Accuracy studies (`large_batch`) and time studies (`cluster_study`) differ in what they measure, in which order, and in
whether a stop keeps what is there. From their findings on they are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline_lab.bench.provenance import collect, load_average
from paceline_lab.report import ReportFolder
from paceline_lab.report.publication import Report, figure_path, publish

Options = TypeVar("Options")


@dataclass(frozen=True)
class Measured:
    """What a study measured.

    Attributes:
        outcomes: For `find`.
        samples: The same, as JSON takes it.
        notes: How it was measured.
        place: Where.
        num_ranks: Of the largest job.
    """

    outcomes: Any
    samples: Mapping[str, Any]
    notes: Sequence[str] = ()
    place: dict[str, str] = field(default_factory=dict)
    num_ranks: int = 1


@dataclass(frozen=True)
class Findings:
    """What follows from the outcomes: a table, and how to read it.

    Attributes:
        question: In one sentence.
        columns: Of the table.
        rows: Of the table.
        notes: How to read it; what differs from the paper, and why.
        summaries: The same as numbers, with the published ones.
    """

    question: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str]
    summaries: Mapping[str, Any]


class Study(ABC, Generic[Options]):
    """One question, and how it is answered from options to a report.

    Attributes:
        figure: Which published one it is; empty if it is none.
    """

    figure: str = ""

    @abstractmethod
    def report_name(self, options: Options) -> str:
        """Return the name of its report, which is that of its files."""

    @abstractmethod
    def measure(self, options: Options) -> Measured:
        """Run it.

        Raises:
            WrongAnswerError: What was timed does not compute what it should.
        """

    @abstractmethod
    def find(self, outcomes: Any, options: Options) -> Findings:
        """Summarise."""

    @abstractmethod
    def draw(self, record: Mapping[str, Any], path: Path) -> object:
        """Draw what was found, beside the published figure where there is one, from the report as it is stored."""

    def publish(self, outcomes: Any, report: Report, folder: Path, as_json: bool) -> None:
        """Write the report as JSON; print the same JSON, or a table."""
        publish(report, folder, as_json)

    def config(self, options: Options) -> Any:
        """Return the options as the report keeps them."""
        return options


def run_study(study: Study[Options], options: Options, folder: Path, as_json: bool) -> Report:
    """Measure, check, summarise, publish, draw.

    Raises:
        ConfigurationError: Something asked for is not possible; nothing was started.
        WrongAnswerError: What was timed does not compute what it should.
    """
    prepared = ReportFolder.prepare(folder)
    load_before = load_average()
    measured = study.measure(options)
    findings = study.find(measured.outcomes, options)
    report = Report(
        name=study.report_name(options),
        question=findings.question + (f" ({study.figure})" if study.figure else ""),
        columns=findings.columns,
        rows=tuple(findings.rows),
        verdicts=(),
        notes=(*findings.notes, *measured.notes),
        config=study.config(options),
        summaries=dict(findings.summaries),
        samples=dict(measured.samples),
        provenance=collect(measured.num_ranks, load_before),
        place=measured.place,
    )
    study.publish(measured.outcomes, report, prepared.path, as_json)
    study.draw(report.record(), figure_path(report, prepared.path))
    return report
