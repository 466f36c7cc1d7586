"""What every study has: options, clusters on which its blocks are measured, a report and a picture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigurationError
from paceline.lab.bench.layer_profile import Profile, default_profile
from paceline.lab.bench.protocol import ENVIRONMENTS, Allocator
from paceline.lab.bench.provenance import collect, load_average
from paceline.lab.bench.ranks import ClusterRanks
from paceline.lab.bench.studies.measure import Block, Outcome, StudyConfig, check, measure
from paceline.lab.report import ReportFolder
from paceline.lab.report.publication import Report, figure_path, publish

if TYPE_CHECKING:
    from paceline.lab.emulation import ClusterSpec

MAX_RANKS = 64
TIMED = "timed compute: layers sleep as long as the profile says; gradients, hooks and traffic are real"


@dataclass(frozen=True)
class StudyOptions:
    """What the command line says.

    Attributes:
        num_ranks: Hosts of the emulated cluster, one rank each.
        rate: Of each host's link, in words such as 100Mbit.
        compute_s: Forward and backward of the smaller model of a study.
        num_rounds: Every variant takes two turns in each.
        quick: Does it run? Its numbers mean nothing.
    """

    num_ranks: int
    rate: str
    compute_s: float
    num_rounds: int
    quick: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= MAX_RANKS:
            raise ConfigurationError(
                f"--ranks {self.num_ranks} cannot be: a study compares communication among 2 to {MAX_RANKS} ranks."
            )
        if self.num_rounds < 1:
            raise ConfigurationError(f"--rounds {self.num_rounds} measures nothing. Pass 1 or more.")
        if not 0 < self.compute_s < 60:
            raise ConfigurationError(
                f"--compute-s {self.compute_s} cannot be: pass more than 0 and less than 60 s."
            )
        self.cluster()

    def cluster(self) -> ClusterSpec:
        """Return the hosts, one rank each, that a study runs on."""
        from paceline.lab.emulation import ClusterSpec  # noqa: PLC0415  # not for --help

        return ClusterSpec.parse(hosts=self.num_ranks, rate=self.rate, offload=True, queue="1MiB")

    @property
    def rate_bytes_per_s(self) -> float:
        rate = self.cluster().rate_bits_per_s[0]
        assert rate is not None
        return rate / 8

    def profile(self, workload: str, factor: float = 1.0) -> Profile:
        """Return a model that computes `factor` times `compute_s`."""
        return default_profile(workload).taking(self.compute_s * factor)


@dataclass(frozen=True)
class Findings:
    """What a study has to say.

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


@dataclass(frozen=True)
class Measured:
    """What a study's ranks brought home.

    Attributes:
        outcomes: For `find`.
        samples: The same, as JSON takes it.
        notes: How it was measured.
        place: Where.
        num_ranks: Of the largest job.
    """

    outcomes: Sequence[Any]
    samples: Sequence[Any]
    notes: Sequence[str]
    place: dict[str, str]
    num_ranks: int


class Study(ABC):
    """One figure of a paper, measured again.

    Attributes:
        name: Of the study and of its files.
        figure: Which one it is.
        defaults: Its options where the user gives none.
        quick: Its options for `--quick`.
    """

    name: str
    figure: str
    defaults: StudyOptions
    quick: StudyOptions

    @abstractmethod
    def measure(self, options: StudyOptions) -> Measured:
        """Run it.

        Raises:
            WrongAnswerError: A variant's gradients are not the mean.
        """

    @abstractmethod
    def find(self, outcomes: Sequence[Any], options: StudyOptions) -> Findings:
        """Summarise."""

    @abstractmethod
    def draw(self, findings: Findings, path: Path) -> None:
        """Draw the published figure and ours."""


class ClusterStudy(Study):
    """A study whose variants take turns on one emulated cluster."""

    @abstractmethod
    def blocks(self, options: StudyOptions) -> tuple[Block, ...]:
        """Return what is measured on the cluster of the options."""

    def measure(self, options: StudyOptions) -> Measured:
        """Run all blocks in one job."""
        config = StudyConfig(self.blocks(options), options.num_rounds)
        title = f"{self.name} on {options.num_ranks} ranks"
        outcomes, place = run_blocks(options.cluster(), config, title)
        return Measured(
            outcomes, [record(outcome) for outcome in outcomes], how(config.blocks), place, options.num_ranks
        )


def run_blocks(cluster: ClusterSpec, config: StudyConfig, title: str) -> tuple[list[Outcome], dict[str, str]]:
    """Run blocks on a cluster that stands meanwhile; returns checked outcomes and where it was."""
    with ClusterRanks(cluster) as ranks:
        outcomes = ranks.run(measure, config, title, ENVIRONMENTS[Allocator.KEEP])[0]
        place = ranks.describe()
    check(outcomes)
    return outcomes, place


def run_study(study: Study, options: StudyOptions, folder: Path, as_json: bool) -> Report:
    """Measure, check, publish, draw.

    Raises:
        ConfigurationError: Something asked for is not possible; nothing was started.
        WrongAnswerError: A variant's gradients are not the mean.
    """
    prepared = ReportFolder.prepare(folder)
    load_before = load_average()
    measured = study.measure(options)
    findings = study.find(measured.outcomes, options)
    report = Report(
        name=f"study-{study.name}" + ("-quick" if options.quick else ""),
        question=f"{findings.question} ({study.figure})",
        columns=findings.columns,
        rows=tuple(findings.rows),
        verdicts=(),
        notes=(*findings.notes, *measured.notes),
        config=options,
        summaries=dict(findings.summaries),
        samples={"outcomes": measured.samples},
        provenance=collect(measured.num_ranks, load_before),
        place=measured.place,
    )
    publish(report, prepared.path, as_json)
    study.draw(findings, figure_path(report, prepared.path))
    return report


def record(outcome: Outcome) -> dict[str, Any]:
    """Return raw samples as JSON takes them."""
    variant = {key: value for key, value in vars(outcome.variant).items() if value is not None}
    return {
        "block": outcome.block,
        "variant": variant,
        "steps_s": [round(step, 6) for step in outcome.steps_s],
        "sent_bytes_per_step": round(outcome.sent_bytes_per_step),
        "num_buckets": outcome.num_buckets,
        "error": outcome.error,
    }


def how(blocks: Sequence[Block]) -> list[str]:
    """Return what a reader has to know of any timed study."""
    scales = dict.fromkeys(f"{block.label} by {block.scale:.0f}" for block in blocks)
    return [
        TIMED,
        f"bytes of gradients and bucket caps are divided, so that a slow link suffices: {', '.join(scales)}",
    ]
