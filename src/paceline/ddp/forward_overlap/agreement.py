"""Decides whether a module's steps are deferred, and in which order their pieces are sent.

Rules
1. The ranks decide at the same steps by the same numbers, so they are never apart.
2. After three steps rank 0 predicts from what all have measured. After three predictions of no gain it is off for good.
3. A predicted gain is not yet one. Steps with and without the overlap are tried in turn (`paceline.planning.trial`).
   If the first trial finds no gain, it is off for good; if a later one finds none, until step times change.
4. The order is planned anew every 16 steps.
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
from paceline.ddp.bucket import Bucket, real_dtype
from paceline.ddp.forward_overlap.outstanding import FirstUseTimes
from paceline.observe import StepTiming, StepTimings
from paceline.planning.forward_overlap import LEAST_GAIN_RATIO, Gain, MeasuredStep, Piece, cut, plan, predict
from paceline.planning.trial import Phase, StepPlan, Trial, TrialConfig

AGREES_AFTER_STEPS = 3  # buckets are cut anew after the first
AGREES_AGAIN_AFTER = (6, 12)  # the first steps may have been slow, and a rate too low costs the gain
AGREES_AGAIN_EVERY = 16
LOOKS_BACK_STEPS = 8
DECLINES = 3  # so often it is predicted not to pay before it is off for good

WITH = "with forward overlap"  # the one candidate
TRIAL = TrialConfig(gain_ratio=0.01, num_sweeps=1, turn_steps=6, warm_up_steps=2, drift_ratio=0.25)


class Agreement:
    """The decision for one module, the same on every rank.

    Attributes:
        is_on: Whether steps are deferred, perhaps in turn with others. None: the ranks still measure, or wait until
            step times change (rule 3). False: never again.
        gain: What it was predicted to save.
        seen: A step with and without it, by the last trial.
        verdict: The decision with its numbers, in words.
        pieces: All pieces in the order in which they are sent.
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
        self._num_declined = 0
        self._trial: Trial | None = None  # since a gain was predicted
        self._plans: dict[int, StepPlan] = {}  # by step, since the ranks last compared

    @property
    def is_off(self) -> bool:
        """Return whether steps are never deferred again."""
        return self.is_on is False

    def stop(self) -> None:
        """Defer no step any more."""
        self.is_on = False

    def move_to(self, group: ProcessGroup, peers: Peers) -> None:
        """Agree with the ranks of another group, some of which may be new. What is off stays off."""
        self._group, self._peers = group, peers
        self.is_on = False if self.is_off else None
        self.pieces, self.gain, self.seen, self.verdict = (), None, None, ""
        self._planned_sizes, self._num_declined = [], 0
        self.start_again()

    def start_again(self) -> None:
        """Begin with the measurements: other parameters are reduced from now on."""
        self._first_step = self._trial = None
        self._plans = {}

    def defers(
        self,
        buckets: Sequence[Bucket],
        step: int,
        timings: StepTimings,
        forward_s: float,
        needs: FirstUseTimes,
    ) -> bool:
        """Return whether the module's `step`, which begins, is deferred. Collective when ranks agree or compare."""
        if self.is_off:
            return False
        if self._first_step is None:
            self._first_step = step
        num_before = step - self._first_step
        if num_before < AGREES_AFTER_STEPS:
            return False
        if self._trial is not None and self._trial.is_due and step not in self._plans:
            self._compare(self._trial, timings)
        if not self.is_off and self._is_due(buckets, num_before):
            self._decide(self._agree(buckets, timings, forward_s, needs))
        if self._trial is None or self.is_off:
            return bool(self.is_on)
        if step not in self._plans:  # a step that failed is repeated
            self._plans[step] = self._trial.plan
            self._trial.advance()
        return self._plans[step].candidate is not None

    def _is_due(self, buckets: Sequence[Bucket], step: int) -> bool:
        is_cut_anew = bool(self.is_on) and [bucket.size_bytes for bucket in buckets] != self._planned_sizes
        again = step in AGREES_AGAIN_AFTER or step % AGREES_AGAIN_EVERY == 0
        return step == AGREES_AFTER_STEPS or is_cut_anew or again

    def _agree(
        self, buckets: Sequence[Bucket], timings: StepTimings, forward_s: float, needs: FirstUseTimes
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

    def _decide(self, agreed: Agreed) -> None:
        """Follow rule 2. Local; the same on every rank."""
        if self._trial is not None:
            return
        if not self.is_on:  # else the measured steps ran with the overlap, and say nothing about its gain
            self.gain = agreed.gain
        if self.is_on or self._is_forced or agreed.gain.pays:
            self.is_on = True
            how = "without a comparison"
            if not self._is_forced:
                self._trial, how = Trial([WITH], TRIAL), "to be tried in turns"
            gain = self.gain
            saved = f"; predicted to save {gain.saved_ratio:.1%} of a step ({gain})" if gain else ""
            self.verdict = f"on, {how}{saved}"
            return
        self._num_declined += 1
        self.is_on = False if self._num_declined == DECLINES else None
        if self.is_off:
            saved = f"{agreed.gain.saved_ratio:.1%} of a step, less than {LEAST_GAIN_RATIO:.0%}"
            self.verdict = f"off, because it is predicted to save {saved} ({agreed.gain})"

    def _compare(self, trial: Trial, timings: StepTimings) -> None:
        """Follow rule 3. Collective; the same on every rank."""
        timings.settle()
        for before, after in itertools.pairwise(timings.recent()):
            plan = self._plans.get(before.step - 1)
            if plan is not None and plan.is_timed and after.step == before.step + 1:
                trial.add(plan.candidate, after.started_s - before.started_s)
        self._plans = {}
        row = torch.tensor(trial.medians(), dtype=torch.float64)
        rows = self._peers.rows_of_all(row, self._group, "comparing steps with and without forward overlap")
        was_settled = trial.phase is Phase.SETTLED
        step_s = trial.decide(torch.stack(rows).amax(0).tolist())
        is_settled = trial.phase is Phase.SETTLED
        if was_settled and not is_settled:
            self.is_on, self.verdict = True, "on, to be tried again"
        elif is_settled and not was_settled:
            was_worth_it = self.seen is not None
            self.seen = seen = Gain(without_s=step_s[None], with_s=step_s[WITH])
            if trial.in_use is not None:
                self.verdict = f"on: measured, it saves {seen.saved_ratio:.1%} of a step ({seen})"
                return
            self.is_on = None if was_worth_it else False
            until = " until steps take longer or shorter" if was_worth_it else ""
            self.verdict = f"off{until}, because it saves nothing: measured, {seen}"


@dataclass(frozen=True)
class Agreed:
    """The plan of rank 0: the order in which pieces are sent, and the gain that it predicts."""

    pieces: tuple[Piece, ...]
    gain: Gain


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
    words = torch.zeros(len(pieces) + 2, dtype=torch.float64)
    if group.rank() == 0:
        slowest = _slowest(rows, mine)
        order = plan(pieces, slowest)
        gain = predict(pieces, order, slowest)
        words = torch.tensor([gain.without_s, gain.with_s, *map(float, order)], dtype=torch.float64)
    peers.wait(broadcast(words, group, source=0), "agreeing on the order of pieces")
    without_s, with_s, *order_words = words.tolist()
    return Agreed(tuple(pieces[int(place)] for place in order_words), Gain(without_s, with_s))


def _slowest(rows: Sequence[Tensor], mine: MeasuredStep) -> MeasuredStep:
    """Return a step with the times of the slowest rank. The link's rate is the best: a rank that waits sees less."""
    reduced_s, rate, backward_s, *ready_s = torch.stack(list(rows)).amax(0).tolist()
    return MeasuredStep(tuple(ready_s), mine.needed_s, backward_s, mine.forward_s, -reduced_s, rate)
