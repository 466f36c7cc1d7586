"""The reduction of `compression="auto"`: the mean, with a codec in the steps that it makes shorter."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Chain, Work
from paceline.compression import Compressor
from paceline.errors import ConfigurationError
from paceline.numbers_given import number
from paceline.observe.timings import tell
from paceline.planning import Rules
from paceline.reductions.auto.course import Pace, Phase, Question
from paceline.reductions.auto.group_decision import IDLE, GroupDecision, Ledger
from paceline.reductions.auto.measurement import Probe, payload_ratios, traffic_of
from paceline.reductions.lossy import Lossy
from paceline.reductions.reduction import Mean, Message, Reduction, StepEnd

_PLAIN = "none"
_FURTHER = ("int8", "powersgd")  # what is named if much stays exposed: they send less than bfloat16


class Auto(Reduction):
    """The mean, with the codec that is predicted and then measured to shorten a step; without one if none does.

    Trains from the first step on. Some steps are timed without a codec, then a few reductions of real gradients, with
    and without each candidate. From these a step with each candidate is predicted (`paceline.planning`). If the best
    two save enough, they are compared in steps with and without them. The better one stays on if it saves time. Rank 0
    says what is still exposed, and which other codec would send less. From then on
    the duration of steps is checked: when it changes, all is measured again. On one host there is usually nothing to
    save.

    Limits: One decision for the group: all its reductions cross the same links. On an accelerator launches are
    asynchronous, so the prediction is rough, and the comparison decides. The residuals of a codec with error feedback
    are dropped when it is turned off.

    Args:
        candidates: Codecs by name, compressors, or reductions that compress. By default bfloat16 alone: half the
            bytes, float32's range, and gradients of 8 bits' precision, which does not affect training. `float16`
            overflows at 65,504, so it needs a loss scale. int8 and the others change gradients more, so name them to
            allow them.
        on_ratio: The fraction of a step's duration that a codec must save to be turned on.
        off_ratio: The fraction below which it is turned off again; by default a third of `on_ratio`.
        pace: How many steps are measured, compared and checked.

    Attributes:
        loss_scale: As `Lossy.loss_scale`, for all candidates that have it: returns the factor of the loss.

    Contract:
        All ranks are given the same arguments. Ranks exchange a few numbers, and time reductions, after a step's last
        bucket. They decide from the same numbers, hence alike.

    Source:
        The rule is a conclusion of "On the Utility of Gradient Compression in Distributed Training Systems" (Agarwal et
        al., MLSys 2022): it pays on slow links only, so predict first.
    """

    needs_all_buckets = True

    def __init__(
        self,
        candidates: Sequence[Compressor | Reduction | str] = ("bf16",),
        on_ratio: float = 0.03,
        off_ratio: float | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._settings = (tuple(candidates), on_ratio, off_ratio, pace)
        self._rules = Rules(on_ratio, number(on_ratio) / 3 if off_ratio is None else off_ratio)
        self._pace = pace or Pace()
        self._candidates = _named(candidates)
        self._plain = Mean()
        self.loss_scale: Callable[[], float] | None = None
        self._ledger = Ledger()
        self._running: dict[str, Reduction] = {}  # codecs with their state, while in use
        self._model: tuple[Mapping[str, Parameter], ProcessGroup] | None = None
        self._start_over((), 1)

    def _start_over(self, codecs: Sequence[str], num_ranks: int) -> None:
        """Drop all measurements and start with these candidates."""
        self._codecs = tuple(codecs)
        self._decision = GroupDecision(codecs, num_ranks, self._pace, self._rules, self._ledger, self._tell)
        self._active: Reduction = self._plain
        # Of a step whose end asks for costs: the codecs that are predicted, and the buckets.
        self._predicted: dict[str, Reduction] = {}
        self._messages: list[Message] = []
        self._sizes_bytes: dict[int, int] = {}  # of the buckets of the step under way, by index
        self._sizes_before: dict[int, int] = {}  # of the last step's

    def __repr__(self) -> str:
        return f"Auto({', '.join(self._candidates)}; {self._rules}, {self._pace})"

    def __reduce__(self) -> tuple[Any, ...]:
        """The settings only: measurements belong to a process group, which cannot be copied."""
        return type(self), self._settings

    # ---- a reduction

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        before = set() if self._model is None else {id(parameter) for parameter in self._model[0].values()}
        if before and not before & {id(parameter) for parameter in named_parameters.values()}:
            raise ConfigurationError(
                f"{self!r} measures and reduces another model already. Make one for each model."
            )
        self._model = dict(named_parameters), process_group
        self._ledger.refused = {}
        for name in self._candidates:
            try:
                self._new_codec(name)
            except ConfigurationError as error:
                self._ledger.refused[name] = str(error)
        self._running = {}
        able = [name for name in self._candidates if name not in self._ledger.refused]
        self._start_over(able, process_group.size())

    def _new_codec(self, name: str) -> Reduction:
        """A new reduction of this candidate, prepared for the current model."""
        if self._model is None:
            raise ConfigurationError(
                f"{self!r} knows no model yet. Pass it to DistributedDataParallel first."
            )
        given = self._candidates[name]
        reduction = copy.deepcopy(given)
        reduction.prepare(*self._model)
        if isinstance(reduction, Lossy) and isinstance(given, Lossy):
            reduction.loss_scale = functools.partial(self._current_loss_scale, given)
        return reduction

    def _further_codecs(self) -> dict[str, Reduction]:
        """Those that are not candidates, but are told of if they would save more."""
        assert self._model is not None, "prepared before the first step"
        codecs = {}
        for name, codec in _named(_FURTHER).items():
            if name not in self._candidates:
                with suppress(ConfigurationError):
                    codec.prepare(*self._model)
                    codecs[name] = codec
        return codecs

    def _current_loss_scale(self, given: Lossy) -> float:
        """Looked up in each step: it may be set later, and a copied bound method would ask a copy of the scaler."""
        return (self.loss_scale or given.loss_scale)()

    @property
    def carries_status(self) -> bool:  # type: ignore[override]
        """That of the reduction in use."""
        return self._active.carries_status

    def begin_step(self, num_ranks: int, active_ratio: float = 1.0, share: float | None = None) -> float:
        self._decision.begin_step()
        codec = self._decision.plan.codec
        if codec is not None and codec not in self._running:
            self._running[codec] = self._new_codec(codec)
        self._active = self._plain if codec is None else self._running[codec]
        self._sizes_bytes = {}
        self._messages, self._predicted = [], {}
        if self._decision.plan.question is Question.COSTS:
            self._predicted = {name: self._new_codec(name) for name in self._codecs} | self._further_codecs()
        self._num_averaged = num_ranks
        self._scale = self._active.begin_step(num_ranks, active_ratio, share)
        return self._scale

    def launch(self, message: Message) -> Work:
        size_bytes = message.num_gradient_elements * message.flat.element_size()
        self._sizes_bytes[message.index] = size_bytes
        question, before = self._decision.plan.question, self._sizes_before
        if question is Question.COSTS:
            self._messages.append(message)
        if question is Question.COSTS and before and message.index == max(before, key=before.__getitem__):
            self._decision.probe = self._make_probe(message, sum(before.values()))
        start_s = time.perf_counter()
        pending = self._active.launch(message)
        self._decision.stopwatch.launched(message.index, start_s, size_bytes)
        if question is Question.NOTHING or not before or message.index != max(before):
            return pending
        return Chain(self._decision.exchange(pending, message.process_group, message.flat.device))

    def _make_probe(self, message: Message, total_bytes: int) -> Probe:
        reductions = {_PLAIN: Mean(), **{name: self._predicted[name] for name in self._codecs}}
        return Probe.of(message, total_bytes, reductions, self._num_averaged, self._scale)

    def end_step(self, ended: StepEnd) -> None:
        self._active.end_step(ended)
        self._sizes_before = self._sizes_bytes
        if self._decision.plan is not IDLE:
            traffic = traffic_of(self._active)
            self._ledger.step(self._decision.plan.codec, 0 if traffic is None else traffic.saved_bytes)
        self._decision.payload_ratios = payload_ratios(self._predicted, self._messages)
        # Once it has settled, many steps' durations are the device's anyway.
        is_settled = self._decision.plan is IDLE or self._decision.course.phase is Phase.SETTLED
        self._decision.end_step(ended.timing if is_settled else ended.settled_timing())
        self._messages, self._predicted = [], {}
        used = self._decision.used()
        self._running = {name: codec for name, codec in self._running.items() if name in used}

    # ---- reports and state

    def _tell(self, message: str) -> None:
        if self._model is None or self._model[1].rank() != 0:
            return
        tell("compression", f'compression="auto", step {self._decision.course.num_steps}: {message}')

    def report(self) -> dict[str, Any]:
        """Predicted and measured durations with and without codecs, and what was saved: a dict for JSON.

        Local; the same on every rank. Times in seconds, rates in bytes per second; None if nothing is known yet, or if
        a rate has no limit.
        """
        course = self._decision.course
        return self._ledger.report(course.in_use, course.phase.value)

    def state_dict(self) -> dict[str, Any]:
        codec = self._decision.course.in_use
        running = self._running.get(codec) if codec is not None else None
        return {"codec": codec, "state": {} if running is None else running.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned: from the third step on the codec that was on is on again.

        Contract:
            Local, but on every rank before the same step. If ranks were given different codecs, all start over.

        Raises:
            ConfigurationError: It is no state of this kind, or of a codec that is not among the candidates.
        """
        if set(state) != {"codec", "state"} or state["codec"] not in {None, *self._codecs}:
            raise ConfigurationError(
                f"{self!r} was given a state with {dict(state).get('codec', sorted(state))!r}, which is not a codec of "
                "its candidates. Load it into the reduction that saved it, or add the codec to candidates."
            )
        name = state["codec"]
        codec = None if name is None else self._new_codec(name)
        if codec is not None:
            codec.load_state_dict(state["state"])
        self._running = {} if codec is None else {name: codec}
        self._start_over(self._codecs, 1 if self._model is None else self._model[1].size())
        self._decision.resume(name)


def _named(candidates: Sequence[Compressor | Reduction | str]) -> dict[str, Reduction]:
    """The candidates as reductions, by the names under which `report` has them."""
    from paceline.reductions.by_name import choose_reduction  # noqa: PLC0415  its table contains Auto

    return {
        given if isinstance(given, str) else repr(given): choose_reduction(None, compression=given)
        for given in candidates
    }
