"""Predicts the duration of a training step whose buckets are reduced in a given way.

Rules
1. How buckets follow each other is `replay`'s; here is what each of them costs.
2. A reduction takes a fixed time plus a time for each byte of gradients, which include compressing and decompressing.
3. Processor time for compressing, taken from cores that are busy computing, delays gradients as launching does.
4. Times are those of the slowest rank and count from the end of the step before. So a step's duration is the time at
   which its last bucket is finished.

Source: the picture is that of Li et al., VLDB 2020, section 3.2.3. The fixed time and the time per byte are
the alpha-beta model of a message, applied to a whole collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigurationError
from paceline.planning.replay import AlphaBetaCost, BucketLoad, Wire, replay

_EXTREME = 2.0**20  # the most by which a link is assumed faster or slower
_HALVINGS = 60
_CALIBRATION = 4.0  # the most by which a step's duration corrects the measured rate of a link
_AGREEMENT = 0.1  # difference of a predicted and a measured step that needs no correction


@dataclass(frozen=True)
class StepProfile:
    """A step without its communication.

    Attributes:
        backward_end_s: When backward would end if launching took no time.
        buckets: In launch order.
        busy_ratio: The fraction of the host's processors that its ranks kept busy.
    """

    backward_end_s: float
    buckets: tuple[BucketLoad, ...]
    busy_ratio: float = 0.0


@dataclass(frozen=True)
class ReductionCost:
    """The times of one bucket's reduction, by its size in bytes of gradients.

    Attributes:
        name: The reduction's.
        launch: On the thread that computes gradients.
        wire: From there until the result has arrived.
        finish: Afterwards, on the thread that waits.
        cpu: Processor time of all threads.
        link_s_per_byte: The part of `wire.s_per_byte` that the link takes; the rest is compressing and decompressing.
        closing_s: Once a step, after the last bucket: for status words that cannot be sent with a bucket.
    """

    name: str
    launch: AlphaBetaCost
    wire: AlphaBetaCost
    finish: AlphaBetaCost
    cpu: AlphaBetaCost
    link_s_per_byte: float
    closing_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.link_s_per_byte <= self.wire.s_per_byte:
            raise ConfigurationError(f"{self}: the link's time is a part of the wire's")

    @classmethod
    def of_codec(
        cls,
        name: str,
        plain: ReductionCost,
        measured: Sequence[AlphaBetaCost],
        payload_ratio: float | None,
        probed_ratio: float,
        busy_ratio: float,
        is_on_host: bool = True,
    ) -> ReductionCost:
        """The cost of a codec during backward, from measurements while nothing was computed.

        Args:
            name: The codec's.
            plain: The cost of the reduction that was used when the step was profiled.
            measured: Launch, wire, finish and processor time. A codec shortens only the wire's time for each byte; if
                another one seems shorter, that is noise.
            payload_ratio: The bytes that the codec sends for all gradients, over those that `plain` sends; None: not
                known, so what was measured counts.
            probed_ratio: The same for the gradients of the measurement, whose shapes need not be those of the model.
            busy_ratio: The fraction of the processors that computing keeps busy, hence of the codec's processor time
                that delays it.
            is_on_host: Whether processors compress: then coding takes at most the processor time beyond `plain`'s, and
                what the wire took besides is noise.
        """
        launch, wire, finish, cpu = measured
        extra, launch = cpu.at_least(plain.cpu), launch.at_least(plain.launch)
        delayed = AlphaBetaCost(
            launch.fixed_s + busy_ratio * (extra.fixed_s - plain.cpu.fixed_s),
            launch.s_per_byte + busy_ratio * (extra.s_per_byte - plain.cpu.s_per_byte),
        )
        slope = wire.s_per_byte
        link_s_per_byte = min(plain.link_s_per_byte, slope)
        if payload_ratio is not None:
            coding_s_per_byte = max(slope - probed_ratio * plain.link_s_per_byte, 0.0)
            if is_on_host:
                coding_s_per_byte = min(coding_s_per_byte, extra.s_per_byte - plain.cpu.s_per_byte)
            link_s_per_byte = payload_ratio * plain.link_s_per_byte
            slope = coding_s_per_byte + link_s_per_byte
        wire = AlphaBetaCost(max(wire.fixed_s, plain.wire.fixed_s), slope)
        return cls(name, delayed, wire, finish.at_least(plain.finish), cpu, link_s_per_byte)

    def sending(self, name: str, payload_ratio: float) -> ReductionCost:
        """The cost of a codec that sends this fraction of the bytes, as if coding took no time."""
        coding_s_per_byte = self.wire.s_per_byte - self.link_s_per_byte
        link_s_per_byte = payload_ratio * self.link_s_per_byte
        wire = AlphaBetaCost(self.wire.fixed_s, coding_s_per_byte + link_s_per_byte)
        return replace(self, name=name, wire=wire, link_s_per_byte=link_s_per_byte)

    def on_link(self, slowdown: float) -> ReductionCost:
        """The cost on a link whose rate is divided by `slowdown`."""
        link_s = self.link_s_per_byte
        wire = AlphaBetaCost(self.wire.fixed_s, self.wire.s_per_byte - link_s + link_s * slowdown)
        return replace(self, wire=wire, link_s_per_byte=link_s * slowdown)


@dataclass(frozen=True)
class Prediction:
    """The predicted duration of a step, and how much of it is exposed communication."""

    step_s: float
    exposed_s: float


def predict(profile: StepProfile, cost: ReductionCost) -> Prediction:
    """Replay a step: its buckets pass through launching, the wire and finishing."""
    sizes = [bucket.size_bytes for bucket in profile.buckets]
    wire_s = [cost.wire.of(size) for size in sizes]
    done = replay(
        [bucket.ready_s for bucket in profile.buckets],
        [Wire(0.0, seconds, seconds) for seconds in wire_s],
        profile.backward_end_s,
        [cost.launch.of(size) for size in sizes],
        [cost.finish.of(size) for size in sizes],
        cost.closing_s,
    )
    return Prediction(done.end_s, done.exposed_s)


def crossover_slowdown(profile: StepProfile, plain: ReductionCost, other: ReductionCost) -> float:
    """The factor by which the link's rate must be divided for `other` to be as fast as `plain`.

    Returns:
        On slower links `other` is faster. 0 if it is faster on any link, infinity if on none.
    """

    def gain_s(slowdown: float) -> float:
        slow_plain, slow_other = plain.on_link(slowdown), other.on_link(slowdown)
        return predict(profile, slow_plain).step_s - predict(profile, slow_other).step_s

    pays, costs = _EXTREME, 1 / _EXTREME
    if gain_s(pays) <= 0:
        return math.inf
    if gain_s(costs) > 0:
        return 0.0
    for _ in range(_HALVINGS):
        middle = math.sqrt(pays * costs)
        if gain_s(middle) > 0:
            pays = middle
        else:
            costs = middle
    return pays


def calibration_slowdown(profile: StepProfile, cost: ReductionCost, step_s: float) -> float:
    """The factor by which the link's measured rate must be divided for a step's prediction to equal its measurement.

    A few timed reductions may find the network in another state than those of a step do: other traffic, several at
    once. Where communication is hidden, a step's duration bounds the rate from one side only; then the factor nearest
    to 1 is taken. It is 1 where prediction and measurement agree within a tenth.

    Args:
        profile: The step's.
        cost: What the reduction that was used costs.
        step_s: The measured duration, in seconds.

    Returns:
        From 1/4 to 4.
    """

    def is_too_long(slowdown: float) -> bool:
        return predict(profile, cost.on_link(slowdown)).step_s > step_s

    if abs(predict(profile, cost).step_s / step_s - 1) <= _AGREEMENT:
        return 1.0
    at_first = is_too_long(1.0)
    near, far = 1.0, 1 / _CALIBRATION if at_first else _CALIBRATION
    if is_too_long(far) == at_first:
        return far
    for _ in range(_HALVINGS):
        middle = math.sqrt(near * far)
        near, far = (middle, far) if is_too_long(middle) == at_first else (near, middle)
    return far
