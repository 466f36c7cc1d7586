"""Runs every experiment the same way: turns of contenders on ranks, provenance, a report, raw samples, a picture.

An experiment is one of two forms. A *function* measures, makes a `Report` and hands it to `conclude`. A `Study` says
separately how to measure, what follows and how to draw; `run_study` puts these together. Both end in `conclude`.
Its name, question and command are in `registry`.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import typer

from paceline_lab.bench.protocol import WrongAnswerError, turns
from paceline_lab.bench.provenance import collect
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import Ranks, choose_place
from paceline_lab.report import ReportFolder
from paceline_lab.report.publication import Report, figure_path, publish

Options = TypeVar("Options")
Run = TypeVar("Run")
Part = TypeVar("Part")

Draw = Callable[[Mapping[str, Any], Path], object]


def conclude(report: Report, folder: Path, as_json: bool, draw: Draw | None = None) -> None:
    """Store the report with its raw samples, print it, and draw it from what was stored."""
    publish(report, folder, as_json)
    if draw is not None:
        draw(report.record(), figure_path(report, folder))


@dataclass(frozen=True)
class Measured:
    """The measurements of a study.

    Attributes:
        outcomes: The argument of `find`.
        samples: The same as JSON.
        notes: Remarks on the method.
        place: Machine or cluster of the measurement.
        num_ranks: Number of ranks of the largest job.
    """

    outcomes: Any
    samples: Mapping[str, Any]
    notes: Sequence[str] = ()
    place: dict[str, str] = field(default_factory=dict)
    num_ranks: int = 1


@dataclass(frozen=True)
class Findings:
    """The conclusions from the outcomes: a table, and how to read it.

    Attributes:
        question: The question of the study, in one sentence.
        columns: Columns of the table.
        rows: Rows of the table.
        notes: Remarks on reading the table; differences from the paper, and why.
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
        figure: Published figure; empty if there is none.
    """

    figure: str = ""

    @abstractmethod
    def report_name(self, options: Options) -> str:
        """Return the name of its report, which is that of its files."""

    @abstractmethod
    def measure(self, options: Options) -> Measured:
        """Run it.

        Raises:
            WrongAnswerError: A timed side does not compute what it should.
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
        WrongAnswerError: A timed side does not compute what it should.
    """
    prepared = ReportFolder.prepare(folder)
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
        provenance=collect(measured.num_ranks),
        place=measured.place,
    )
    study.publish(measured.outcomes, report, prepared.path, as_json)
    study.draw(report.record(), figure_path(report, prepared.path))
    return report


class Trains(Protocol):
    """One side."""

    def turn(self, num_steps: int) -> None:
        """Train so many steps, timed. Collective."""


@contextmanager
def keeping(file: Path) -> Iterator[None]:
    """Let a study that stores each finished run be stopped by Ctrl-C, and say how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        print(
            f"paceline: stopped. Finished runs are in {file}; the same command goes on from there.",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def train_in_turn(trainees: Sequence[Trains], num_rounds: int, num_steps: int, tell: TellProgress) -> None:
    """Give every side two turns in each round, in alternating order (A B B A). Collective."""
    schedule = list(turns(len(trainees), num_rounds))
    for num_done, turn in enumerate(schedule):
        trainees[turn.side_index].turn(num_steps)
        tell((num_done + 1) / len(schedule))


def train_each(sides: Sequence[str], train: Callable[[str], Run], tell: TellProgress) -> dict[str, Run]:
    """Train one side after another; return what each found. Collective."""
    runs = {}
    for place, side in enumerate(sides):
        runs[side] = train(side)
        tell((place + 1) / len(sides))
    return runs


def cluster_or_loopback(hosts: int | None, rate: str, cpu: str = "") -> Ranks:
    """The hosts of an emulated cluster; without any, two ranks on loopback. Not entered yet."""
    if not hosts:
        return choose_place(None, ranks_per_host=2)
    return choose_place(hosts, rate=None if rate == "none" else rate, cpu=cpu or None)


def refuse_unequal(sides: Iterable[str]) -> None:
    """Raise WrongAnswerError if there are sides whose ranks' parameters differ."""
    if unequal := list(sides):
        raise WrongAnswerError(
            f"the ranks' parameters differ with {', '.join(unequal)}: its times mean nothing."
        )


def measured(folder: Path | None, key: object, measure: Callable[[], Part]) -> Part:
    """Return the part kept under `key`, whose text says everything that it depends on; else measure and keep it.

    Args:
        folder: Folder of finished parts, for this version of the code only; None: they are not kept.
        key: Key of the part.
        measure: Returns what can be pickled.
    """
    if folder is None:
        return measure()
    path = folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.part"
    if path.exists():
        kept: Part = pickle.loads(path.read_bytes())
        return kept
    part = measure()
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(part))
    return part
