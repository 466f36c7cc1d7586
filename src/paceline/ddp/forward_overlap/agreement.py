"""Whether a module's steps are deferred, and in which order their pieces are sent: measured, predicted, then seen.

Rules
1. The ranks decide at the same steps by the same numbers, so they are never apart.
2. After three steps rank 0 predicts from what all have measured; a prediction of no gain is asked for three times.
3. A predicted gain is not yet one: 20 steps later 6 steps run without the overlap, and it stays only if steps were
   shorter with it.
4. The order is planned anew every 16 steps. If the link's rate is another by then than after the comparison, by a
   quarter or more, steps are compared again; if they are no shorter any more, steps run without the overlap until the
   rate has changed by as much once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import broadcast
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket
from paceline.ddp.forward_overlap.outstanding import Needs
from paceline.ddp.views import real_dtype
from paceline.observe import StepTiming, StepTimings
from paceline.planning.forward_overlap import LEAST_GAIN_RATIO, Gain, MeasuredStep, Piece, cut, plan, predict

AGREES_AFTER_STEPS = 3  # buckets are cut anew after the first
AGREES_AGAIN_AFTER = (6, 12)  # the first steps may have been slow, and a rate too low costs the gain
AGREES_AGAIN_EVERY = 16
LOOKS_BACK_STEPS = 8
DECLINES = 3  # so often it is predicted not to pay before it is off for good

TRIED_STEPS = 20  # with the overlap, before it is compared
UNSTEADY_STEPS = 4  # the first of them, which are not compared
COMPARED_STEPS = 6  # without it
DRIFT_RATIO = 1.25  # between two rates that are not the same any more


class Agreement:
    """One module's, the same on every rank.

    `is_on` says whether steps are deferred: None as long as the ranks measure, or wait for another rate (rule 4); False
    is for good; `is_forced`: without measuring. `gain` is what it was predicted to save, `seen` what was compared once
    on, `verdict` the decision with its numbers in words, and `pieces` are in the order in which they are sent.
    """

    def __init__(self, group: ProcessGroup, peers: Peers, is_forced: bool) -> None:
        self._group, self._peers, self._is_forced = group, peers, is_forced
        self.is_on: bool | None = None
        self.pieces: tuple[Piece, ...] = ()
        self.gain: Gain | None = None
        self.seen: Gain | None = None
        self.verdict = ""
        self._planned_sizes: list[int] = []
        self._first_step: int | None = None
        self._on_since: int | None = None
        self._num_declined = 0
        self._is_paused = False  # it was on, and is not until the rate has changed
        self._compared_rate: float | None = None  # bytes/s, of the first plan after the comparison

    @property
    def is_off(self) -> bool:
        """Whether steps are never deferred again."""
        return self.is_on is False

    def stop(self) -> None:
        """Defer no step any more."""
        self.is_on = False

    def move_to(self, group: ProcessGroup, peers: Peers) -> None:
        """Agree with the ranks of another group from now on, who may be new: about everything anew, but what is off."""
        self._group, self._peers = group, peers
        self.is_on = False if self.is_off else None
        self.pieces, self.gain, self.seen, self.verdict = (), None, None, ""
        self._planned_sizes, self._num_declined = [], 0
        self.start_again()

    def start_again(self) -> None:
        """Other parameters are reduced from now on, so their first step is to come."""
        self._first_step = self._on_since = self._compared_rate = None
        self._is_paused = False

    def defers(
        self, buckets: Sequence[Bucket], step: int, timings: StepTimings, forward_s: float, needs: Needs
    ) -> bool:
        """Whether the module's `step`, which begins, is deferred. Collective when ranks agree or compare; or local."""
        if self.is_off:
            return False
        if self._first_step is None:
            self._first_step = step
        step -= self._first_step
        if step < AGREES_AFTER_STEPS:
            return False
        if self._is_compared_at(step):
            timings.settle()
            self._compare(timings)
        if not self.is_off and self._is_due(buckets, step):
            self._decide(step, self._agree(buckets, timings, forward_s, needs))
        return bool(self.is_on) and not self._runs_without(step)

    def _is_due(self, buckets: Sequence[Bucket], step: int) -> bool:
        is_cut_anew = bool(self.is_on) and [bucket.size_bytes for bucket in buckets] != self._planned_sizes
        again = step in AGREES_AGAIN_AFTER or step % AGREES_AGAIN_EVERY == 0
        return step == AGREES_AFTER_STEPS or is_cut_anew or again

    def _agree(
        self, buckets: Sequence[Bucket], timings: StepTimings, forward_s: float, needs: Needs
    ) -> Agreed:
        timings.settle()
        forward_s = max(0.0, forward_s - needs.waited_s)
        needed_s = [min(needs.of(bucket.parameters, forward_s), forward_s) for bucket in buckets]
        mine = measure(buckets, timings.recent(min(LOOKS_BACK_STEPS, len(timings) - 1)), needed_s, forward_s)
        sizes = [bucket.size_bytes for bucket in buckets]
        widths = [real_dtype(bucket.parameters[0].dtype).itemsize for bucket in buckets]
        pieces = cut([size // width for size, width in zip(sizes, widths, strict=True)], widths)
        agreed = agree(pieces, mine, self._group, self._peers)
        self.pieces, self._planned_sizes = agreed.pieces, sizes
        return agreed

    def _decide(self, step: int, agreed: Agreed) -> None:
        """Rules 2 and 4. Local; the same on every rank."""
        has_drifted = self._has_drifted(step, agreed.rate_bytes_per_s)
        if self.is_on:  # what was measured is not a step without the overlap, and says nothing about its gain
            if has_drifted or self._on_since is None:
                self._turn_on(step)
            return
        self.gain = agreed.gain
        if self._is_paused and not has_drifted:
            return
        if self._is_forced or agreed.gain.pays:
            self._turn_on(step)
        elif not self._is_paused:
            self._num_declined += 1
            self.is_on = False if self._num_declined == DECLINES else None
            if self.is_off:
                saved = f"{agreed.gain.saved_ratio:.1%} of a step, less than {LEAST_GAIN_RATIO:.0%}"
                self.verdict = f"off, because it is predicted to save {saved} ({agreed.gain})"

    def _turn_on(self, step: int) -> None:
        """Defer steps, and compare some with others that are not."""
        self.is_on, self._on_since, self._is_paused, self._compared_rate = True, step, False, None
        if self.seen is not None:
            why = "because the link's rate has changed"
        else:
            why = (
                f"predicted to save {self.gain.saved_ratio:.1%} of a step ({self.gain})" if self.gain else ""
            )
        how = "without a comparison" if self._is_forced else f"to be compared in {TRIED_STEPS} steps"
        self.verdict = f"on, {how}; {why}"

    # ---- rules 3 and 4

    def _has_drifted(self, step: int, rate_bytes_per_s: float) -> bool:
        """Whether the rate is another than it was after the comparison; asked in steps that the ranks agree in."""
        if self._is_forced or self._on_since is None:
            return False
        if step - self._on_since < TRIED_STEPS + COMPARED_STEPS + LOOKS_BACK_STEPS:
            return False  # some of the steps that were measured ran without the overlap
        before = self._compared_rate = self._compared_rate or rate_bytes_per_s
        return max(rate_bytes_per_s / before, before / rate_bytes_per_s) >= DRIFT_RATIO

    def _runs_without(self, step: int) -> bool:
        if self._is_forced or self._on_since is None:
            return False
        return 0 <= step - self._on_since - TRIED_STEPS < COMPARED_STEPS

    def _is_compared_at(self, step: int) -> bool:
        if self._is_forced or self._on_since is None:
            return False
        return step == self._on_since + TRIED_STEPS + COMPARED_STEPS

    def _compare(self, timings: StepTimings) -> None:
        started_s = [timing.started_s for timing in timings.recent(TRIED_STEPS + COMPARED_STEPS)]
        lasted_s = [after - before for before, after in itertools.pairwise(started_s)]
        with_s = lasted_s[UNSTEADY_STEPS : 1 - COMPARED_STEPS]
        without_s = lasted_s[1 - COMPARED_STEPS :]
        row = torch.tensor([_median_s(with_s), _median_s(without_s)], dtype=torch.float64)
        rows = self._peers.rows_of_all(row, self._group, "comparing steps with and without forward overlap")
        with_median_s, without_median_s = torch.stack(rows).amax(0).tolist()
        was_worth_it = self.seen is not None
        self.seen = Gain(without_s=without_median_s, with_s=with_median_s)
        # Where aborted steps have left nothing to compare, there is a NaN, and it stays on.
        self.verdict = f"on: measured, it saves {self.seen.saved_ratio:.1%} of a step ({self.seen})"
        if with_median_s >= without_median_s:
            self.is_on, self._is_paused = None if was_worth_it else False, was_worth_it
            until = " until the link's rate changes" if was_worth_it else ""
            self.verdict = f"off{until}, because it saves nothing: measured, {self.seen}"


def _median_s(lasted_s: Sequence[float]) -> float:
    return median_low(lasted_s) if lasted_s else float("nan")


@dataclass(frozen=True)
class Agreed:
    """What rank 0 said: the order in which pieces are sent, what that is predicted to save, and at which rate."""

    pieces: tuple[Piece, ...]
    gain: Gain
    rate_bytes_per_s: float


def measure(
    buckets: Sequence[Bucket], steps: Sequence[StepTiming], needed_s: Sequence[float], forward_s: float
) -> MeasuredStep:
    """Summarise this rank's last steps, which had these buckets. Local."""
    sizes = [bucket.size_bytes for bucket in buckets]
    alike = [step for step in steps if [bucket.size_bytes for bucket in step.buckets] == sizes]
    ready_s = [
        median_low([step.buckets[i].ready_s - step.started_s for step in alike]) for i in range(len(sizes))
    ]
    busy_s = min(step.communication_s for step in alike)
    return MeasuredStep(
        ready_s=tuple(max(0.0, seconds) for seconds in ready_s),
        needed_s=tuple(needed_s),
        backward_s=median_low([step.backward_s for step in alike]),
        forward_s=forward_s,
        reduced_s=median_low([step.backward_s + step.exposed_s for step in alike]),
        rate_bytes_per_s=sum(sizes) / max(busy_s, 1e-9),
    )


def agree(pieces: Sequence[Piece], mine: MeasuredStep, group: ProcessGroup, peers: Peers) -> Agreed:
    """Let rank 0 plan for the slowest backward and the best rate. Collective; blocks; same on all ranks."""
    row = torch.tensor(
        [-mine.reduced_s, mine.rate_bytes_per_s, mine.backward_s, *mine.ready_s], dtype=torch.float64
    )
    rows = peers.rows_of_all(row, group, "gathering the times of a step")
    words = torch.zeros(len(pieces) + 3, dtype=torch.float64)
    if group.rank() == 0:
        slowest = _slowest(rows, mine)
        order = plan(pieces, slowest)
        gain = predict(pieces, order, slowest)
        said = [gain.without_s, gain.with_s, slowest.rate_bytes_per_s]
        words = torch.tensor([*said, *map(float, order)], dtype=torch.float64)
    peers.wait(broadcast(words, group, source=0), "agreeing on the order of pieces")
    without_s, with_s, rate, *order_words = words.tolist()
    return Agreed(tuple(pieces[int(place)] for place in order_words), Gain(without_s, with_s), rate)


def _slowest(rows: Sequence[Tensor], mine: MeasuredStep) -> MeasuredStep:
    """The step whose gradients are there when the last rank's are. A rank that waits sees less of the link's rate."""
    reduced_s, rate, backward_s, *ready_s = torch.stack(list(rows)).amax(0).tolist()
    return MeasuredStep(tuple(ready_s), mine.needed_s, backward_s, mine.forward_s, -reduced_s, rate)
