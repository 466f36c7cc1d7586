"""The reduction of `compression="auto"`: the mean, with a codec in the steps that it makes shorter.

Rules
1. The ranks exchange numbers after a step's last bucket, in which all of them take part. If that step fails on any
   rank, the numbers are dropped on all ranks, and the next step exchanges again.
2. A codec's state is kept while the codec is in use or tried.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Chain, Work, all_reduce_max, device_for_metadata
from paceline.compression import Compressor
from paceline.errors import ConfigurationError
from paceline.observe import StepTiming
from paceline.observe.timings import tell
from paceline.planning.trial import Phase, StepPlan, Trial, TrialConfig
from paceline.quantities import ms
from paceline.reductions.lossy import Lossy
from paceline.reductions.reduction import Mean, Message, Reduction, StepEnd

_PLAIN = "none"


class Auto(Reduction):
    """The mean, with the codec that makes steps shorter, as measured; without one if none does.

    Trains from the first step on. Steps run with each candidate and without any in turn, and the shortest stays if it
    is seen twice to save enough. When steps become longer or shorter later, all are tried again. On one host there is
    usually nothing to save.

    Limits: One decision for the group: all its reductions cross the same links. The residuals of a codec with error
    feedback are dropped when it is turned off.

    Args:
        candidates: Codecs by name, compressors, or reductions that compress. By default bfloat16 alone: half the
            bytes, float32's range, and gradients of 8 bits' precision, which does not affect training. `float16`
            overflows at 65,504, so it needs a loss scale. int8 and the others change gradients more, so name them to
            allow them.
        config: How many steps a trial takes, and what a codec has to save. By default 2 % of a step.

    Attributes:
        loss_scale: As `Lossy.loss_scale`, for all candidates that have it: returns the factor of the loss.

    Contract:
        All ranks are given the same arguments. They decide from the same exchanged numbers, hence alike.
    """

    needs_all_buckets = True

    def __init__(
        self,
        candidates: Sequence[Compressor | Reduction | str] = ("bf16",),
        config: TrialConfig | None = None,
    ) -> None:
        self._settings = (tuple(candidates), config)
        self._config = config or TrialConfig()
        self._candidates = _named(candidates)
        self._plain = Mean()
        self.loss_scale: Callable[[], float] | None = None
        self._running: dict[str, Reduction] = {}  # codecs with their state, while in use
        self._model: tuple[Mapping[str, Parameter], ProcessGroup] | None = None
        self._refused: dict[str, str] = {}  # why a candidate cannot reduce the model
        self._num_steps: dict[str, int] = {}  # by codec
        self._step_s: dict[str, float] = {}  # the last measured duration of a step, by codec
        self._saved_bytes, self._saved_s = 0, 0.0
        self._history: list[dict[str, Any]] = []
        self._has_told = False
        self._start_over((), 1)

    def _start_over(self, codecs: Sequence[str], num_ranks: int) -> None:
        """Drop all measurements and start with these candidates."""
        self._codecs = tuple(codecs)
        self._trial = Trial(codecs, self._config)
        self._is_idle = not codecs or num_ranks == 1
        self._loaded: list[str | None] = []  # the codec of a loaded state, until the ranks have compared it
        self._plan = StepPlan(None, is_timed=False)  # of the step under way
        self._active: Reduction = self._plain
        self._largest_index = -1  # of the buckets of the step under way
        self._last_bucket = -1  # the largest index of the step before
        # The maxima of all ranks' numbers, once exchanged in the step under way
        self._agreed: list[float] = []
        self._ended_s: float | None = None  # when the last step ended; None: it failed
        self._is_under_way = False

    def __repr__(self) -> str:
        return f"Auto({', '.join(self._candidates)}; {self._config})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the settings alone: measurements belong to a process group, which cannot be copied."""
        return type(self), self._settings

    # ---- a reduction

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        before = set() if self._model is None else {id(parameter) for parameter in self._model[0].values()}
        if before and not before & {id(parameter) for parameter in named_parameters.values()}:
            raise ConfigurationError(
                f"{self!r} measures and reduces another model already. Make one for each model."
            )
        self._model = dict(named_parameters), process_group
        self._refused, self._running = {}, {}
        for name in self._candidates:
            try:
                self._new_codec(name)
            except ConfigurationError as error:
                self._refused[name] = str(error)
        able = [name for name in self._candidates if name not in self._refused]
        self._start_over(able, process_group.size())

    def _new_codec(self, name: str) -> Reduction:
        """Return a new reduction of this candidate, prepared for the current model."""
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

    def _current_loss_scale(self, given: Lossy) -> float:
        """Look the scale up in each step: it may be set later, and a copied bound method would ask a copy."""
        return (self.loss_scale or given.loss_scale)()

    @property
    def carries_status(self) -> bool:  # type: ignore[override]
        """Return whether the reduction in use carries status words."""
        return self._active.carries_status

    @property
    def _exchanges(self) -> bool:
        """Return whether the ranks exchange numbers after the last bucket of the step under way."""
        return not self._is_idle and (bool(self._loaded) or self._trial.is_due)

    def begin_step(self, num_ranks: int, active_ratio: float = 1.0, share: float | None = None) -> float:
        if self._is_under_way:
            self._ended_s = None  # the last step failed
        self._is_under_way = True
        if not self._is_idle:
            self._plan = StepPlan(None, is_timed=False) if self._loaded else self._trial.plan
        codec = self._plan.candidate
        if codec is not None and codec not in self._running:
            self._running[codec] = self._new_codec(codec)
        self._active = self._plain if codec is None else self._running[codec]
        self._largest_index, self._agreed = -1, []
        return self._active.begin_step(num_ranks, active_ratio, share)

    def launch(self, message: Message) -> Work:
        self._largest_index = max(self._largest_index, message.index)
        pending = self._active.launch(message)
        if message.index != self._last_bucket or not self._exchanges:
            return pending
        return Chain(self._exchange(pending, message), num_stages=2)

    def _exchange(self, pending: Work, message: Message) -> Iterator[Work]:
        """Take the maxima of all ranks' numbers when the bucket is done. Collective."""
        yield pending
        numbers = self._trial.medians()
        if self._loaded:  # the maxima are the largest index of a codec, and the negative of the smallest
            index = float(-1 if self._loaded[0] is None else self._codecs.index(self._loaded[0]))
            numbers = [index, -index]
        group = message.process_group
        device = device_for_metadata(group, message.flat.device)
        maxima = torch.tensor(numbers, dtype=torch.float64, device=device)
        yield all_reduce_max(maxima, group)
        self._agreed = maxima.tolist()

    def end_step(self, ended: StepEnd) -> None:
        self._active.end_step(ended)
        self._is_under_way = False
        self._last_bucket = self._largest_index
        if self._is_idle:
            return
        self._count()
        is_settled = self._trial.phase is Phase.SETTLED
        # Once it has settled, many steps' durations are the device's anyway.
        duration_s = self._measure(ended.timing if is_settled else ended.settled_timing())
        if self._loaded or self._trial.is_due:
            if self._agreed:
                self._decide()
        elif duration_s is not None or not self._plan.is_timed:
            self._trial.advance()
            if duration_s is not None and self._plan.is_timed:
                self._trial.add(self._plan.candidate, duration_s)
        needed = self._loaded or self._trial.candidates
        self._running = {name: codec for name, codec in self._running.items() if name in needed}

    def _measure(self, timing: StepTiming) -> float | None:
        """Return the duration of the step that has ended, in seconds. None: a failed or local one was before it."""
        before_s, self._ended_s = self._ended_s, time.perf_counter()
        return None if before_s is None or not timing.buckets else self._ended_s - before_s

    def _count(self) -> None:
        codec = self._plan.candidate or _PLAIN
        self._num_steps[codec] = self._num_steps.get(codec, 0) + 1
        if isinstance(self._active, Lossy):
            self._saved_bytes += self._active.last_step.saved_bytes
        if self._plan.candidate is not None and codec in self._step_s:
            self._saved_s += self._step_s[_PLAIN] - self._step_s[codec]

    # ---- decisions

    def _decide(self) -> None:
        """Decide from what the ranks have exchanged. Local; the same on every rank."""
        trial, agreed = self._trial, self._agreed
        if self._loaded:
            (codec,), self._loaded = self._loaded, []
            if agreed[0] == -agreed[1]:
                trial.resume(codec)
            self._note("resumed")
            return
        trial.advance()
        before, phase = trial.in_use, trial.phase
        step_s = {name or _PLAIN: seconds for name, seconds in trial.decide(agreed).items()}
        if not step_s:
            return
        self._step_s.update(step_s)
        if phase is Phase.SETTLED and self._history[-1]["what"] == "checked":
            self._history.pop()  # of successive checks the last is enough
        self._note("checked" if phase is Phase.SETTLED else "tried", step_s=step_s)
        has_ended = phase is not Phase.SETTLED and trial.phase is Phase.SETTLED
        if has_ended and (not self._has_told or trial.in_use != before):
            self._tell(step_s)

    def _note(self, what: str, **details: Any) -> None:
        trial = self._trial
        self._history.append({"step": trial.num_steps, "what": what, "in_use": trial.in_use, **details})

    def _tell(self, step_s: Mapping[str, float]) -> None:
        self._has_told = True
        if self._model is None or self._model[1].rank() != 0:
            return
        measured = ", ".join(f"{ms(seconds)} with {name}" for name, seconds in step_s.items())
        outcome = f"{self._trial.in_use} is on" if self._trial.in_use else "no codec is on"
        step = f'compression="auto", step {self._trial.num_steps}'
        tell("compression", f"{step}: {outcome}. Measured: a step takes {measured}.")

    # ---- reports and state

    def report(self) -> dict[str, Any]:
        """Return what was measured, chosen and saved, for JSON; times in seconds. Local; the same on every rank."""
        report = {
            "in_use": self._trial.in_use,
            "phase": "resuming" if self._loaded else self._trial.phase.value,
            "num_steps": self._num_steps,
            "step_s": self._step_s,
            "saved_s": self._saved_s,
            "saved_bytes": self._saved_bytes,
            "left_out": self._refused,
            "history": self._history,
        }
        return copy.deepcopy(report)

    def state_dict(self) -> dict[str, Any]:
        codec = self._loaded[0] if self._loaded else self._trial.in_use
        running = self._running.get(codec) if codec is not None else None
        return {"codec": codec, "state": {} if running is None else running.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned: from the third step on the codec that was on is on again.

        Local, but on every rank before the same step. If ranks were given different codecs, all start over. Raises
        ConfigurationError for no state of this kind, or that of a codec which is not among the candidates.
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
        self._loaded = [name]


def _named(candidates: Sequence[Compressor | Reduction | str]) -> dict[str, Reduction]:
    from paceline.reductions.by_name import choose_reduction  # noqa: PLC0415  its table contains Auto

    return {
        given if isinstance(given, str) else repr(given): choose_reduction(None, compression=given)
        for given in candidates
    }
