"""Sides of `forward_overlap`, and the timing of a turn: consecutive steps without a barrier, and the drain.

Every side trains the same workload: a model whose layers sleep, or one that computes.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigurationError
from paceline.optim import overlap
from paceline_lab.bench.layer_profile import Profile
from paceline_lab.bench.other_libraries import Parallel
from paceline_lab.bench.protocol import WrongAnswerError
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import gather
from paceline_lab.bench.sides import NUM_BATCHES, SEED, digest, parallelise, parse_sides, wrap
from paceline_lab.bench.timed_model import (
    Stopwatch,
    TimedModel,
    TimedWorkload,
    gradient_bytes,
    workload_bytes,
)
from paceline_lab.experiments.runner import train_in_turn
from paceline_lab.experiments.step.forward_overlap_floor import Layer
from paceline_lab.report.summary import slowest_rank
from paceline_lab.workloads import Workload, make_workload

WARM_UP_STEPS = 8  # three before the ranks agree on an order, three before they do so again, two with it
UNDECIDED_STEPS = 8
LEAST_STEPS = 3  # of a turn, so that an interval is left besides the first one
FORWARD, ALONE = "ours-forward", "none"
TOLERANCE = 1e-6  # relative, of the gradients' mean: rounding in another order of sums


@dataclass(frozen=True)
class Config:
    """The settings of a measurement.

    Attributes:
        workload: Name of the workload.
        profile: Time that each layer sleeps; None: the workload computes.
        side_names: Sides in the order of the report.
        num_rounds: Number of rounds. Every side has two turns in each.
        num_steps: Consecutive steps of a turn.
        scale: Divisor of the gradients' bytes; timed compute only.
        is_forced: Whether the overlap is on without asking whether it pays.
        slow_rank_ratio: Factor of the last rank's sleep.
        jitter_ratio: Part of its time by which each layer's sleep varies, uniformly.
        quick: Whether the workload has its smallest size; real compute only.
    """

    workload: str
    profile: Profile | None
    side_names: tuple[str, ...]
    num_rounds: int
    num_steps: int
    scale: float = 1.0
    is_forced: bool = False
    slow_rank_ratio: float = 1.0
    jitter_ratio: float = 0.0
    quick: bool = False

    def __post_init__(self) -> None:
        if self.is_uneven and self.profile is None:
            raise ConfigurationError(
                "--slow-rank and --jitter change sleeps; with --compute real no rank sleeps."
            )
        if self.num_steps < LEAST_STEPS:
            raise ConfigurationError(
                f"--steps {self.num_steps} leaves no step in the steady state: a turn's first one waits for nothing, "
                f"and its last one for everything. Pass {LEAST_STEPS} or more."
            )
        if not 0 <= self.jitter_ratio <= 1 or not 0 < self.slow_rank_ratio < float("inf"):
            raise ConfigurationError(
                f"--jitter {self.jitter_ratio} is no share from 0 to 1, or --slow-rank {self.slow_rank_ratio} is not "
                "above 0."
            )

    @property
    def is_uneven(self) -> bool:
        """Return whether ranks or steps differ."""
        return (self.slow_rank_ratio, self.jitter_ratio) != (1.0, 0.0)

    @property
    def num_bytes(self) -> int:
        """Float32 bytes of all gradients."""
        return workload_bytes(self.workload, self.profile, self.scale, quick=self.quick)

    def layers(self) -> list[Layer]:
        """Return each layer's times on the slowest rank; none without a profile."""
        if self.profile is None:
            return []
        slow = max(1.0, self.slow_rank_ratio)
        return [
            Layer(
                layer.forward_s * slow,
                layer.backward_s * slow,
                gradient_bytes(Profile(self.workload, "", (layer,), 0.0), self.scale),
            )
            for layer in self.profile.layers
        ]

    def make(self, rank: int) -> Workload:
        """Return the workload of one rank."""
        if self.profile is None:
            return make_workload(self.workload, self.quick)
        slow = self.slow_rank_ratio if rank == dist.get_world_size() - 1 else 1.0
        return UnevenWorkload(self.profile, rank, self.scale, slow, self.jitter_ratio)


def parse_names(text: str) -> tuple[str, ...]:
    """Turn "torch,ours-forward" into sides; raise ConfigurationError for one that cannot be measured here."""
    names = tuple(name.strip() for name in text.split(","))
    parse_sides(",".join(name for name in names if name != FORWARD) or "torch")
    return names


# ---- layers that sleep


class UnevenStopwatch(Stopwatch):
    """Spends a rank's own times: `slow` times as long, each up to `jitter` of it more or less."""

    def __init__(self, slow: float, jitter: float, seed: int) -> None:
        super().__init__()
        self._slow, self._jitter, self._dice = slow, jitter, random.Random(seed)

    def spend(self, length_s: float) -> None:
        super().spend(length_s * self._slow * self._dice.uniform(1 - self._jitter, 1 + self._jitter))


class ProportionalSleep(torch.optim.Optimizer):
    """Takes as long as the share of the parameters that it is given, and changes nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], step_s: float) -> None:
        super().__init__(parameters, {})
        self.step_s = step_s
        self.num_elements = sum(p.numel() for group in self.param_groups for p in group["params"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        mine = sum(p.numel() for group in self.param_groups for p in group["params"])
        time.sleep(self.step_s * mine / self.num_elements)


@dataclass(frozen=True)
class UnevenWorkload(TimedWorkload):
    """A profile as a workload, on a rank of its own pace; its optimizer can step one bucket at a time."""

    slow_ratio: float = 1.0
    jitter_ratio: float = 0.0

    def make_model(self) -> TimedModel:
        """Return the model."""
        stopwatch = UnevenStopwatch(self.slow_ratio, self.jitter_ratio, self.rank)
        return TimedModel(self.profile, self.rank, self.scale, stopwatch)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> ProportionalSleep:  # type: ignore[override]
        """Return what takes as long as an optimizer."""
        return ProportionalSleep(parameters, self.profile.optimizer_s)


# ---- sides


class Trainee:
    """One side."""

    def __init__(self, name: str, config: Config) -> None:
        torch.manual_seed(SEED)
        rank = dist.get_rank()
        self.workload = config.make(rank)
        self.module = self.workload.make_model()
        self.batches = [self.workload.make_batch(rank, step) for step in range(NUM_BATCHES)]
        self.parallel = _parallel(name, config, self.module, self.workload)
        self.is_timed = config.profile is not None
        self.is_forced = config.is_forced
        self.carry: Any = None
        self.num_steps = 0
        self.steady_s: list[float] = []
        self.first_s: list[float] = []  # of each turn
        self.turn_s: list[float] = []  # of each turn, divided by its steps
        self.backward_s: list[float] = []

    @property
    def overlapped(self) -> Any:
        """Return the state of the forward overlap; None where there is none."""
        return getattr(self.parallel.model, "forward_overlap", None)

    def turn(self, num_steps: int, timed: bool = True) -> None:
        """Train some steps, and wait for everything. Collective."""
        dist.barrier()
        beginnings_s, backward_s = [], []
        for _ in range(num_steps):
            beginnings_s.append(time.perf_counter())
            backward_s.append(self._gradients_s())
            self.parallel.step()
        self.settle()
        ended_s = time.perf_counter()
        if timed:
            first_s, *steady_s = [after - before for before, after in itertools.pairwise(beginnings_s)]
            self.first_s.append(first_s)  # began settled: nothing of an earlier step delays it
            self.steady_s += steady_s
            self.turn_s.append((ended_s - beginnings_s[0]) / num_steps)
            self.backward_s += backward_s

    def _gradients_s(self) -> float:
        """Zero gradients, forward and backward; return what backward took."""
        self.parallel.zero_grad()
        batch = self.batches[self.num_steps % NUM_BATCHES]
        self.num_steps += 1
        loss, self.carry = self.workload.loss(self.parallel.model, batch, self.carry)
        before_s = time.perf_counter()
        self.parallel.backward(loss)
        return time.perf_counter() - before_s

    def warm_up(self) -> None:
        """Train until nothing changes any more: forward overlap proves its gain first. Collective."""
        self.turn(WARM_UP_STEPS, timed=False)
        while self.is_undecided:
            self.turn(UNDECIDED_STEPS, timed=False)

    @property
    def is_undecided(self) -> bool:
        if self.overlapped is None or self.overlapped.is_on is False or self.is_forced:
            return False
        return self.overlapped.is_on is None or self.overlapped.seen is None

    def settle(self) -> None:
        """Wait for what is under way."""
        settle = getattr(self.parallel.model, "flush", None)
        if settle is not None:
            settle()

    def answer(self) -> list[torch.Tensor]:
        """Return what must be equal on all ranks: another backward's gradients, or trained parameters. Collective."""
        if self.is_timed:
            self._gradients_s()
        self.settle()
        return self.workload.answer(self.module)

    def error(self, answer: list[torch.Tensor]) -> float:
        """Return how far timed compute's gradients are from the mean, on any rank, relative; else 0. Collective."""
        if not isinstance(self.module, TimedModel):
            return 0.0
        return max(gather(self.module.expected_error(answer, dist.get_world_size())))


def _parallel(name: str, config: Config, module: nn.Module, workload: Workload) -> Parallel:
    if name == FORWARD:
        model = wrap("ours", module, overlap_forward="always" if config.is_forced else True)
        optimizer = workload.make_optimizer(model.parameters())
        return Parallel(model, overlap(optimizer, model, per_parameter=True))
    # parameters of timed models are never read
    arguments = {} if config.profile is None else {"init_sync": False}
    return parallelise(name, module, workload.make_optimizer, **arguments)


@dataclass(frozen=True)
class SideOutcome:
    """One side; lists are of the slowest rank.

    Attributes:
        steady_s: Time from a step's beginning to the next one's, without the first of each turn.
        first_s: Times of the first steps: shorter, if later ones wait for what an earlier step has put off.
        turn_s: Time of each turn, until everything has arrived, divided by its steps.
        backward_s: Time of every step's backward.
    """

    name: str
    steady_s: list[float]
    first_s: list[float]
    turn_s: list[float]
    backward_s: list[float]
    is_on: bool | None
    predicted: dict[str, float] | None
    seen: dict[str, float] | None
    error: float
    ranks_equal: bool

    def check(self) -> None:
        """Refuse times of wrong answers."""
        if self.name != ALONE and not (self.ranks_equal and self.error <= TOLERANCE):
            raise WrongAnswerError(
                f"the gradients of {self.name} are {self.error:.2g} away from the mean over the ranks, and the ranks' "
                f"{'are equal' if self.ranks_equal else 'differ'}: its times mean nothing."
            )


def measure(config: Config, tell: TellProgress) -> list[SideOutcome]:
    """Train all sides in turn. Collective; every rank returns the same."""
    trainees = [Trainee(name, config) for name in config.side_names]
    for trainee in trainees:
        trainee.warm_up()
    train_in_turn(trainees, config.num_rounds, config.num_steps, tell)
    return [_outcome(name, trainee) for name, trainee in zip(config.side_names, trainees, strict=True)]


def _outcome(name: str, trainee: Trainee) -> SideOutcome:
    answer, overlapped = trainee.answer(), trainee.overlapped
    return SideOutcome(
        name,
        slowest_rank(gather(trainee.steady_s)),
        slowest_rank(gather(trainee.first_s)),
        slowest_rank(gather(trainee.turn_s)),
        slowest_rank(gather(trainee.backward_s)),
        None if overlapped is None else overlapped.is_on,
        None if overlapped is None or overlapped.gain is None else asdict(overlapped.gain),
        None if overlapped is None or overlapped.seen is None else asdict(overlapped.seen),
        trainee.error(answer),
        len(set(gather(digest(answer)))) == 1,
    )
