"""Predicts how a workload scales over growing clusters: steps, efficiency, cost, what limits and what helps.

Data parallelism scales weakly: every device keeps its batch, so the work of a step grows with the devices and the time
of a step should not. Efficiency is the step of one device over the step of N; throughput is N batches a step.

What limits is asked, not guessed: the step is simulated again with links of no size, with no latency, with ranks that
do not vary; whatever would save most is the limit. What helps is asked the same way, of what a user can do.

The band contains what the simulator cannot know: each prediction is repeated with the computing of other recorded
steps, links and latencies that are better and worse than given, and an error of the model as large as its errors on
emulated clusters were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from paceline.errors import ConfigurationError
from paceline.planning.bucket_search import best_algorithm, best_caps
from paceline.planning.hardware import Cluster
from paceline.planning.recorded_workload import Workload
from paceline.planning.simulator import simulate
from paceline.planning.training_plan import Plan

MODEL_ERROR = 0.06  # standard deviation of the logarithm; docs/guide/plan.md, how far to trust it
KNEE = 0.5  # what the last device added must bring, of what the first one brings
_NUM_STEPS = 30
_NUM_DRAWS = 20
_STEPS_OF_A_DRAW = 5
_NEGLIGIBLE = 0.03  # of a step
_RATE_RANGE, _LATENCY_RANGE = (0.75, 1.1), (0.5, 2.0)
Tell = Callable[[float], None]
Grow = Callable[[int], Cluster]


@dataclass(frozen=True)
class Saving:
    """Something that could be done, and the fraction of the time for a sample that it saves."""

    what: str
    ratio: float


@dataclass(frozen=True)
class Point:
    """A prediction for one number of devices.

    Attributes:
        num_ranks: Devices.
        step_s: Median; of a step with all its micro-steps.
        low_s: The tenth percentile of the band.
        high_s: The ninetieth.
        exposed_s: Of the step, the communication that backward does not hide.
        efficiency: The step of one device over this one.
        speed_up: Throughput over that of one device.
        samples_per_s: None if nobody said how many a step has.
        epoch_s: None likewise, or if nobody said how many an epoch has.
        epoch_cost: In the price's currency; None likewise.
        limit: What limits, in words.
        savings: What would help, the most first.
    """

    num_ranks: int
    step_s: float
    low_s: float
    high_s: float
    exposed_s: float
    efficiency: float
    speed_up: float
    samples_per_s: float | None
    epoch_s: float | None
    epoch_cost: float | None
    limit: str
    savings: tuple[Saving, ...]


@dataclass(frozen=True)
class Question:
    """What is to be predicted.

    Attributes:
        workload: One device's step.
        grow: The cluster of N devices.
        plan: How gradients are reduced.
        counts: Numbers of devices, ascending.
        epoch_samples: None if epochs are not asked for.
        price_per_hour: Of one device.
        seed: Of everything drawn.
    """

    workload: Workload
    grow: Grow
    plan: Plan
    counts: tuple[int, ...]
    epoch_samples: int | None = None
    price_per_hour: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """Predictions, and where they stop being worth it.

    Attributes:
        points: One a number of devices.
        knee: The largest number at which a device added still brings half of what the first one brings.
    """

    points: tuple[Point, ...]
    knee: int


def doubling_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself."""
    if most < 1:
        raise ConfigurationError(f"--to {most} cannot be: a prediction is for 1 device or more.")
    return tuple(sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most}))


def predict_scaling(question: Question, tell: Tell | None = None) -> Answer:
    """Predict every number of devices."""
    alone_s = simulate(question.workload, question.grow(1), question.plan, num_steps=_NUM_STEPS).step_s
    if alone_s <= 0:
        raise ConfigurationError(
            f"the workload {question.workload.name} takes no time at all, so nothing can be compared with it. Record "
            "it again with `paceline plan record SCRIPT`."
        )
    points = []
    for number, num_ranks in enumerate(question.counts):
        points.append(_point(question, num_ranks, alone_s))
        if tell is not None:
            tell((number + 1) / len(question.counts))
    return Answer(tuple(points), _knee(points))


def _point(question: Question, num_ranks: int, alone_s: float) -> Point:
    workload, plan, cluster = question.workload, question.plan, question.grow(num_ranks)
    found = simulate(workload, cluster, plan, num_steps=_NUM_STEPS, seed=question.seed)
    step_s = found.step_s
    low_s, high_s = _band(question, cluster, step_s)
    samples_per_s = epoch_s = cost = None
    if workload.samples_per_step is not None:
        of_a_micro_step = workload.samples_per_step / workload.num_micro_steps
        samples_per_s = num_ranks * of_a_micro_step * plan.sync_every / step_s
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
        what_limits(workload, cluster, plan, question.seed),
        what_helps(workload, cluster, plan, question.seed),
    )


def _band(question: Question, cluster: Cluster, step_s: float) -> tuple[float, float]:
    """Percentiles of the step under other links, other computing, and the model's error."""
    random = np.random.default_rng(question.seed)
    recorded = question.workload.relative_steps
    few = _STEPS_OF_A_DRAW
    usual = float(np.median(recorded)) if recorded else 1.0
    middle_s = simulate(question.workload, cluster, question.plan, num_steps=few, seed=question.seed).step_s
    drawn = []
    for _ in range(_NUM_DRAWS):
        faster = random.uniform(*_RATE_RANGE)
        latency = math.exp(random.uniform(*np.log(_LATENCY_RANGE)))
        computing = float(np.median(random.choice(recorded, len(recorded)))) / usual if recorded else 1.0
        other = simulate(
            question.workload.taking(computing),
            cluster.with_links(faster=faster, latency_ratio=latency),
            question.plan,
            num_steps=few,
            seed=question.seed,  # the same stragglers: what differs is what the band is about
        ).step_s
        error = math.exp(random.normal(0.0, MODEL_ERROR)) if cluster.num_ranks > 1 else 1.0
        drawn.append(other / middle_s * error * step_s)
    low_s, high_s = np.quantile(drawn, (0.1, 0.9))
    return min(float(low_s), step_s), max(float(high_s), step_s)


def what_limits(workload: Workload, cluster: Cluster, plan: Plan, seed: int = 0) -> str:
    """What keeps the step from being shorter: computing, or whatever would save most if it were not there."""
    if cluster.num_ranks == 1:
        return "computing (one rank)"
    base = simulate(workload, cluster, plan, num_steps=_NUM_STEPS, seed=seed)
    even = replace(cluster, speeds=())
    calm = replace(workload, relative_steps=())
    others = {
        "stragglers": (calm, even, plan),
        "latency": (workload, replace(cluster.with_links(latency_ratio=0.0), stall_s=0.0, probe_s=0.0), plan),
    }
    if plan.servers is not None:
        free = replace(plan, servers=replace(plan.servers, bytes_per_s=math.inf))
        others["the parameter servers' links"] = (workload, cluster, free)
    where = base.costs[-1].bottleneck if base.costs else "the workers' links"
    others[where] = (workload, cluster.with_links(faster=math.inf), plan)
    saved = {
        name: 1 - simulate(*case, num_steps=_NUM_STEPS, seed=seed).step_s / base.step_s
        for name, case in others.items()
    }
    worst = max(saved, key=lambda name: saved[name])
    if saved[worst] >= _NEGLIGIBLE:
        return f"{worst} ({saved[worst]:.0%})"
    hidden_badly = base.exposed_s / base.step_s
    return "computing" if hidden_badly < _NEGLIGIBLE else f"several links alike ({hidden_badly:.0%})"


def what_helps(workload: Workload, cluster: Cluster, plan: Plan, seed: int = 0) -> tuple[Saving, ...]:
    """What a user could change, and what each saves of the time for a sample; the negligible is left out."""
    if cluster.num_ranks == 1:
        return ()
    base_s = simulate(workload, cluster, plan, num_steps=_NUM_STEPS, seed=seed).micro_step_s
    savings = [
        Saving(what, 1 - simulate(*case, num_steps=_NUM_STEPS, seed=seed).micro_step_s / base_s)
        for what, case in _remedies(workload, cluster, plan)
    ]
    return tuple(sorted((x for x in savings if x.ratio >= 0.01), key=lambda x: -x.ratio))


def _remedies(
    workload: Workload, cluster: Cluster, plan: Plan
) -> Iterable[tuple[str, tuple[Workload, Cluster, Plan]]]:
    if plan.servers is None:
        caps = best_caps(workload, cluster, plan).plan
        words = (
            "one bucket"
            if caps.caps_bytes[-1] == math.inf
            else f"buckets of {caps.caps_bytes[-1] / 2**20:.3g} MiB"
        )
        yield words, (workload, cluster, caps)
        algorithm = best_algorithm(workload, cluster, plan).plan
        yield f"the algorithm {algorithm.algorithm}", (workload, cluster, algorithm)
    else:
        more = replace(plan.servers, number=2 * plan.servers.number)
        yield "twice as many parameter servers", (workload, cluster, replace(plan, servers=more))
    yield (
        "gradients in half the bytes",
        (
            workload,
            cluster,
            replace(plan, payload_ratio=plan.payload_ratio / 2),
        ),
    )
    if not plan.priority:
        doubled = replace(plan, sync_every=2 * plan.sync_every)
        yield f"{doubled.sync_every} micro-steps a synchronization", (workload, cluster, doubled)
    yield "links twice as fast", (workload, cluster.with_links(faster=2.0), plan)
    if len(set(cluster.speeds)) > 1 and not plan.shares:
        total = sum(cluster.speeds)
        shares = tuple(speed / total for speed in cluster.speeds)
        yield "shares of the batch by speed", (workload, cluster, replace(plan, shares=shares))


def _knee(points: Sequence[Point]) -> int:
    """The last point at which the devices added since the one before brought enough, each.

    Not the first at which they did not: the step onto a second host costs more than the third and fourth host do.
    """
    knee = points[0].num_ranks
    for before, after in pairwise(points):
        if after.speed_up - before.speed_up >= KNEE * (after.num_ranks - before.num_ranks):
            knee = after.num_ranks
    return knee
