"""Studies of time: variants take turns on the ranks of an emulated cluster, set beside a published figure.

Rules
1. A block holds the variants that are compared; they alternate, ABBA then BAAB. Blocks follow one another.
2. A variant of P ranks uses the first P ranks of the job. The others are at the next variant's barrier, idle.
3. A step is as long as on its slowest rank. What this host's interface sent meanwhile is counted beside it.
4. Afterwards every rank sets its gradients against the mean that is known in advance; times of wrong answers are
   refused.
5. All of a job is measured in one run (`bench.protocol`, rule 2): nothing is kept of one that was stopped.
"""

from __future__ import annotations

import gc
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch.distributed as dist
import typer

from paceline.errors import ConfigurationError
from paceline_lab.bench.layer_profile import Profile, default_profile
from paceline_lab.bench.protocol import ENVIRONMENTS, Allocator, WrongAnswerError, turns
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import ClusterRanks, gather
from paceline_lab.experiments.options import (
    COMPUTE_HELP,
    REPORT_FOLDER,
    AsJson,
    Quick,
    ReportFolder,
    compute_seconds,
)
from paceline_lab.experiments.papers.variants import Phases, Variant, VariantTrainee, cap_flows
from paceline_lab.experiments.runner import Measured, Study, run_study
from paceline_lab.report.look import workload_name
from paceline_lab.report.summary import Summary, slowest_rank

if TYPE_CHECKING:
    from paceline_lab.emulation import ClusterSpec

NumRanks = Annotated[
    int | None,
    typer.Option("--ranks", help="Number of hosts, with one rank each.", show_default="the study's"),
]
Rate = Annotated[
    str | None,
    typer.Option(help="Rate of each host's link, for example 100Mbit.", show_default="the study's"),
]
ComputeS = Annotated[
    float | None,
    typer.Option(parser=compute_seconds, metavar="TIME", help=COMPUTE_HELP, show_default="the study's"),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        help="Number of measuring rounds. Each variant runs twice per round.", show_default="the study's"
    ),
]

NUM_WARM_UP = {"torch": 2}  # cuts its buckets anew after the first; the others settle at once
_COUNTERS = Path("/proc/self/net/dev")
MAX_RANKS = 64
PAPERS_NOTE = "Paper: Li et al. 2020, figure {number}."
LIKE_NOTE = "NCCL-like, Gloo-like: in the proportion of communication to computing that it had there."
TIMED = "timed compute: layers sleep as long as the profile says; gradients, hooks and traffic are real"


@dataclass(frozen=True)
class StudyOptions:
    """The options of a study's command line.

    Attributes:
        num_ranks: Hosts of the emulated cluster, one rank each.
        rate: Rate of each host's link, in words such as 100Mbit.
        compute_s: Time of forward and backward of the smaller model of a study.
        num_rounds: Number of rounds. Every variant takes two turns in each.
        quick: Whether this is a smoke test, whose numbers mean nothing.
    """

    num_ranks: int
    rate: str
    compute_s: float
    num_rounds: int
    quick: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= MAX_RANKS:
            raise ConfigurationError(
                f"--ranks {self.num_ranks} is not possible: a study compares 2 to {MAX_RANKS} ranks."
            )
        if self.num_rounds < 1:
            raise ConfigurationError(f"--rounds {self.num_rounds} measures nothing. Pass 1 or more.")
        if not 0 < self.compute_s < 60:
            raise ConfigurationError(
                f"--compute-s {self.compute_s} is not possible: pass more than 0 and less than 60 s."
            )
        self.cluster()

    def cluster(self) -> ClusterSpec:
        """Return the hosts, one rank each, that a study runs on."""
        from paceline_lab.emulation import ClusterSpec  # not for --help

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
class Block:
    """Variants of one model that take turns.

    Attributes:
        label: Name in a report.
        profile: Times of the layers.
        scale: Divides the gradients' bytes.
        variants: Variants that take turns.
    """

    label: str
    profile: Profile
    scale: float
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class StudyConfig:
    """The measurements of one job of ranks."""

    blocks: tuple[Block, ...]
    num_rounds: int


@dataclass(frozen=True)
class VariantOutcome:
    """The result of one variant.

    Attributes:
        block: Label of its block.
        variant: Settings of the variant.
        per_rank: Phases of all timed steps, by rank.
        sent_bytes: Bytes that rank 0's interface sent in all timed steps, headers and acknowledgements included.
        num_buckets: Number of buckets; 0 without buckets.
        error: Largest relative distance of a rank's gradients from the exact mean.
    """

    block: str
    variant: Variant
    per_rank: tuple[Phases, ...]
    sent_bytes: int
    num_buckets: int
    error: float

    @property
    def steps_s(self) -> list[float]:
        """Length of each step: the slowest rank's."""
        return slowest_rank([phases.totals_s() for phases in self.per_rank])

    @property
    def step(self) -> Summary:
        return Summary.of(self.steps_s)

    @property
    def sent_bytes_per_step(self) -> float:
        return self.sent_bytes / len(self.steps_s)

    def phase_s(self, name: str) -> float:
        """Return the median over steps of the slowest rank's phase."""
        return Summary.of(slowest_rank([getattr(phases, name) for phases in self.per_rank])).median


Options = TypeVar("Options", bound=StudyOptions)


class TimeStudy(Study[Options]):
    """A figure of a paper on time, measured again.

    Attributes:
        name: Name of the study and of its files.
        figure: Figure of the paper.
        defaults: Options where the user gives none.
        quick: Options for `--quick`.
    """

    name: str
    defaults: Options
    quick: Options

    def report_name(self, options: Options) -> str:
        """Return the study's name; what `--quick` finds lies beside what was measured."""
        return f"study-{self.name}" + ("-quick" if options.quick else "")

    def main(
        self,
        ranks: NumRanks = None,
        rate: Rate = None,
        compute_s: ComputeS = None,
        rounds: Rounds = None,
        quick: Quick = False,
        report_folder: ReportFolder = REPORT_FOLDER,
        as_json: AsJson = False,
    ) -> None:
        """A figure of a paper, measured on emulated hosts beside the published one."""
        given = {"num_ranks": ranks, "rate": rate, "compute_s": compute_s, "num_rounds": rounds}
        run_study(self, self.given(quick, given), report_folder, as_json)

    def given(self, quick: bool, given: Mapping[str, Any]) -> Options:
        """Return the study's own options, but for those that are not None."""
        base = self.quick if quick else self.defaults
        return replace(base, **{name: value for name, value in given.items() if value is not None})


class ClusterStudy(TimeStudy[StudyOptions]):
    """A study whose variants take turns on one emulated cluster."""

    @abstractmethod
    def blocks(self, options: StudyOptions) -> tuple[Block, ...]:
        """Return what is measured on the cluster of the options."""

    def measure(self, options: StudyOptions) -> Measured:
        """Run all blocks in one job."""
        config = StudyConfig(self.blocks(options), options.num_rounds)
        title = f"{self.name} on {options.num_ranks} ranks"
        outcomes, place = run_blocks(options.cluster(), config, title)
        samples = {"outcomes": [record(outcome) for outcome in outcomes]}
        return Measured(outcomes, samples, how(config.blocks), place, options.num_ranks)


def run_blocks(
    cluster: ClusterSpec, config: StudyConfig, title: str
) -> tuple[list[VariantOutcome], dict[str, str]]:
    """Run blocks on a cluster that stands meanwhile; returns checked outcomes and where it was."""
    with ClusterRanks(cluster) as ranks:
        outcomes = ranks.run(measure, config, title, ENVIRONMENTS[Allocator.KEEP])[0]
        place = ranks.describe()
    check(outcomes)
    return outcomes, place


def measure(config: StudyConfig, tell: TellProgress) -> list[VariantOutcome]:
    """Run all blocks. Collective; every rank returns the same."""
    groups = _make_groups(config)
    num_turns = sum(2 * config.num_rounds * len(block.variants) for block in config.blocks)
    has_caps = any(v.flow_bytes_per_s is not None for block in config.blocks for v in block.variants)
    done = 0
    outcomes: list[VariantOutcome] = []
    for block in config.blocks:
        trainees = [_trainee(block, variant, groups) for variant in block.variants]
        for trainee in trainees:
            if trainee is not None:
                for _ in range(NUM_WARM_UP.get(trainee.variant.side, 1)):
                    trainee.step()
        gc.collect()
        phases = [Phases() for _ in trainees]
        sent = [0] * len(trainees)
        for turn in turns(len(trainees), config.num_rounds):
            trainee = trainees[turn.side_index]
            if trainee is not None:
                if has_caps:
                    cap_flows(trainee.variant.flow_bytes_per_s)
                before = _sent_bytes()
                trainee.step(phases[turn.side_index])
                dist.barrier(trainee.group)  # behind what a slow link's queue still holds
                sent[turn.side_index] += _sent_bytes() - before
            done += 1
            tell(done / (num_turns + 1))
        errors = [0.0 if trainee is None else trainee.error() for trainee in trainees]
        everyone = gather((phases, sent, errors))
        for i, variant in enumerate(block.variants):
            first = trainees[i]
            outcomes.append(
                VariantOutcome(
                    block.label,
                    variant,
                    tuple(everyone[rank][0][i] for rank in range(variant.num_ranks)),
                    everyone[0][1][i],
                    0 if first is None else first.num_buckets(),
                    max(mine[2][i] for mine in everyone),
                )
            )
        del trainees, trainee
        gc.collect()
    return outcomes


def check(outcomes: Sequence[VariantOutcome]) -> None:
    """Refuse times of wrong answers.

    Raises:
        WrongAnswerError: A variant's gradients are not the mean.
    """
    for outcome in outcomes:
        if not outcome.error <= outcome.variant.tolerance:
            raise WrongAnswerError(
                f"{outcome.block}: the gradients of {outcome.variant} are {outcome.error:.2g} away from the mean over "
                f"the ranks, more than {outcome.variant.tolerance:g}, so its times mean nothing."
            )


def _make_groups(config: StudyConfig) -> dict[int, list[dist.ProcessGroup]]:
    """Groups of the first P ranks, as many as any variant of P ranks uses. Collective, in one order."""
    wanted: dict[int, int] = {}
    for block in config.blocks:
        for variant in block.variants:
            wanted[variant.num_ranks] = max(wanted.get(variant.num_ranks, 0), variant.num_groups)
    return {
        num_ranks: [dist.new_group(list(range(num_ranks))) for _ in range(number)]
        for num_ranks, number in sorted(wanted.items())
    }


def _trainee(
    block: Block, variant: Variant, groups: dict[int, list[dist.ProcessGroup]]
) -> VariantTrainee | None:
    if dist.get_rank() >= variant.num_ranks:
        return None
    return VariantTrainee(
        variant, block.profile, block.scale, groups[variant.num_ranks][: variant.num_groups]
    )


def _sent_bytes() -> int:
    """Return what this host's link has sent; without a link, what this machine's loopback has sent."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    for line in _COUNTERS.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0


def record(outcome: VariantOutcome) -> dict[str, Any]:
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


def emulated(record: Mapping[str, Any]) -> str:
    """Say on which emulated cluster a stored report was measured, for the note below its picture."""
    place = record["place"]
    hosts = place["hosts x ranks"].split(" x ")[0]
    rates = "" if ": " in place["rate"] else f", links of {place['rate']}"
    return f"{hosts} emulated hosts{rates}; layers sleep, gradients and traffic are real"


def case_name(label: str) -> str:
    """Return a model and a proportion, "resnet50, NCCL-like", as they stand above a panel."""
    workload, _, rest = label.partition(", ")
    return f"{workload_name(workload)}, {rest}"
