"""The mean, compressed where that pays: measured, predicted, tried, watched, and decided alike on all ranks."""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.compression import Compressor
from paceline.errors import ConfigurationError
from paceline.observe import StepTiming
from paceline.planning import Rules, StepProfile, decide
from paceline.reductions.auto.chain import Chain
from paceline.reductions.auto.course import Course, Pace, Phase, Plan, Question
from paceline.reductions.auto.ledger import Ledger
from paceline.reductions.auto.probe import (
    LARGE_SHARE,
    LEAST_BYTES,
    MOST_BYTES,
    Probe,
    prefix,
    smallest,
    traffic_of,
)
from paceline.reductions.auto.samples import Periods, Stopwatch, median_profile, profile_of
from paceline.reductions.collectives import device_for_words, launch_maximum
from paceline.reductions.mean import Mean
from paceline.reductions.pending import Pending
from paceline.reductions.reduction import Message, Reduction

PLAIN = "none"
_LOGGER = logging.getLogger("paceline.compression")
_IDLE = Plan(None, is_sample=False, question=Question.NOTHING)


class Auto(Reduction):
    """The mean, with the codec that is predicted, and then seen, to shorten a step here; with none if there is none.

    Trains from the first step on. Some steps are measured without a codec; then a few reductions of real gradients are
    timed, with and without each candidate; the step that each would give is predicted (`paceline.planning`); the best
    is tried if it saves enough, in steps with and without, and stays on if it does. From then on the time of a step is
    watched: when it changes, all is measured again. On one host there is usually nothing to save.

    Limits: One decision for the group: hosts' links are crossed by the same reductions. On an accelerator launches are
    asynchronous, so the prediction is rough, and the trial has the last word.

    Args:
        candidates: Codecs by name, compressors, or reductions that compress.
        on_ratio: The share of a step that a codec must save to be turned on.
        off_ratio: The share below which it is turned off again; by default a third of that.
        pace: How many steps are measured, tried and watched.

    Contract:
        All ranks are given the same. What is asked of the others (a few numbers, and the timed reductions) travels
        behind a step's last bucket. Ranks decide from the same numbers, hence alike.

    Source:
        The rule is a conclusion of "On the Utility of Gradient Compression in Distributed Training Systems" (Agarwal et
        al., MLSys 2022): it pays on slow links only, so ask first.
    """

    def __init__(
        self,
        candidates: Sequence[Compressor | Reduction | str] = ("bf16",),
        on_ratio: float = 0.03,
        off_ratio: float | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._settings = (tuple(candidates), on_ratio, off_ratio, pace)
        self._rules = Rules(on_ratio, on_ratio / 3 if off_ratio is None else off_ratio)
        self._pace = pace or Pace()
        self._candidates = _named(candidates)
        self._plain: Reduction = Mean()
        self._codecs: tuple[str, ...] = ()  # candidates that can reduce this model
        self._ledger = Ledger()
        self._loaded: tuple[str | None, Reduction | None] | None = None
        self._start()

    def _start(self) -> None:
        self._course = Course(self._pace, self._rules)
        self._running: dict[str, Reduction] = {}  # codecs with their state, while they are used
        self._stopwatch, self._periods = Stopwatch(), Periods()
        self._profiles: list[StepProfile] = []
        self._plan, self._active = _IDLE, self._plain
        self._last_index: int | None = None  # of the last bucket that comes here
        self._largest_index: int | None = None
        self._sizes_bytes: dict[int, int] = {}  # of the step's buckets, by index
        self._answer: list[float] | None = None
        self._probe: Probe | None = None
        self._is_under_way = False

    def __repr__(self) -> str:
        return f"Auto({', '.join(self._candidates)}; {self._rules}, {self._pace})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy starts afresh: what was measured belongs to a process group, which does not travel."""
        return type(self), self._settings

    # ---- a reduction

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        self._named_parameters, self._group = dict(named_parameters), process_group
        self._start()
        refused = {}
        for name in self._candidates:
            try:
                self._fresh(name)
            except ConfigurationError as error:
                refused[name] = str(error)
        self._ledger.refused = refused
        self._codecs = tuple(name for name in self._candidates if name not in refused)
        if self._loaded is not None:
            self._course.resume()

    def _fresh(self, name: str) -> Reduction:
        """A candidate without a past."""
        reduction = copy.deepcopy(self._candidates[name])
        reduction.prepare(self._named_parameters, self._group)
        return reduction

    @property
    def carries_words(self) -> bool:
        return self._active.carries_words

    def begin_step(self) -> None:
        if self._is_under_way:
            self._stopwatch.abandon()  # the last one did not end well
        self._is_under_way = True
        self._plan = self._course.plan() if self._codecs and self._group.size() > 1 else _IDLE
        codec = self._plan.codec
        if codec is not None and codec not in self._running:
            self._running[codec] = self._fresh(codec)
        self._active = self._plain if codec is None else self._running[codec]
        self._answer = self._probe = None
        self._sizes_bytes = {}
        self._stopwatch.begin_step()
        self._active.begin_step()

    def input_scale(self, num_ranks: int) -> float:
        self._num_averaged, self._scale = num_ranks, self._active.input_scale(num_ranks)
        return self._scale

    def launch(self, message: Message) -> Pending:
        size_bytes = message.num_gradient_elements * message.flat.element_size()
        self._sizes_bytes[message.index] = size_bytes
        if self._plan.question is Question.COSTS and message.index == self._largest_index:
            self._probe = self._make_probe(message)
        start_s = time.perf_counter()
        pending = self._active.launch(message)
        self._stopwatch.launched(message.index, start_s, size_bytes)
        if self._plan.question is Question.NOTHING or message.index != self._last_index:
            return pending
        return Chain(self._ask(message, pending), pending)

    def _make_probe(self, message: Message) -> Probe:
        limit_bytes = min(max(self._total_bytes / LARGE_SHARE, LEAST_BYTES), MOST_BYTES)
        reductions = {PLAIN: Mean(), **{name: self._fresh(name) for name in self._codecs}}
        large = prefix(message, limit_bytes)
        return Probe(large, smallest(large), reductions, self._num_averaged, self._scale)

    def end_step(self, timing: StepTiming) -> None:
        self._is_under_way = False
        self._active.end_step(timing)
        sample = self._stopwatch.end_step(timing)
        if self._sizes_bytes:
            self._last_index = max(self._sizes_bytes)
            self._largest_index = max(self._sizes_bytes, key=self._sizes_bytes.__getitem__)
            self._total_bytes = sum(self._sizes_bytes.values())
        if self._plan is _IDLE:
            return
        traffic = traffic_of(self._active)
        self._ledger.step(self._plan.codec, 0 if traffic is None else traffic.saved_bytes)
        if self._plan.is_sample:
            if sample is None:
                return  # after a step that failed, on every rank: it does not count, the next one is the sample
            self._take(*sample)
        if self._plan.question is Question.NOTHING:
            self._course.step()
        elif self._answer is not None:
            self._course.step()
            self._hear(self._answer)
            used = {self._course.in_use, self._course.tried}
            self._running = {name: codec for name, codec in self._running.items() if name in used}

    # ---- what the ranks agree on

    def _take(self, period_s: float, profile: StepProfile) -> None:
        self._periods.add(self._plan.codec, period_s)
        if self._profiles and len(self._profiles[-1].buckets) != len(profile.buckets):
            self._profiles.clear()
        self._profiles = [*self._profiles[-self._pace.num_measured + 1 :], profile]

    def _ask(self, message: Message, pending: Pending) -> Iterator[Pending]:
        """Behind the last bucket: find out, and take the slowest rank's numbers."""
        yield pending
        question = self._plan.question
        if question is Question.COSTS:
            if self._probe is None or not self._profiles:
                return  # nothing has been measured yet; the next step asks again
            yield from self._probe.run()
            period_s = self._periods.medians([self._course.in_use])
            numbers = period_s + median_profile(self._profiles) + self._probe.numbers()
        elif question is Question.PERIODS:
            numbers = self._periods.medians(self._compared())
        else:
            place = self._place_of_loaded()
            numbers = [place, -place]
        device = device_for_words(message.process_group, message.flat.device)
        words = torch.tensor(numbers, dtype=torch.float64, device=device)
        yield launch_maximum(words, message.process_group)
        self._answer = words.tolist()

    def _compared(self) -> list[str | None]:
        """Whose steps' times are asked for: with the codec of a trial and without it, or as they are."""
        course = self._course
        if course.phase is Phase.TRYING:
            return [course.tried, None if course.tried == course.in_use else course.in_use]
        return [course.in_use]

    def _place_of_loaded(self) -> float:
        name = self._loaded[0] if self._loaded is not None else None
        return -1.0 if name is None else float(list(self._candidates).index(name))

    def _hear(self, answer: list[float]) -> None:
        step, question = self._course.num_steps, self._plan.question
        if question is Question.COSTS:
            self._hear_costs(step, answer)
        elif question is Question.RESUMED:
            self._hear_resumed(step, answer)
        elif self._course.phase is Phase.TRYING:
            self._hear_trial(step, *answer)
        else:
            self._ledger.checked(step, self._course.in_use, answer[0])
            self._course.checked(answer[0])
        self._periods.clear()

    def _hear_costs(self, step: int, answer: list[float]) -> None:
        assert self._probe is not None
        period_s, *numbers = answer
        sizes = [bucket.size_bytes for bucket in self._profiles[-1].buckets]
        num_times = 2 + len(sizes)
        profile = profile_of(numbers[:num_times], sizes)
        plain, codecs = self._probe.costs(numbers[num_times:], profile.busy_ratio)
        decision = decide(
            profile,
            plain,
            codecs,
            self._group.size(),
            self._rules,
            self._course.in_use,
            self._course.barred(),
        )
        before = self._course.in_use
        self._ledger.observed(before, period_s)
        self._ledger.decided(step, decision, self._probe.errors(numbers[num_times:]))
        self._course.decided(decision.chosen)
        if step <= self._pace.num_measured + 3 or decision.chosen != before:
            self._tell(decision.words() + (" Trying it." if self._course.tried else ""))

    def _hear_trial(self, step: int, with_s: float, without_s: float) -> None:
        tried, without = self._compared()
        assert tried is not None
        was_on = self._course.in_use == tried
        is_on = self._course.tried_out(with_s, without_s)
        self._ledger.tried(step, tried, with_s, without, without_s, is_on)
        if is_on != was_on:
            self._tell(
                f"{tried} {'is on' if is_on else 'is off'}: measured {with_s * 1e3:,.4g} ms a step with it, "
                f"{without_s * 1e3:,.4g} ms with {without or 'none'}."
            )

    def _hear_resumed(self, step: int, answer: list[float]) -> None:
        name, codec = self._loaded or (None, None)
        agrees = answer[0] == -answer[1]
        self._loaded = None
        if agrees and name is not None and codec is not None:
            self._running[name] = codec
        self._course.resumed(name, agrees)
        self._ledger.resumed(step, self._course.in_use)

    def _tell(self, words: str) -> None:
        if self._group.rank() != 0:
            return
        text = f'compression="auto", step {self._course.num_steps}: {words}'
        if _LOGGER.hasHandlers():
            _LOGGER.info(text)
        else:
            sys.stderr.write(f"paceline: {text}\n")

    # ---- reports and state

    def report(self) -> dict[str, Any]:
        """What was predicted and observed, with and without, and what was saved: numbers and names, as JSON takes them.

        Local; the same on every rank. Times in seconds, rates in bytes a second; None where nothing is known yet, or
        where a rate has no limit.
        """
        return self._ledger.report(self._course.in_use, self._course.phase.value)

    def state_dict(self) -> dict[str, Any]:
        codec = self._course.in_use
        running = self._running.get(codec) if codec is not None else None
        return {"codec": codec, "state": {} if running is None else running.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned: from the second step on the codec that was on is on again.

        Contract:
            Local, but on every rank before the same step. If ranks were given different codecs, all measure afresh.

        Raises:
            ConfigurationError: It is no state of this kind, or of a codec that is not among the candidates.
        """
        if set(state) != {"codec", "state"} or state["codec"] not in {None, *self._candidates}:
            raise ConfigurationError(
                f"{self!r} was given a state with {dict(state).get('codec', sorted(state))!r}, which is not a codec of "
                "its candidates. Load it into the reduction that saved it, or add the codec to candidates."
            )
        codec = None if state["codec"] is None else self._fresh(state["codec"])
        if codec is not None:
            codec.load_state_dict(state["state"])
        self._loaded = (state["codec"], codec)
        self._start()
        self._course.resume()


def _named(candidates: Sequence[Compressor | Reduction | str]) -> dict[str, Reduction]:
    """The candidates as reductions, under the names by which they are reported."""
    from paceline.reductions.choice import choose_reduction  # noqa: PLC0415  its table has us, too

    return {
        given if isinstance(given, str) else repr(given): choose_reduction(None, compression=given)
        for given in candidates
    }
