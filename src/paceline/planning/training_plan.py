"""What is chosen about a training step: buckets, algorithm, bytes, shares, how often ranks synchronize."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigurationError
from paceline.planning.collective_time import Servers
from paceline.planning.step_time import BucketLoad, Line

MEBIBYTE = 1024 * 1024
DEFAULT_CAPS_BYTES = (MEBIBYTE, 25 * MEBIBYTE)
NO_TIME = Line(0.0, 0.0)


@dataclass(frozen=True)
class Plan:
    """How gradients are reduced.

    Attributes:
        caps_bytes: How many bytes close the first bucket, the second, ...; the last repeats. A bucket is closed by the
            gradient that brings it to its cap. Infinity: one bucket, when backward is done.
        algorithm: Of the all-reduce, one of `round_patterns.ALL_REDUCES`; "auto": for each bucket the fastest.
        payload_ratio: Bytes on the wire over bytes of gradients: 0.5 in 16 bits.
        launch: On the thread that computes, for each bucket.
        finish: After a bucket has arrived, on the thread that waits.
        sync_every: Micro-steps of which the last one synchronizes.
        num_groups: Process groups that take buckets in turn.
        shares: Of the global batch, one a rank; empty: equal ones.
        servers: Parameter servers instead of an all-reduce.
        priority: Front layers first on the wire, at any moment; the next forward starts as soon as they are there.
        overlap: Whether buckets leave during backward; False: all when it is done.
    """

    caps_bytes: tuple[float, ...] = DEFAULT_CAPS_BYTES
    algorithm: str = "auto"
    payload_ratio: float = 1.0
    launch: Line = NO_TIME
    finish: Line = NO_TIME
    sync_every: int = 1
    num_groups: int = 1
    shares: tuple[float, ...] = ()
    servers: Servers | None = None
    priority: bool = False
    overlap: bool = True

    def __post_init__(self) -> None:
        if not self.caps_bytes or not all(cap >= 0 for cap in self.caps_bytes):
            raise ConfigurationError(f"bucket caps of {list(self.caps_bytes)} bytes cannot be: 0 or more.")
        if not 0 < self.payload_ratio <= 4:
            raise ConfigurationError(
                f"a payload of {self.payload_ratio} of the gradients' bytes cannot be: above 0, at most 4."
            )
        if self.sync_every < 1 or self.num_groups < 1:
            raise ConfigurationError(
                f"synchronizing every {self.sync_every} micro-steps in {self.num_groups} groups cannot be: 1 or more."
            )
        if self.shares and (min(self.shares) < 0 or not math.isclose(sum(self.shares), 1, rel_tol=1e-6)):
            raise ConfigurationError(
                f"shares of a batch add up to 1, not to {sum(self.shares):g}; none is below 0."
            )
        if self.priority and (self.num_groups > 1 or self.servers or self.sync_every > 1):
            raise ConfigurationError(
                "priorities are modelled for one process group that all-reduces every step: drop one of the others."
            )

    def describe(self) -> str:
        """Some words for a table."""
        last = self.caps_bytes[-1]
        words = ["one bucket" if last == math.inf else f"buckets of {last / MEBIBYTE:.3g} MiB"]
        words.append(self.algorithm if self.servers is None else f"{self.servers.number} parameter servers")
        if self.payload_ratio != 1:
            words.append(f"{self.payload_ratio:g} of the bytes")
        if self.sync_every > 1:
            words.append(f"synchronizing every {self.sync_every} micro-steps")
        if self.num_groups > 1:
            words.append(f"{self.num_groups} groups in turn")
        if self.priority:
            words.append("front layers first")
        return ", ".join(words)


def cut_buckets(gradients: Sequence[tuple[float, int]], caps_bytes: Sequence[float]) -> list[BucketLoad]:
    """Cut gradients, in the order in which they are ready, into buckets by the rule of `ddp.plan.assign_buckets`."""
    buckets: list[BucketLoad] = []
    size_bytes = 0
    for ready_s, gradient_bytes in gradients:
        size_bytes += gradient_bytes
        if size_bytes >= caps_bytes[min(len(buckets), len(caps_bytes) - 1)]:
            buckets.append(BucketLoad(ready_s, size_bytes))
            size_bytes = 0
    if size_bytes:
        buckets.append(BucketLoad(gradients[-1][0], size_bytes))
    return buckets
