"""The order in which gradient pieces are sent when the next forward hides them, with its gain and the least time.

In the steady state of a step, backward makes buckets ready one after another, and the link sends one piece at a time.
The next forward runs until it needs a bucket that is not there. Bucket 0 is ready first and needed last.

Rules
1. Whenever the link is free, it takes the ready piece that forward needs first. What is ready but needed late fills the
   time in which nothing else is ready.
2. The order is planned, not found while running, so it is the same on every rank. It then depends on the rate that is
   assumed, and errs asymmetrically: with half the true rate a step is as long as without overlap, with 1.4 times the
   true rate it is 1 % longer. So it is planned with 1.2 times what was measured.

Source: the idea is that of Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration"
(ByteScheduler), SOSP 2019. There a core decides while running; ours is planned from a measured backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigurationError
from paceline.quantities import ms

PIECE_BYTES = 4 * 2**20  # a larger bucket is cut; Gloo's rate is saturated at 2 MiB
ASSUMED_RATE_RATIO = 1.2
PIECE_LATENCY_S = 5e-4
LEAST_GAIN_RATIO = 0.02  # of a step: below it, what the prediction leaves out decides


@dataclass(frozen=True)
class Piece:
    """Elements start <= i < stop of a bucket; `num_bytes` of them."""

    bucket: int
    start: int
    stop: int
    num_bytes: int


def cut(num_elements: Sequence[int], element_bytes: Sequence[int]) -> list[Piece]:
    """Cut buckets into equal pieces of at most PIECE_BYTES; a small bucket is one piece."""
    pieces = []
    for bucket, (size, width) in enumerate(zip(num_elements, element_bytes, strict=True)):
        num_pieces = max(1, -(-size * width // PIECE_BYTES))
        bounds = [size * place // num_pieces for place in range(num_pieces + 1)]
        pieces += [
            Piece(bucket, start, stop, (stop - start) * width) for start, stop in itertools.pairwise(bounds)
        ]
    return pieces


@dataclass(frozen=True)
class MeasuredStep:
    """The measured times and sizes from which an order is planned."""

    # Of each bucket: seconds from the beginning of backward until its gradients are there.
    ready_s: tuple[float, ...]
    needed_s: tuple[float, ...]  # of each bucket: seconds of forward before the first use of its parameters
    backward_s: float  # of the whole backward
    forward_s: float  # of the whole forward
    # From the beginning of backward until all gradients were there, as it was measured without overlap.
    reduced_s: float
    rate_bytes_per_s: float  # bytes of gradients that are reduced in a second while the link is busy
    piece_latency_s: float = PIECE_LATENCY_S  # what each piece takes besides

    def __post_init__(self) -> None:
        times = [*self.ready_s, *self.needed_s, self.backward_s, self.forward_s, self.reduced_s]
        if len(self.ready_s) != len(self.needed_s) or not self.ready_s or min(times) < 0:
            raise ConfigurationError(
                f"a measured step has {len(self.ready_s)} ready times and {len(self.needed_s)} times of need; the "
                f"least time is {min(times, default=0.0)} s. It needs as many of both, at least one, none below 0."
            )
        if not 0 < self.rate_bytes_per_s < float("inf"):
            raise ConfigurationError(
                f"{self.rate_bytes_per_s} bytes/s is not a rate. It is above 0, and finite."
            )


def plan(pieces: Sequence[Piece], step: MeasuredStep, rate_ratio: float = ASSUMED_RATE_RATIO) -> list[int]:
    """Return the order in which to send the pieces, as indices (rules 1 and 2)."""
    return [place for place, _ in _sent(pieces, step, step.rate_bytes_per_s * rate_ratio)]


def _sent(
    pieces: Sequence[Piece], step: MeasuredStep, rate_bytes_per_s: float
) -> Iterator[tuple[int, float]]:
    """Simulate the link. Return each piece, in the order of rule 1, and when it arrives."""
    left = list(range(len(pieces)))
    now_s = 0.0
    while left:
        ready = [place for place in left if step.ready_s[pieces[place].bucket] <= now_s]
        if not ready:
            now_s = min(step.ready_s[pieces[place].bucket] for place in left)
            continue
        first = min(
            ready, key=lambda place: (step.needed_s[pieces[place].bucket], -pieces[place].bucket, place)
        )
        left.remove(first)
        now_s += pieces[first].num_bytes / rate_bytes_per_s + step.piece_latency_s
        yield first, now_s


def arrivals(
    pieces: Sequence[Piece], order: Sequence[int], step: MeasuredStep, rate_bytes_per_s: float
) -> list[float]:
    """Return the time at which each bucket has arrived, in seconds from the beginning of backward, in this order."""
    arrived_s = [0.0] * len(step.ready_s)
    now_s = 0.0
    for place in order:
        piece = pieces[place]
        now_s = (
            max(now_s, step.ready_s[piece.bucket]) + piece.num_bytes / rate_bytes_per_s + step.piece_latency_s
        )
        arrived_s[piece.bucket] = max(arrived_s[piece.bucket], now_s)
    return arrived_s


@dataclass(frozen=True)
class Gain:
    """The predicted seconds of a step, with gradients hidden by backward alone and by the next forward as well."""

    without_s: float
    with_s: float

    @property
    def pays(self) -> bool:
        """Return whether it is large enough to be believed."""
        return self.with_s < self.without_s * (1 - LEAST_GAIN_RATIO)

    @property
    def saved_ratio(self) -> float:
        """Return the saved fraction of a step without overlap; below 0 if the step is longer."""
        return 1 - self.with_s / self.without_s if self.without_s else 0.0

    def __str__(self) -> str:
        return f"{ms(self.with_s)} with it, {ms(self.without_s)} without"


def predict(pieces: Sequence[Piece], order: Sequence[int], step: MeasuredStep) -> Gain:
    """Return what sending pieces in this order saves, on a link of the measured rate.

    The present step counts as measured if the simulation predicts a longer one. Otherwise the gain would be too large.
    """
    rate = step.rate_bytes_per_s
    in_turn = arrivals(pieces, range(len(pieces)), step, rate)
    arrived_s = arrivals(pieces, order, step, rate)
    now_s, ran_s = step.backward_s, 0.0
    for needed_s, bucket in sorted((needed_s, bucket) for bucket, needed_s in enumerate(step.needed_s)):
        now_s, ran_s = max(now_s + needed_s - ran_s, arrived_s[bucket]), needed_s
    return Gain(
        without_s=min(max(step.backward_s, *in_turn), step.reduced_s) + step.forward_s,
        with_s=max(now_s + step.forward_s - ran_s, *arrived_s),
    )
