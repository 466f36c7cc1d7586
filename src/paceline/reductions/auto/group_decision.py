"""How all ranks decide alike on a codec: they all-reduce their measurements after a step's last bucket.

Rules
1. Each rank contributes its own measurements, and the elementwise maximum counts, so the slowest rank's time. All ranks
   get the same numbers and derive the same decision from them.
2. If a step fails on any rank, the numbers that were exchanged in it are dropped on all; the next step exchanges again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed import ProcessGroup

from paceline.comm.collectives import Work, all_reduce_max, device_for_metadata
from paceline.observe import StepTiming
from paceline.planning import Decision, Rules, StepProfile, decide
from paceline.reductions.auto.course import Course, Pace, Phase, Question, StepPlan
from paceline.reductions.auto.measurement import Periods, Probe, Stopwatch, median_profile, profile_of

IDLE = StepPlan(None, is_sample=False, question=Question.NOTHING)


class GroupDecision:
    """This rank's part in deciding which codec reduces each step of one model."""

    def __init__(
        self,
        # The names of the candidates that can reduce the model; the same on every rank.
        codecs: Sequence[str],
        num_ranks: int,
        pace: Pace,  # how many steps each phase takes
        rules: Rules,  # when a codec is turned on and off
        ledger: Ledger,  # records decisions and measurements
        tell: Callable[[str], None],  # called with a message for the user at every change
    ) -> None:
        self._codecs, self._num_ranks, self._rules = codecs, num_ranks, rules
        self._num_profiles = pace.num_measured
        self._ledger, self._tell = ledger, tell
        self.course = Course(pace, rules)
        self.stopwatch = Stopwatch()
        self.plan = IDLE
        self.probe: Probe | None = None  # of the step under way
        self.payload_ratios: dict[str, float] = {}  # of the probe's step, by codec
        self._decision: Decision | None = None  # the last one
        self._loaded: str | None = None
        self._periods = Periods()
        self._profiles: list[StepProfile] = []
        self._agreed: list[float] | None = None
        self._is_under_way = False

    def resume(self, codec: str | None) -> None:
        """A state with this codec was loaded: continue with it if all ranks have loaded the same."""
        self._loaded = codec
        self.course.resume()

    def used(self) -> set[str | None]:
        """The codecs whose state is still needed."""
        loaded = self._loaded if self.course.phase is Phase.RESUMING else None
        return {self.course.in_use, self.course.tried, loaded}

    # ---- a step

    def begin_step(self) -> None:
        if self._is_under_way:
            self.stopwatch.abandon()  # the last step failed
        self._is_under_way = True
        self.plan = self.course.plan() if self._codecs and self._num_ranks > 1 else IDLE
        self._agreed = self.probe = None
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
        elif self._agreed is not None:
            self.course.step()
            self._decide(self._agreed)

    def _take(self, period_s: float, profile: StepProfile) -> None:
        self._periods.add(self.plan.codec, period_s)
        if self._profiles and len(self._profiles[-1].buckets) != len(profile.buckets):
            self._profiles.clear()
        self._profiles = [*self._profiles, profile][-self._num_profiles :]

    # ---- exchange

    def exchange(self, pending: Work, group: ProcessGroup, device: torch.device) -> Iterator[Work]:
        """The stages of a `Chain`: after `pending`, the last bucket, take the maximum of measurements. Collective."""
        yield pending
        if self.plan.question is Question.COSTS:
            if self.probe is None or not self._profiles:
                return  # nothing has been measured yet; the next step exchanges
            yield from self.probe.run()
            period_s = self._periods.medians([self.course.in_use])
            numbers = period_s + median_profile(self._profiles) + self.probe.numbers()
        elif self.plan.question is Question.PERIODS:
            periods, compared = self._periods, self._compared()
            numbers = (
                periods.medians(compared) if self.course.tried is None else periods.comparison(*compared)
            )
        else:
            index = -1.0 if self._loaded is None else float(self._codecs.index(self._loaded))
            numbers = [index, -index]  # their maxima are the largest, and the negative of the smallest
        maxima = torch.tensor(numbers, dtype=torch.float64, device=device_for_metadata(group, device))
        yield all_reduce_max(maxima, group)
        self._agreed = maxima.tolist()

    def _compared(self) -> list[str | None]:
        """The codecs whose steps' durations are exchanged: the two that are compared, or the one in use."""
        course = self.course
        if course.tried is None:
            return [course.in_use]
        return [course.tried, None if course.tried == course.in_use else course.in_use]

    # ---- decision

    def _decide(self, agreed: list[float]) -> None:
        if self.plan.question is Question.COSTS:
            self._decide_by_costs(agreed)
        elif self.plan.question is Question.RESUMED:
            self._decide_on_resuming(*agreed)
        elif self.course.tried is not None:
            if self.course.tries_longer(*agreed):
                return  # with the durations so far
            self._decide_by_comparison(self.course.tried, *agreed[:2])
        else:
            (period_s,) = agreed
            self._ledger.checked(self.course.num_steps, self.course.in_use, period_s)
            self.course.checked(period_s)
        self._periods.clear()

    def _decide_by_costs(self, agreed: list[float]) -> None:
        assert self.probe is not None, "it was run for this exchange"
        period_s, *numbers = agreed
        sizes = [bucket.size_bytes for bucket in self._profiles[-1].buckets]
        profile, numbers = profile_of(numbers[: 2 + len(sizes)], sizes), numbers[2 + len(sizes) :]
        plain, codecs = self.probe.costs(numbers, profile.busy_ratio, self.payload_ratios)
        further = [
            plain.sending(name, ratio)
            for name, ratio in self.payload_ratios.items()
            if name not in self._codecs
        ]
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
            further=further,
        )
        self._decision = decision
        self._ledger.observed(before, period_s)
        self._ledger.decided(self.course.num_steps, decision, self.probe.errors(numbers))
        self.course.decided(decision.chosen, decision.runner_up)
        if is_first or decision.chosen != before:
            then = (
                "Trying it."
                if self.course.tried
                else decision.words_on_the_rest(period_s if decision.chosen == before else decision.step_s)
            )
            self._tell(f"{decision.words()} {then}".rstrip())

    def _decide_by_comparison(self, tried: str, with_s: float, without_s: float) -> None:
        without = self._compared()[1]
        was_on = self.course.in_use == tried
        is_on = self.course.tried_out(with_s, without_s)
        self._ledger.tried(self.course.num_steps, tried, with_s, without, without_s, is_on)
        if not (was_on and is_on):
            rest = ""
            if self._decision is not None and self.course.phase is Phase.SETTLED:
                rest = self._decision.words_on_the_rest(with_s if is_on else without_s)
            without_words = f"{without_s * 1e3:,.4g} ms with {without or 'none'}. {rest}".rstrip()
            outcome = "is on" if is_on else "is off again" if was_on else "stays off"
            self._tell(
                f"{tried} {outcome}: measured {with_s * 1e3:,.4g} ms per step with it, {without_words}"
            )

    def _decide_on_resuming(self, largest: float, minus_smallest: float) -> None:
        self.course.resumed(self._loaded, agrees=largest == -minus_smallest)
        self._ledger.resumed(self.course.num_steps, self.course.in_use)


class Ledger:
    """The decisions, predictions and measurements so far, for `report()`; equal on all ranks."""

    def __init__(self) -> None:
        self._decision: Decision | None = None
        self._errors: dict[str, float] = {}
        self._observed_s: dict[str | None, float] = {}
        self._saved_s_per_step: dict[str, float] = {}
        self._history: list[dict[str, Any]] = []
        self.num_steps: dict[str | None, int] = {}
        self.saved_bytes = 0
        self.saved_s = 0.0
        self.refused: dict[str, str] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there was no prediction yet."""
        return self._decision is None

    def step(self, codec: str | None, saved_bytes: int) -> None:
        """A step was reduced with `codec`."""
        self.num_steps[codec] = self.num_steps.get(codec, 0) + 1
        if codec is not None:
            self.saved_bytes += saved_bytes
            self.saved_s += self._saved_s_per_step.get(codec, 0.0)

    def observed(self, codec: str | None, period_s: float) -> None:
        """Steps with `codec` took `period_s` each."""
        self._observed_s[codec] = period_s

    def decided(self, step: int, decision: Decision, errors: dict[str, float]) -> None:
        """Steps were predicted, and a decision made."""
        self._decision, self._errors = decision, errors
        self._note(step, "predicted", codec=decision.chosen, prediction=_plain(asdict(decision)))

    def tried(
        self, step: int, codec: str, with_s: float, without: str | None, without_s: float, is_on: bool
    ) -> None:
        """Steps with and without a codec were compared; `is_on` says whether it is on now."""
        self._observed_s.update({codec: with_s, without: without_s})
        self._saved_s_per_step[codec] = without_s - with_s
        self._note(
            step, "tried", codec=codec, step_s=with_s, without=without, without_s=without_s, is_on=is_on
        )

    def checked(self, step: int, codec: str | None, period_s: float) -> None:
        """Steps of the settled phase took `period_s` each."""
        self._observed_s[codec] = period_s
        if self._history and self._history[-1]["what"] == "checked" and self._history[-1]["codec"] == codec:
            self._history.pop()  # of successive checks the last is enough
        self._note(step, "checked", codec=codec, step_s=period_s)

    def resumed(self, step: int, codec: str | None) -> None:
        """A decision of an earlier run was restored, or dropped."""
        self._note(step, "resumed", codec=codec)

    def _note(self, step: int, what: str, **details: Any) -> None:
        self._history.append({"step": step, "what": what, **details})

    def report(self, in_use: str | None, phase: str) -> dict[str, Any]:
        """All of it, for JSON; times in seconds, rates in bytes a second, None where not known yet."""
        decision = self._decision
        predicted = {} if decision is None else {option.name: option.step_s for option in decision.options}
        crossovers = {} if decision is None else {o.name: o.crossover_bytes_per_s for o in decision.options}
        record = {
            "in_use": in_use,
            "phase": phase,
            "num_steps": {name or "none": number for name, number in self.num_steps.items()},
            "predicted_step_s": None if decision is None else {"none": decision.plain_s, **predicted},
            "observed_step_s": {name or "none": seconds for name, seconds in self._observed_s.items()},
            "saved_s": self.saved_s,
            "saved_bytes": self.saved_bytes,
            "gradient_error": self._errors,
            "crossover_bytes_per_s": crossovers,
            "link_bytes_per_s": None if decision is None else decision.link_bytes_per_s,
            "latency_s": None if decision is None else decision.latency_s,
            "left_out": self.refused,
            "history": list(self._history),
        }
        plain: dict[str, Any] = _plain(record)
        return plain


def _plain(value: Any) -> Any:
    """With None instead of infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value
