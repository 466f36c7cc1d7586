"""What the ranks ask each other behind a step's last bucket, and what they make of the answers.

Rules
1. A rank answers with what it has seen itself; the largest number of all ranks counts, so the slowest rank's time. All
   ranks hear the same numbers and go the same way by them.
2. An answer that is heard in a step that then fails, on any rank, is forgotten by all; the next step asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed import ProcessGroup

from paceline.comm.collectives import device_for_words, launch_maximum
from paceline.comm.pending import Pending
from paceline.observe import StepTiming
from paceline.planning import Rules, StepProfile, decide
from paceline.reductions.auto.course import Course, Pace, Phase, Plan, Question
from paceline.reductions.auto.ledger import Ledger
from paceline.reductions.auto.probe import Probe
from paceline.reductions.auto.samples import Periods, Stopwatch, median_profile, profile_of

IDLE = Plan(None, is_sample=False, question=Question.NOTHING)


class Inquiry:
    """One model's way to a decision, on this rank.

    Args:
        codecs: Names of those that can reduce the model; the same on every rank.
        num_ranks: Of the group.
        pace: How many steps for what.
        rules: When a codec is turned on and off.
        ledger: Keeps what was found.
        tell: Says it to the user.
    """

    def __init__(
        self,
        codecs: Sequence[str],
        num_ranks: int,
        pace: Pace,
        rules: Rules,
        ledger: Ledger,
        tell: Callable[[str], None],
    ) -> None:
        self._codecs, self._num_ranks, self._rules = codecs, num_ranks, rules
        self._num_profiles = pace.num_measured
        self._ledger, self._tell = ledger, tell
        self.course = Course(pace, rules)
        self.stopwatch = Stopwatch()
        self.plan = IDLE
        self.probe: Probe | None = None  # of the step under way
        self._loaded: str | None = None
        self._periods = Periods()
        self._profiles: list[StepProfile] = []
        self._answer: list[float] | None = None
        self._is_under_way = False

    def resume(self, codec: str | None) -> None:
        """A decision was loaded: go on with it if all ranks have loaded the same."""
        self._loaded = codec
        self.course.resume()

    def used(self) -> set[str | None]:
        """Codecs whose state is needed."""
        loaded = self._loaded if self.course.phase is Phase.RESUMING else None
        return {self.course.in_use, self.course.tried, loaded}

    # ---- a step

    def begin_step(self) -> None:
        if self._is_under_way:
            self.stopwatch.abandon()  # the last step failed
        self._is_under_way = True
        self.plan = self.course.plan() if self._codecs and self._num_ranks > 1 else IDLE
        self._answer = self.probe = None
        self.stopwatch.begin_step()

    def end_step(self, timing: StepTiming) -> None:
        """The step has ended well, on all ranks."""
        self._is_under_way = False
        sample = self.stopwatch.end_step(timing)
        if self.plan is IDLE:
            return
        if self.plan.is_sample:
            if sample is None:
                return  # the step before it failed, so when it began is not known; the next one is the sample
            self._take(*sample)
        if self.plan.question is Question.NOTHING:
            self.course.step()
        elif self._answer is not None:
            self.course.step()
            self._hear(self._answer)

    def _take(self, period_s: float, profile: StepProfile) -> None:
        self._periods.add(self.plan.codec, period_s)
        if self._profiles and len(self._profiles[-1].buckets) != len(profile.buckets):
            self._profiles.clear()
        self._profiles = [*self._profiles, profile][-self._num_profiles :]

    # ---- questions

    def ask(self, pending: Pending, group: ProcessGroup, device: torch.device) -> Iterator[Pending]:
        """Behind the last bucket, which is `pending`: find out, and take the largest numbers. Collective."""
        yield pending
        if self.plan.question is Question.COSTS:
            if self.probe is None or not self._profiles:
                return  # nothing has been measured yet; the next step asks again
            yield from self.probe.run()
            period_s = self._periods.medians([self.course.in_use])
            numbers = period_s + median_profile(self._profiles) + self.probe.numbers()
        elif self.plan.question is Question.PERIODS:
            numbers = self._periods.medians(self._compared())
        else:
            place = -1.0 if self._loaded is None else float(self._codecs.index(self._loaded))
            numbers = [place, -place]  # the largest and the smallest of all
        words = torch.tensor(numbers, dtype=torch.float64, device=device_for_words(group, device))
        yield launch_maximum(words, group)
        self._answer = words.tolist()

    def _compared(self) -> list[str | None]:
        """Whose steps' times are asked for: with the codec of a trial and without it, or as they are."""
        course = self.course
        if course.tried is None:
            return [course.in_use]
        return [course.tried, None if course.tried == course.in_use else course.in_use]

    # ---- answers

    def _hear(self, answer: list[float]) -> None:
        if self.plan.question is Question.COSTS:
            self._hear_costs(answer)
        elif self.plan.question is Question.RESUMED:
            self._hear_resumed(*answer)
        elif self.course.tried is not None:
            self._hear_trial(self.course.tried, *answer)
        else:
            (period_s,) = answer
            self._ledger.checked(self.course.num_steps, self.course.in_use, period_s)
            self.course.checked(period_s)
        self._periods.clear()

    def _hear_costs(self, answer: list[float]) -> None:
        assert self.probe is not None, "it was run for this answer"
        period_s, *numbers = answer
        sizes = [bucket.size_bytes for bucket in self._profiles[-1].buckets]
        profile, numbers = profile_of(numbers[: 2 + len(sizes)], sizes), numbers[2 + len(sizes) :]
        plain, codecs = self.probe.costs(numbers, profile.busy_ratio)
        before, is_first = self.course.in_use, self._ledger.is_empty
        decision = decide(
            profile,
            plain,
            codecs,
            self._num_ranks,
            self._rules,
            in_use=before,
            barred=self.course.barred(),
            step_s=period_s,
        )
        self._ledger.observed(before, period_s)
        self._ledger.decided(self.course.num_steps, decision, self.probe.errors(numbers))
        self.course.decided(decision.chosen)
        if is_first or decision.chosen != before:
            self._tell(decision.words() + (" Trying it." if self.course.tried else ""))

    def _hear_trial(self, tried: str, with_s: float, without_s: float) -> None:
        without = self._compared()[1]
        was_on = self.course.in_use == tried
        is_on = self.course.tried_out(with_s, without_s)
        self._ledger.tried(self.course.num_steps, tried, with_s, without, without_s, is_on)
        if not (was_on and is_on):
            outcome = "is on" if is_on else "is off again" if was_on else "stays off"
            self._tell(
                f"{tried} {outcome}: measured "
                f"{with_s * 1e3:,.4g} ms a step with it, {without_s * 1e3:,.4g} ms with {without or 'none'}."
            )

    def _hear_resumed(self, largest: float, minus_smallest: float) -> None:
        self.course.resumed(self._loaded, agrees=largest == -minus_smallest)
        self._ledger.resumed(self.course.num_steps, self.course.in_use)
