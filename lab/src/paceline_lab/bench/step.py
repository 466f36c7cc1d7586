"""Measure training steps under each side, computing alone and communication alone, in turn.

All sides train in the same processes and alternate (`protocol`). Two more measurements take turns with them: the
model without data parallelism (compute alone) and an all-reduce of its gradients' bytes (communication alone).
`limit` derives the limits from those two.

`timed` compute sleeps (`timed_model`), so any number of ranks fits on two cores. Afterwards every rank checks its
gradients against the mean that is known in advance. `real` compute computes: ranks should not outnumber cores.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from paceline.errors import ConfigurationError
from paceline_lab.bench.layer_profile import Profile
from paceline_lab.bench.protocol import WrongAnswerError, turns
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import gather
from paceline_lab.bench.sides import SIDES, StepTimes, Trainee, bucket_bytes, digest, labels, shown
from paceline_lab.bench.timed_model import TimedModel, TimedWorkload, gradient_bytes, workload_bytes
from paceline_lab.workloads import Workload, make_workload

WARM_UP_STEPS = 3  # torch re-buckets after the first, PowerSGD compresses from the third on
PIECE_BYTES = 25 * 2**20  # of communication alone
_IN_FLIGHT = 4


@dataclass(frozen=True)
class StepConfig:
    """The settings of a measurement of steps.

    Attributes:
        workload: Name of the workload; with a profile, of the model that was recorded.
        side_names: Sides in the order of the report.
        num_rounds: Number of rounds. Every side runs twice in each.
        steps_per_turn: Number of timed steps per turn.
        profile: Computing times of the layers; None: the layers compute.
        scale: Divisor of the gradients' bytes; only with a profile.
        quick: Whether the workload has its smallest size; only without a profile.
        baseline: Index of the side that the others' times are divided by.
        arguments: Arguments of the wrapper by side name, for example `bucket_cap_mb`.
    """

    workload: str
    side_names: tuple[str, ...]
    num_rounds: int
    steps_per_turn: int = 1
    profile: Profile | None = None
    scale: float = 1.0
    quick: bool = False
    baseline: int = 0
    arguments: dict[str, dict[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_rounds < 2:
            raise ConfigurationError(
                f"--rounds {self.num_rounds} gives no spread. Pass 2 or more; 5 shows quartiles."
            )
        if self.steps_per_turn < 1:
            raise ConfigurationError(f"--steps {self.steps_per_turn} measures nothing. Pass 1 or more.")
        if self.profile is None and self.scale != 1:
            raise ConfigurationError(
                "--scale divides the gradients of timed compute; with --compute real it cannot. Drop one of them."
            )
        if self.profile is None:
            make_workload(self.workload)  # refuses an unknown name
        else:
            gradient_bytes(self.profile, self.scale)  # refuses an impossible scale

    @property
    def gradient_bytes(self) -> int:
        """Float32 bytes of all gradients."""
        return workload_bytes(self.workload, self.profile, self.scale, quick=self.quick)

    def make(self, rank: int) -> Workload:
        """Return the workload of one rank."""
        if self.profile is None:
            return make_workload(self.workload, self.quick)
        return TimedWorkload(self.profile, rank, self.scale)


@dataclass(frozen=True)
class SideOutcome:
    """The times of one side, and whether it computed the right gradients.

    Attributes:
        name: Name of the side.
        per_rank: Times of all timed steps, by rank.
        ranks_equal: Whether all ranks ended with the same bits: gradients of timed compute, parameters of real
            compute.
        error: Largest relative distance of a rank's gradients from the exact mean; only for timed compute.
        bucket_bytes: Bytes of each bucket in the order of launch, if the side reports them.
    """

    name: str
    per_rank: tuple[StepTimes, ...]
    ranks_equal: bool
    error: float | None
    bucket_bytes: tuple[int, ...]


@dataclass(frozen=True)
class StepOutcome:
    """The samples of one run; every rank returns the same."""

    alone: tuple[StepTimes, ...]  # by rank
    communication_s: tuple[list[float], ...]  # by rank
    sides: tuple[SideOutcome, ...]
    notes: tuple[str, ...]


class Communication:
    """All gradients' bytes, reduced in pieces behind each other; the pieces share a few buffers."""

    def __init__(self, num_bytes: int, piece_bytes: int = PIECE_BYTES) -> None:
        full, rest = divmod(num_bytes // 4, piece_bytes // 4)
        self._sizes = [piece_bytes // 4] * full + [rest] * (rest > 0)
        self._buffers = [torch.zeros(max(self._sizes)) for _ in range(min(_IN_FLIGHT, len(self._sizes)))]
        self.times_s: list[float] = []

    def step(self, timed: bool = True) -> None:
        """Reduce behind a barrier. Collective."""
        works: list[dist.Work] = []
        dist.barrier()
        start = time.perf_counter()
        for i, size in enumerate(self._sizes):
            if i >= len(self._buffers):
                works[i - len(self._buffers)].wait()
            works.append(dist.all_reduce(self._buffers[i % len(self._buffers)][:size], async_op=True))
        for work in works:
            work.wait()
        if timed:
            self.times_s.append(time.perf_counter() - start)


def measure(config: StepConfig, tell: TellProgress) -> StepOutcome:
    """Train all sides in turn. Collective; every rank returns the same."""
    workload = config.make(dist.get_rank())
    alone = Trainee("none", workload)
    trainees = [_trainee(name, workload, config) for name in config.side_names]
    communication = Communication(config.gradient_bytes)
    for trainee in (alone, *trainees):
        for _ in range(WARM_UP_STEPS):
            trainee.step()
        trainee.rest()
    communication.step(timed=False)
    gc.collect()
    gc.freeze()  # so that no side pays for scanning the others' set-up
    times = [StepTimes() for _ in (alone, *trainees)]
    schedule = list(turns(2 + len(trainees), config.num_rounds))
    for num_done, turn in enumerate(schedule):
        if turn.side_index == 0:
            communication.step()
        else:
            _take_turn((alone, *trainees)[turn.side_index - 1], config, times[turn.side_index - 1])
        tell((num_done + 1) / (len(schedule) + 1))
    return StepOutcome(
        alone=tuple(gather(times[0])),
        communication_s=tuple(gather(communication.times_s)),
        sides=tuple(
            _outcome(name, trainee, own)
            for name, trainee, own in zip(config.side_names, trainees, times[1:], strict=True)
        ),
        notes=workload.notes(),
    )


def _trainee(name: str, workload: Workload, config: StepConfig) -> Trainee:
    arguments = dict(config.arguments.get(name, {}))
    if isinstance(workload, TimedWorkload) and SIDES[name].family in ("torch", "ours"):
        arguments["init_sync"] = False  # parameters of timed models are never read
    return Trainee(name, workload, **arguments)


def _take_turn(trainee: Trainee, config: StepConfig, times: StepTimes) -> None:
    if config.profile is None:
        trainee.step()  # pays for the caches that the other sides left
    for _ in range(config.steps_per_turn):
        trainee.step(times)
    trainee.rest()


def _outcome(name: str, trainee: Trainee, times: StepTimes) -> SideOutcome:
    answer = trainee.last_answer()
    error = None
    if isinstance(trainee.module, TimedModel):
        error = max(gather(trainee.module.expected_error(answer, dist.get_world_size())))
    equal = len(set(gather(digest(answer)))) == 1
    trainee.rest()
    return SideOutcome(name, tuple(gather(times)), equal, error, bucket_bytes(trainee.parallel.model))


def check(outcome: StepOutcome) -> None:
    """Refuse times of wrong answers.

    Raises:
        WrongAnswerError: The ranks of a side disagree, or its mean is not the mean.
    """
    names = map(shown, labels([side.name for side in outcome.sides]))
    for label, side in zip(names, outcome.sides, strict=True):
        if not side.ranks_equal:
            raise WrongAnswerError(
                f"the ranks of {label} ended with different numbers: it does not synchronize, so its times mean "
                "nothing. Leave it out of --vs."
            )
        tolerance = SIDES[side.name].tolerance
        if side.error is not None and tolerance is not None and not side.error <= tolerance:
            raise WrongAnswerError(
                f"the gradients of {label} are {side.error:.2g} away from the mean over the ranks. Its number "
                f"format explains {tolerance:g}, so its times mean nothing. Leave it out of --vs."
            )


def per_round(samples: Sequence[float], steps_per_turn: int) -> list[float]:
    """Return the mean of each round's steps (two turns)."""
    size = 2 * steps_per_turn
    return [sum(samples[at : at + size]) / size for at in range(0, len(samples), size)]
