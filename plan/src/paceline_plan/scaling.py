"""Predicts how a workload scales over growing clusters: steps, efficiency, cost, what limits and what helps.

Data parallelism scales weakly: every device keeps its batch. So the work of a step grows with the devices, and the
time of a step should not. Efficiency is the step of one device over the step of N; throughput is N batches a step.

The limit is simulated, not guessed. The step is simulated again with infinite rates, without latency, and with ranks
that do not vary. What would save most is the limit. What helps is found in the same way, among what a user can do.

The band contains what the simulator cannot know. Each prediction is repeated with the computing of other recorded
steps, and with links and latencies that are better and worse than given. An error of the model is added, as large as
its errors on emulated clusters were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from paceline.errors import ConfigurationError
from paceline.planning.bucket_assignment import MEBIBYTE
from paceline_plan.deployment import Cluster, ReductionPlan
from paceline_plan.round_patterns import candidates
from paceline_plan.simulator import Simulation, simulate
from paceline_plan.workload import RecordedWorkload

MODEL_ERROR = 0.06  # standard deviation of the logarithm; docs/notebook/plan.md
KNEE = 0.5  # what the last device added must bring, of what the first one brings
_NUM_STEPS = 30
_NUM_DRAWS = 20
_STEPS_OF_A_DRAW = 5
_NEGLIGIBLE = 0.03  # of a step
# of the median, the ninetieth percentile of recorded steps, above which a busy machine is suspected
BUSY_RATIO = 1.2
_BETWEEN = (1 / math.sqrt(2), 1.0, math.sqrt(2))
_RATE_RANGE, _LATENCY_RANGE = (0.75, 1.1), (0.5, 2.0)
Tell = Callable[[float], None]
Grow = Callable[[int], Cluster]


@dataclass(frozen=True)
class Setup:
    """One case to simulate: one device's step, on so many devices, reduced in this way."""

    workload: RecordedWorkload
    cluster: Cluster
    plan: ReductionPlan

    def simulate(self, seed: int = 0, num_steps: int = _NUM_STEPS) -> Simulation:
        return simulate(self.workload, self.cluster, self.plan, num_steps=num_steps, seed=seed)

    def step_s(self) -> float:
        """Simulate the step without jitter and loss, so that a search does not depend on draws."""
        calm, quiet = replace(self.workload, relative_steps=()), self.cluster.with_links(loss_ratio=0.0)
        return simulate(calm, quiet, self.plan).step_s


@dataclass(frozen=True)
class Saving:
    """A change of the training, and the fraction of the time per sample that it saves."""

    what: str
    ratio: float


@dataclass(frozen=True)
class Point:
    """A prediction for one number of devices."""

    num_ranks: int  # devices
    step_s: float  # median; of a step with all its micro-steps
    low_s: float  # the tenth percentile of the band
    high_s: float  # the ninetieth
    exposed_s: float  # of the step, the communication that backward does not hide
    efficiency: float  # the step of one device over this one
    speed_up: float  # throughput over that of one device
    samples_per_s: float | None  # None if their number per step is unknown
    epoch_s: float | None  # None likewise, or if their number per epoch is unknown
    epoch_cost: float | None  # in the price's currency; None likewise
    limit: str  # what limits, in words
    savings: tuple[Saving, ...]  # what would help, the most first


@dataclass(frozen=True)
class Question:
    """The question that a forecast answers."""

    workload: RecordedWorkload  # one device's step
    grow: Grow  # the cluster of N devices
    plan: ReductionPlan  # how gradients are reduced
    counts: tuple[int, ...]  # numbers of devices, ascending
    epoch_samples: int | None = None  # none if epochs are not asked for
    price_per_hour: float | None = None  # of one device
    seed: int = 0  # of everything drawn


@dataclass(frozen=True)
class Answer:
    """Predictions, and where they stop being worth it."""

    points: tuple[Point, ...]  # one a number of devices
    knee: int  # the largest number at which a device added still brings half of what the first one brings


def doubling_counts(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and `most` itself."""
    if most < 1:
        raise ConfigurationError(f"--to {most} must be 1 or more.")
    return tuple(sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most}))


def predict_scaling(question: Question, tell: Tell | None = None) -> Answer:
    """Predict every number of devices; the step of each is simulated once."""

    def setup(num_ranks: int) -> Setup:
        return Setup(question.workload, question.grow(num_ranks), question.plan)

    alone = setup(1).simulate(question.seed)
    if alone.step_s <= 0:
        raise ConfigurationError(
            f"the workload {question.workload.name} takes no time at all, so nothing can be compared with it. Record "
            "it again with `paceline plan record SCRIPT`."
        )
    points = []
    for number, num_ranks in enumerate(question.counts):
        here = setup(num_ranks)
        found = alone if num_ranks == 1 else here.simulate(question.seed)
        points.append(_point(question, here, found, alone.step_s))
        if tell is not None:
            tell((number + 1) / len(question.counts))
    return Answer(tuple(points), _knee(points))


def _point(question: Question, setup: Setup, found: Simulation, alone_s: float) -> Point:
    workload, num_ranks, step_s = question.workload, setup.cluster.num_ranks, found.step_s
    low_s, high_s = _band(setup, found, question.seed)
    samples_per_s = epoch_s = cost = None
    if workload.samples_per_step is not None:
        of_a_micro_step = workload.samples_per_step / workload.num_micro_steps
        samples_per_s = num_ranks * of_a_micro_step * question.plan.sync_every / step_s
        if question.epoch_samples is not None:
            epoch_s = question.epoch_samples / samples_per_s
            if question.price_per_hour is not None:
                cost = epoch_s / 3600 * num_ranks * question.price_per_hour
    return Point(
        num_ranks,
        step_s,
        low_s,
        high_s,
        found.exposed_s,
        alone_s / step_s,
        num_ranks * alone_s / step_s,
        samples_per_s,
        epoch_s,
        cost,
        what_limits(setup, found, question.seed),
        what_helps(setup, found, question.seed),
    )


def _band(setup: Setup, found: Simulation, seed: int) -> tuple[float, float]:
    """Return percentiles of the step under other links, other computing, and the model's error."""
    random = np.random.default_rng(seed)
    recorded = setup.workload.relative_steps
    usual = float(np.median(recorded)) if recorded else 1.0
    middle_s = median(found.steps_s[:_STEPS_OF_A_DRAW])
    drawn = []
    for _ in range(_NUM_DRAWS):
        faster = random.uniform(*_RATE_RANGE)
        latency = math.exp(random.uniform(*np.log(_LATENCY_RANGE)))
        computing = float(np.median(random.choice(recorded, len(recorded)))) / usual if recorded else 1.0
        other = replace(
            setup,
            workload=setup.workload.taking(computing),
            cluster=setup.cluster.with_links(faster=faster, latency_ratio=latency),
        )
        other_s = other.simulate(seed, _STEPS_OF_A_DRAW).step_s  # the same seed, so the same stragglers
        error = math.exp(random.normal(0.0, MODEL_ERROR)) if setup.cluster.num_ranks > 1 else 1.0
        drawn.append(other_s / middle_s * error * found.step_s)
    low_s, high_s = np.quantile(drawn, (0.1, 0.9))
    return min(float(low_s), found.step_s), max(float(high_s), found.step_s)


def quantiles(relative_steps: Sequence[float]) -> tuple[float, float]:
    """Return the tenth and the ninetieth percentile of recorded steps, over their median."""
    low, high = np.quantile(relative_steps, (0.1, 0.9))
    return float(low), float(high)


def what_limits(setup: Setup, found: Simulation, seed: int = 0) -> str:
    """Return what keeps the step from being shorter: computing, or what would save most if it were gone."""
    workload, cluster, plan = setup.workload, setup.cluster, setup.plan
    if cluster.num_ranks == 1:
        return "computing (one rank)"
    no_latency = replace(cluster.with_links(latency_ratio=0.0), stall_s=0.0, probe_s=0.0)
    others = {
        "unequal devices": replace(setup, cluster=replace(cluster, speeds=())),
        "recorded steps that vary": replace(setup, workload=replace(workload, relative_steps=())),
        "latency": replace(setup, cluster=no_latency),
    }
    if plan.servers is not None:
        free = replace(plan, servers=replace(plan.servers, bytes_per_s=math.inf))
        others["the parameter servers' links"] = replace(setup, plan=free)
    where = found.costs[-1].bottleneck if found.costs else "the workers' links"
    others[where] = replace(setup, cluster=cluster.with_links(faster=math.inf))
    saved = {
        name: 1 - other.simulate(seed).step_s / found.step_s
        for name, other in others.items()
        if other != setup
    }
    worst = max(saved, key=lambda name: saved[name])
    if saved[worst] >= _NEGLIGIBLE:
        return f"{worst} ({saved[worst]:.0%})"
    exposed_ratio = found.exposed_s / found.step_s
    return "computing" if exposed_ratio < _NEGLIGIBLE else f"several links alike ({exposed_ratio:.0%})"


def what_helps(setup: Setup, found: Simulation, seed: int = 0) -> tuple[Saving, ...]:
    """Return changes that a user could make, with the time per sample that each saves; negligible ones are left out."""
    if setup.cluster.num_ranks == 1:
        return ()
    savings = [
        Saving(what, 1 - other.simulate(seed).micro_step_s / found.micro_step_s)
        for what, other in _remedies(setup)
        if other != setup
    ]
    return tuple(sorted((x for x in savings if x.ratio >= 0.01), key=lambda x: -x.ratio))


def _remedies(setup: Setup) -> Iterable[tuple[str, Setup]]:
    cluster, plan = setup.cluster, setup.plan

    def planned(**changes: Any) -> Setup:
        return replace(setup, plan=replace(plan, **changes))

    if plan.servers is None:
        caps = best_caps(setup).plan.caps_bytes
        size = (
            math.ceil(setup.workload.gradient_bytes / MEBIBYTE)
            if caps[-1] == math.inf
            else caps[-1] / MEBIBYTE
        )
        words = f"bucket_cap_mb={size:.3g}"
        yield words, planned(caps_bytes=caps)
        if not plan.priority and plan.sync_every == 1:
            yield "overlap_forward=True", planned(priority=True)
        algorithm = best_algorithm(setup).plan.algorithm
        yield f"the all-reduce {algorithm}", planned(algorithm=algorithm)
    else:
        servers = replace(plan.servers, number=2 * plan.servers.number)
        yield f"--servers {servers.number}", planned(servers=servers)
    yield 'compression="bf16"', planned(payload_ratio=plan.payload_ratio / 2)
    if not plan.priority:
        doubled = 2 * plan.sync_every
        yield f"{doubled} micro-batches per step (model.accumulate)", planned(sync_every=doubled)
    yield "links twice as fast", replace(setup, cluster=cluster.with_links(faster=2.0))
    if len(set(cluster.speeds)) > 1 and not plan.shares:
        total = sum(cluster.speeds)
        shares = tuple(speed / total for speed in cluster.speeds)
        yield 'balance="auto"', planned(shares=shares)


@dataclass(frozen=True)
class Found:
    """The best plan of a search, and its predicted step."""

    plan: ReductionPlan
    step_s: float


def best_caps(setup: Setup) -> Found:
    """Return the bucket caps with the shortest predicted step. Ties go to the larger cap.

    The search is a grid that is refined once. A step's time is no smooth function of the cap (buckets are cut between
    gradients), so nothing cleverer is trusted. Some hundred simulated steps, well below a second.
    """
    steps_s: dict[tuple[float, ...], float] = {}

    def best_of(caps: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
        for each in caps:
            if each not in steps_s:
                steps_s[each] = replace(setup, plan=replace(setup.plan, caps_bytes=each)).step_s()
        return min(steps_s, key=lambda each: (steps_s[each], -each[-1]))

    best = best_of(cap_grid(setup.workload.gradient_bytes))
    if best[-1] != math.inf:
        near = {(*best[:-1], best[-1] * factor) for factor in _BETWEEN}
        best = best_of(near | {(MEBIBYTE / 4, caps[-1]) for caps in near})
    return Found(replace(setup.plan, caps_bytes=best), steps_s[best])


def cap_grid(gradient_bytes: int) -> list[tuple[float, ...]]:
    """Return caps worth trying for a model of so many bytes: one bucket, and an eighth of a MiB and its doubles."""
    caps: list[tuple[float, ...]] = [(math.inf,)]
    size = MEBIBYTE / 8
    while size < gradient_bytes:
        caps += [(size,), (min(size, float(MEBIBYTE)), size)]
        size *= 2
    return list(dict.fromkeys(caps))


def best_algorithm(setup: Setup) -> Found:
    """Return the all-reduce with the shortest predicted step, the same one for all buckets."""
    plans = [replace(setup.plan, algorithm=name) for name in candidates(setup.cluster.topology)]
    return min((Found(plan, replace(setup, plan=plan).step_s()) for plan in plans), key=lambda x: x.step_s)


def _knee(points: Sequence[Point]) -> int:
    """Return the last point whose added devices brought enough. A step onto a second host may bring less."""
    knee = points[0].num_ranks
    for before, after in pairwise(points):
        if after.speed_up - before.speed_up >= KNEE * (after.num_ranks - before.num_ranks):
            knee = after.num_ranks
    return knee
