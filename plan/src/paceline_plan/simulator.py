"""Simulates training steps of a workload on a cluster under a plan.

Rules
1. A rank's computing takes what was recorded, over its speed, times its share of the batch. A factor is drawn for each
   rank and micro-step from the recorded steps. So the slowest of N ranks is slower the larger N is.
2. A collective begins when the last rank has its bucket ready, and ends everywhere at once. Both are exact where every
   rank needs every other rank's bytes, as in an all-reduce. So ranks need no clocks of their own between collectives,
   and 4,096 of them cost little more than 4.
3. All ranks begin a step together: the one before ended for all of them together.
4. A stall by loss belongs to a collective; how many there are is drawn (Poisson) for each one.
5. Pushes to parameter servers stream one behind another, as buckets are ready; pulls as well, each as soon as the last
   rank has pushed it.
6. A link that several connections share does not carry both directions at their full rates at once: each gets a part of
   it. Acknowledgements wait behind data of the other direction, and a piece waits for its slowest connection.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigurationError
from paceline.planning.bucket_assignment import BucketCaps, GradientSpec, assign_buckets
from paceline.planning.forward_overlap import MeasuredStep, cut, predict
from paceline.planning.forward_overlap import plan as order_of_pieces
from paceline.planning.replay import Replay, Wire, replay
from paceline_plan.collective_time import CollectiveCost, costs_of
from paceline_plan.deployment import Cluster, ReductionPlan, Servers
from paceline_plan.workload import RecordedWorkload

_EPSILON = 1e-12


@dataclass(frozen=True)
class BucketLoad:
    """One bucket of a step: when it would be ready if launching took no time, and its size."""

    ready_s: float
    size_bytes: int


@dataclass(frozen=True)
class Simulation:
    """A predicted training.

    Attributes:
        steps_s: Each simulated step; one that accumulates is a step of `sync_every` micro-steps.
        compute_s: Median over steps of the slowest rank's computing, in a whole step.
        exposed_s: Median over steps of the communication that backward does not hide.
        wire_s: What the collectives of a step would take one after another.
        num_buckets: How many.
        num_micro_steps: Micro-steps per step.
        costs: What each bucket's collective costs; empty for one rank and for parameter servers.
    """

    steps_s: tuple[float, ...]
    compute_s: float
    exposed_s: float
    wire_s: float
    num_buckets: int
    num_micro_steps: int
    costs: tuple[CollectiveCost, ...]

    @property
    def step_s(self) -> float:
        """Return the median step."""
        return median(self.steps_s)

    @property
    def micro_step_s(self) -> float:
        return self.step_s / self.num_micro_steps


def simulate(
    workload: RecordedWorkload,
    cluster: Cluster,
    plan: ReductionPlan | None = None,
    *,
    num_steps: int = 1,
    seed: int = 0,
) -> Simulation:
    """Simulate some steps.

    Args:
        workload: What one device computes.
        cluster: Where.
        plan: How gradients are reduced; None: torch's default buckets, the fastest algorithm for each.
        num_steps: More than 1 only matters where something is drawn: computing that varies, loss.
        seed: Random seed; the same seed draws the same.

    Raises:
        ConfigurationError: The plan does not fit the cluster.
    """
    return _Simulator(workload, cluster, plan or ReductionPlan(), seed).run(num_steps)


class _Simulator:
    def __init__(self, workload: RecordedWorkload, cluster: Cluster, plan: ReductionPlan, seed: int) -> None:
        self.workload, self.cluster, self.plan = workload, cluster, plan
        self.random = np.random.default_rng(seed)
        self.size = cluster.num_ranks
        self.slowness = self._slowness()
        extra_s = cluster.layer_overhead_s() * len(workload.layers)
        self.forward_s = workload.forward_s + extra_s
        self.backward_s = workload.backward_s + extra_s
        stretch = self.backward_s / workload.backward_s if workload.backward_s else 1.0
        gradients = [(ready_s * stretch, size) for ready_s, size in workload.ready_gradients()]
        if not plan.overlap:
            gradients = [(self.backward_s, size) for _, size in gradients]
        sizes = tuple(size for _, size in gradients) if self.size > 1 else ()
        self.places = _cut_into_buckets(sizes, plan.caps_bytes)
        self.buckets = [
            BucketLoad(gradients[places[-1]][0], sum(sizes[place] for place in places))
            for places in self.places
        ]
        self.costs = self._costs()

    def _slowness(self) -> NDArray[np.float64]:
        """Return for each rank how much longer than recorded it computes."""
        slowness = np.ones(self.size)
        if self.cluster.speeds:
            slowness /= np.array(self.cluster.speeds)
        if self.plan.shares:
            if len(self.plan.shares) != self.size:
                raise ConfigurationError(
                    f"{len(self.plan.shares)} shares for {self.size} ranks. Pass one per rank."
                )
            slowness = slowness * np.array(self.plan.shares) * self.size
        return slowness

    def _costs(self) -> list[CollectiveCost]:
        if self.plan.servers is not None:
            return []
        costs = costs_of(self.cluster, self.plan.algorithm)
        sent = [bucket.size_bytes * self.plan.payload_ratio for bucket in self.buckets]
        return [min(costs, key=lambda cost: cost.of(size)) for size in sent]

    def run(self, num_steps: int) -> Simulation:
        if num_steps < 1:
            raise ConfigurationError(f"{num_steps} simulated steps show nothing. Pass 1 or more.")
        steps_s, computes_s, exposed_s = [], [], []
        for _ in range(num_steps):
            before, last = self._factors()
            wires = self._wires()
            if self.plan.priority and self.buckets:
                step_s, compute_s = self._overlapping_next_forward(float(last.max()), wires)
                shown_s = max(step_s - compute_s, 0.0)
            else:
                done = self._replay(before, last, wires)
                optimizer_s = self.workload.optimizer_s * float((1 / self._speeds()).max())
                step_s = self.workload.other_s * self.plan.sync_every + done.end_s + optimizer_s
                compute_s, shown_s = step_s - done.exposed_s, done.exposed_s
            steps_s.append(step_s)
            computes_s.append(compute_s)
            exposed_s.append(shown_s)
        return Simulation(
            tuple(steps_s),
            median(computes_s),
            median(exposed_s),
            sum(wire.total_s for wire in self._wires(stalls=False)),
            len(self.buckets),
            self.plan.sync_every,
            tuple(self.costs),
        )

    def _speeds(self) -> NDArray[np.float64]:
        return np.array(self.cluster.speeds) if self.cluster.speeds else np.ones(1)

    def _factors(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return each rank's computing, in recorded micro-steps: before the last one of a step, and in the last."""
        recorded = self.workload.relative_steps
        if len(recorded) < 2:
            return (self.plan.sync_every - 1) * self.slowness, self.slowness
        drawn = self.random.choice(np.array(recorded), (self.plan.sync_every, self.size))
        return drawn[:-1].sum(axis=0) * self.slowness, drawn[-1] * self.slowness

    def _replay(
        self, before: NDArray[np.float64], last: NDArray[np.float64], wires: Sequence[Wire]
    ) -> Replay:
        """Replay a step from the first forward to the end of the last reduction; the slowest rank counts."""
        begun_s = before * (self.forward_s + self.backward_s) + last * self.forward_s
        slowest = last.max()

        def slowest_s(ready_s: float) -> float:
            if self.plan.sync_every == 1:  # all proportional: the slowest is the slowest at everything
                return float(slowest * (self.forward_s + ready_s))
            return float((begun_s + last * ready_s).max())

        sizes = [bucket.size_bytes for bucket in self.buckets]
        ready_s = [slowest_s(bucket.ready_s) for bucket in self.buckets]
        computed_s = slowest_s(self.backward_s)
        launch_s = [self.plan.launch.of(size) for size in sizes]
        finish_s = [self.plan.finish.of(size) for size in sizes]
        if self.plan.servers is None:
            return replay(ready_s, wires, computed_s, launch_s, finish_s, arrive=self.plan.arrivals_s)
        if not self.plan.servers.duplex:
            return replay(ready_s, wires, computed_s, launch_s, finish_s)
        pulled_s = self._streamed(self.plan.servers, ready_s, wires)
        return Replay(computed_s, tuple(pulled_s), max([computed_s, *pulled_s]))

    def _streamed(self, servers: Servers, ready_s: Sequence[float], wires: Sequence[Wire]) -> list[float]:
        """Return when each bucket is pulled."""
        loads = [
            _Load(ready, wire.alone_s / 2, servers.num_pieces(bucket.size_bytes * self.plan.payload_ratio))
            for ready, bucket, wire in zip(ready_s, self.buckets, wires, strict=True)
        ]
        latency_s = max((wire.fixed_s / 2 for wire in wires), default=0.0)
        return pulled(loads, latency_s, servers.two_way_ratio_on(self.cluster))

    def _wires(self, *, stalls: bool = True) -> list[Wire]:
        if self.plan.servers is not None:
            return [self._served(bucket) for bucket in self.buckets]
        wires = []
        for bucket, cost in zip(self.buckets, self.costs, strict=True):
            sent = bucket.size_bytes * self.plan.payload_ratio
            fixed_s = cost.fixed_s
            if stalls and (expected := cost.stalls()):
                each_s = self.cluster.probe_s if cost.is_probed(sent) else self.cluster.stall_s
                fixed_s += each_s * int(self.random.poisson(expected))
            wires.append(Wire(fixed_s, cost.link_s_per_byte * sent, cost.s_per_byte * sent))
        return wires

    def _served(self, bucket: BucketLoad) -> Wire:
        """Return the times of pushing and pulling one bucket."""
        assert self.plan.servers is not None
        sent = bucket.size_bytes * self.plan.payload_ratio
        latency_s = max(link.latency_s for link in self.cluster.links) + self.cluster.collective_s
        each_s = max(self.plan.servers.s_per_byte(self.cluster)) * sent
        return Wire(2 * latency_s, 2 * each_s, 2 * each_s)

    def _overlapping_next_forward(self, slowness: float, wires: Sequence[Wire]) -> tuple[float, float]:
        """Return a step and its computing if the next forward hides pieces of buckets as well (priorities)."""
        sizes = [bucket.size_bytes for bucket in self.buckets]
        flowing_s = sum(wire.alone_s for wire in wires)
        measured = MeasuredStep(
            tuple(slowness * bucket.ready_s for bucket in self.buckets),
            tuple(slowness * needed_s for needed_s in self._needed_s()),
            slowness * self.backward_s,
            slowness * self.forward_s,
            math.inf,
            sum(sizes) / flowing_s if flowing_s else sys.float_info.max,
            max(wire.fixed_s for wire in wires),
        )
        pieces = cut(sizes, [1] * len(sizes))
        step_s = predict(pieces, order_of_pieces(pieces, measured, rate_ratio=1.0), measured).with_s
        other_s = self.workload.optimizer_s + self.workload.other_s
        return step_s + other_s, slowness * (self.forward_s + self.backward_s) + other_s

    def _needed_s(self) -> list[float]:
        """Return the seconds of forward before the first layer with a gradient in each bucket."""
        layers = self.workload.layers
        begins_s = list(itertools.accumulate((layer.forward_s for layer in layers), initial=0.0))
        layer_of = [index for index in self.workload.order for _ in layers[index].gradient_bytes]
        return [min(begins_s[layer_of[place]] for place in places) for places in self.places]


@lru_cache(maxsize=256)
def _cut_into_buckets(
    sizes_bytes: tuple[int, ...], caps_bytes: tuple[float, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return which gradients share a bucket: their places in the order in which they are ready."""
    specs = [GradientSpec(size, key=None) for size in sizes_bytes]
    return tuple(map(tuple, assign_buckets(specs, range(len(specs)), BucketCaps(caps_bytes))))


@dataclass(frozen=True)
class _Load:
    """A bucket, or a piece of one, as the fullest link sees it."""

    ready_s: float  # when it may be pushed
    way_s: float  # how long it fills the link, in each direction
    num_pieces: int = 1  # that are pulled one by one


def pulled(loads: Sequence[_Load], latency_s: float, two_way_ratio: float = 1.0) -> list[float]:
    """Return when all have pulled each bucket, in the order pushed; both ways at once run at `two_way_ratio`."""
    pieces = [
        _Load(load.ready_s, load.way_s / load.num_pieces) for load in loads for _ in range(load.num_pieces)
    ]
    pushes = _Stream([piece.ready_s for piece in pieces], pieces)
    pulls = _Stream([math.inf] * len(pieces), pieces)
    now_s = 0.0
    while pulls.index < len(pieces):
        both = pushes.flows(now_s) and pulls.flows(now_s)
        rate = two_way_ratio if both else 1.0
        next_s = min(pushes.next_s(now_s, rate), pulls.next_s(now_s, rate))
        if (pushed := pushes.advance(now_s, next_s, rate)) is not None:
            pulls.starts_s[pushed] = next_s + latency_s
        pulls.advance(now_s, next_s, rate)
        now_s = next_s
    ends_s, last = [], -1
    for load in loads:
        last += load.num_pieces
        ends_s.append(pulls.ends_s[last] + latency_s)
    return ends_s


class _Stream:
    """Pieces that flow one behind another in one direction."""

    def __init__(self, starts_s: list[float], pieces: Sequence[_Load]) -> None:
        self.starts_s = starts_s
        self.ends_s: list[float] = []
        self.index = 0
        self._pieces = pieces
        self._left_s = pieces[0].way_s if pieces else 0.0

    def flows(self, now_s: float) -> bool:
        return self.index < len(self._pieces) and self.starts_s[self.index] <= now_s + _EPSILON

    def next_s(self, now_s: float, rate: float) -> float:
        """Return when something changes here."""
        if self.index == len(self._pieces):
            return math.inf
        return now_s + self._left_s / rate if self.flows(now_s) else self.starts_s[self.index]

    def advance(self, now_s: float, until_s: float, rate: float) -> int | None:
        """Let it flow; the piece that is through then, if one is."""
        if not self.flows(now_s):
            return None
        self._left_s -= (until_s - now_s) * rate
        if self._left_s > _EPSILON:
            return None
        done, self.index = self.index, self.index + 1
        self.ends_s.append(until_s)
        self._left_s = self._pieces[self.index].way_s if self.index < len(self._pieces) else 0.0
        return done
