"""Variants take turns on one job of ranks: the task that every study runs.

Rules
1. A block holds the variants that are compared; they alternate, ABBA then BAAB. Blocks follow one another.
2. A variant of P ranks uses the first P ranks of the job. The others are at the next variant's barrier, idle.
3. A step is as long as on its slowest rank. What this host's interface sent meanwhile is counted beside it.
4. Afterwards every rank sets its gradients against the mean that is known in advance; times of wrong answers are
   refused.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from paceline.lab.bench.layer_profile import Profile
from paceline.lab.bench.protocol import WrongAnswerError, turns
from paceline.lab.bench.rank_program import TellProgress
from paceline.lab.bench.ranks import gather
from paceline.lab.bench.studies.round_robin_hook import cap_flows
from paceline.lab.bench.studies.variant import Phases, Trainee, Variant
from paceline.lab.report.summary import Summary, slowest_rank

NUM_WARM_UP = {"torch": 2}  # cuts its buckets anew after the first; the others settle at once
_COUNTERS = Path("/proc/self/net/dev")


@dataclass(frozen=True)
class Block:
    """Variants of one model that take turns.

    Attributes:
        label: What it is called in a report.
        profile: How long layers compute.
        scale: Divides the gradients' bytes.
        variants: Who takes turns.
    """

    label: str
    profile: Profile
    scale: float
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class StudyConfig:
    """What a job of ranks measures."""

    blocks: tuple[Block, ...]
    num_rounds: int


@dataclass(frozen=True)
class Outcome:
    """What one variant did.

    Attributes:
        block: Its block's label.
        variant: What was set.
        per_rank: Phases of all timed steps, by rank.
        sent_bytes: What rank 0's interface sent in all timed steps, headers and acknowledgements included.
        num_buckets: 0 without buckets.
        error: The worst rank's distance from the exact mean, relative.
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


def measure(config: StudyConfig, tell: TellProgress) -> list[Outcome]:
    """Run all blocks. Collective; every rank returns the same."""
    groups = _make_groups(config)
    num_turns = sum(2 * config.num_rounds * len(block.variants) for block in config.blocks)
    has_caps = any(v.flow_bytes_per_s is not None for block in config.blocks for v in block.variants)
    done = 0
    outcomes: list[Outcome] = []
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
                Outcome(
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


def check(outcomes: Sequence[Outcome]) -> None:
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


def _trainee(block: Block, variant: Variant, groups: dict[int, list[dist.ProcessGroup]]) -> Trainee | None:
    if dist.get_rank() >= variant.num_ranks:
        return None
    return Trainee(variant, block.profile, block.scale, groups[variant.num_ranks][: variant.num_groups])


def _sent_bytes() -> int:
    """What this host's link has sent; the whole machine's loopback where there is no link."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    for line in _COUNTERS.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0
