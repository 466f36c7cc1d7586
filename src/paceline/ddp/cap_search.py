"""Which bucket cap makes the shortest steps, found by training with some: `bucket_cap_mb="auto"`.

Rules
1. All ranks try the same caps in the same steps, and decide by the same numbers: the slowest rank's medians. So no two
   ranks ever cut differently.
2. From the default, caps go down by four as long as steps get shorter; if none did, up by four. Then half and twice the
   best are tried.
3. A gain has to be seen twice: in the end the best and the default take turns, and the default stays if steps are less
   than 1 % shorter without it.
4. A cap decides which gradients share a bucket, not what is computed. Over more than two ranks a backend may add in
   another order then, so results may differ in rounding between two runs, never between ranks.

The search measures and does not simulate: what a step really takes contains what no model of it knows (cores that
compute and communicate, copies, jitter), and 60 to 100 steps are little in a training that is worth the search.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator
from dataclasses import dataclass
from statistics import median

import torch
from torch.distributed import ProcessGroup

from paceline.comm.peers import Peers
from paceline.observe import StepTimings
from paceline.planning.bucket_assignment import (
    DEFAULT_FIRST_BUCKET_BYTES,
    LAST_BUCKET_BYTES,
    MEBIBYTE,
    BucketCaps,
)

STEPS_EACH = 7  # the last six times from one backward's begin to the next are compared
WARM_UP_STEPS = 5  # that nothing is decided by
TURNS = 3  # of the best and of the default, in the end
LEAST_GAIN_RATIO = 0.01
LEAST_CAP_BYTES = MEBIBYTE / 8

_LOGGER = logging.getLogger("paceline.buckets")


@dataclass(frozen=True)
class TriedCap:
    """Seconds of a step with buckets of so many MiB (the first one of at most 1)."""

    cap_mb: float
    step_s: float


class CapSearch:
    """The search of one module's reducer; the same on every rank."""

    def __init__(self, default: BucketCaps, size_bytes: int) -> None:
        self._default = default
        self._start = float(min(default.caps_bytes[-1], size_bytes))
        self.tried: list[TriedCap] = []  # in order; a cap may come more than once
        self.best_mb: float | None = None  # what was found, in MiB; None as long as the search goes on
        self._course = course(self._start, LEAST_CAP_BYTES, float(size_bytes))
        self._trying = next(self._course)
        self._num_steps = -WARM_UP_STEPS

    def after_step(
        self, timings: StepTimings, device: torch.device, group: ProcessGroup, peers: Peers
    ) -> BucketCaps | None:
        """Return other caps if buckets are to be cut anew. Collective after every `STEPS_EACH`th step, else local."""
        if self.best_mb is not None:
            return None
        self._num_steps += 1
        if self._num_steps < STEPS_EACH:
            return None
        self._num_steps = 0
        timings.settle()
        step_s = _slowest_rank_s(_median_step_s(timings), device, group, peers)
        tried = self._trying
        self.tried.append(TriedCap(tried / MEBIBYTE, step_s))
        try:
            self._trying = self._course.send(step_s)
        except StopIteration as end:
            self._trying = end.value
            self.best_mb = self._trying / MEBIBYTE
            if group.rank() == 0:
                _LOGGER.info(self._summary())
        return None if self._trying == tried else self._caps_of(self._trying)

    def _caps_of(self, cap_bytes: float) -> BucketCaps:
        if cap_bytes == self._start:
            return self._default
        first = LAST_BUCKET_BYTES if self._default.from_end else DEFAULT_FIRST_BUCKET_BYTES
        caps = int(min(cap_bytes, first)), int(cap_bytes)
        return BucketCaps(caps, self._default.from_end, self._default.least_bytes)

    def _summary(self) -> str:
        best = median(each.step_s for each in self.tried if each.cap_mb == self.best_mb) * 1e3
        default_mb = self._start / MEBIBYTE
        default = median(each.step_s for each in self.tried if each.cap_mb == default_mb) * 1e3
        return (
            f"bucket_cap_mb={self.best_mb:.4g} from now on: {best:.4g} ms per step, {default:.4g} ms with the default "
            f"of {default_mb:.4g}; {len(self.tried)} turns of {STEPS_EACH} steps tried."
        )


def course(default: float, least: float, most: float) -> Generator[float, float, float]:
    """Yields the next cap in bytes, from `least` to `most`, is sent a step's seconds, returns the best (rules 2, 3)."""
    seen = {default: (yield default)}

    def measure(cap: float) -> Generator[float, float, bool]:
        """Try it once; whether it is better than all before."""
        if cap in seen or not least <= cap <= most:
            return False
        is_best = (seconds := (yield cap)) < min(seen.values())
        seen[cap] = seconds
        return is_best

    for factor in (0.25, 4.0):
        cap = default
        while (yield from measure(_within(cap * factor, least, most))):
            cap = _within(cap * factor, least, most)
        if cap != default:
            break
    best = min(seen, key=seen.__getitem__)
    for factor in (0.5, 2.0):
        yield from measure(best * factor)
    best = min(seen, key=seen.__getitem__)
    if best == default:
        return default
    of_default, of_best = [], []
    for _ in range(TURNS):
        of_default.append((yield default))
        of_best.append((yield best))
    return best if median(of_best) < median(of_default) * (1 - LEAST_GAIN_RATIO) else default


def _within(cap: float, least: float, most: float) -> float:
    return max(min(cap, most), least)


def _median_step_s(timings: StepTimings) -> float:
    """Of this rank's last steps, from one backward's begin to the next."""
    started_s = [timing.started_s for timing in timings.recent(STEPS_EACH)]
    return median(after - before for before, after in itertools.pairwise(started_s))


def _slowest_rank_s(mine_s: float, device: torch.device, group: ProcessGroup, peers: Peers) -> float:
    row = torch.tensor([mine_s], dtype=torch.float64, device=device)
    rows = peers.rows_of_all(row, group, "comparing bucket caps")
    return max(float(each) for each in rows)
