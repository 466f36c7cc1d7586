"""What was decided, what it was expected to bring, and what it brought: for `report()`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from paceline.planning import Decision


class Ledger:
    """The history of one model's compression on this rank; its numbers are agreed on, so equal on all ranks."""

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
        """Whether nothing was predicted so far."""
        return self._decision is None

    def step(self, codec: str | None, saved_bytes: int) -> None:
        """A step was reduced by this codec."""
        self.num_steps[codec] = self.num_steps.get(codec, 0) + 1
        if codec is not None:
            self.saved_bytes += saved_bytes
            self.saved_s += self._saved_s_per_step.get(codec, 0.0)

    def observed(self, codec: str | None, period_s: float) -> None:
        """Steps with this codec were timed."""
        self._observed_s[codec] = period_s

    def decided(self, step: int, decision: Decision, errors: dict[str, float]) -> None:
        """A prediction was made."""
        self._decision, self._errors = decision, errors
        self._note(step, "predicted", codec=decision.chosen, prediction=_plain(asdict(decision)))

    def tried(
        self, step: int, codec: str, with_s: float, without: str | None, without_s: float, is_on: bool
    ) -> None:
        """Steps with and without a codec were compared."""
        self._observed_s.update({codec: with_s, without: without_s})
        self._saved_s_per_step[codec] = without_s - with_s
        self._note(
            step, "tried", codec=codec, step_s=with_s, without=without, without_s=without_s, is_on=is_on
        )

    def checked(self, step: int, codec: str | None, period_s: float) -> None:
        """Settled steps were timed."""
        self._observed_s[codec] = period_s
        if self._history and self._history[-1]["what"] == "checked" and self._history[-1]["codec"] == codec:
            self._history.pop()  # the last of a row is enough
        self._note(step, "checked", codec=codec, step_s=period_s)

    def resumed(self, step: int, codec: str | None) -> None:
        """A decision of an earlier run holds on."""
        self._note(step, "resumed", codec=codec)

    def _note(self, step: int, what: str, **details: Any) -> None:
        self._history.append({"step": step, "what": what, **details})

    def report(self, in_use: str | None, phase: str) -> dict[str, Any]:
        """Everything, as JSON takes it; times in seconds, rates in bytes a second, None where nothing is known yet."""
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
    """With None for infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value
