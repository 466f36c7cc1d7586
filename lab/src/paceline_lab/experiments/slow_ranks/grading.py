"""Was the doctor right? A case counts only if the injection made steps longer; misses stay in the table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_lab.experiments.slow_ranks.injected_training import Graded

LEAST_EFFECT = 0.05  # of the repaired step
_CLOSE = 0.05  # a prediction of the repaired step


@dataclass(frozen=True)
class Grade:
    """One case; what was said stays beside it.

    Attributes:
        cause: What was done.
        strength: How strongly.
        seed: Of whom and where.
        effect: The step with the injection over the repaired one, less 1.
        is_effective: Whether that is enough to be asked for.
        answer: "right" or "wrong" of the rank, "silent", or of clean runs "quiet" or "alarm".
        is_cause_right: Phase, layer and cause as well.
        is_when_right: And the pattern in time.
        error: The predicted step over the measured one after the repair, less 1; None: none predicted.
        sentence: What was said.
        drift: As `Graded`'s.
        direction: Of a link that one was asked of: "right", "wrong" or "silent"; else "".
    """

    cause: str
    strength: float
    seed: int
    effect: float
    is_effective: bool
    answer: str
    is_cause_right: bool
    is_when_right: bool
    error: float | None
    sentence: str
    drift: float = 0.0
    direction: str = ""

    @property
    def counts(self) -> bool:
        return self.is_effective or self.cause == "clean"


def grade(graded: Graded) -> Grade:
    """Compare what was said with what was done."""
    case, finding, of = graded.case, graded.diagnosis.finding, graded.case.of
    lasts = "always" in of.when or "moving" in of.when or "since" in of.when
    now_s, then_s = (graded.step_s, graded.repaired_s) if lasts else (graded.mean_s, graded.repaired_mean_s)
    effect = now_s / then_s - 1
    sentence = graded.diagnosis.words
    is_clean = case.cause == "clean"

    def made(answer: str, *, cause: bool = False, when: bool = False, error: float | None = None) -> Grade:
        is_effective = effect >= LEAST_EFFECT
        return Grade(
            case.cause,
            case.strength,
            case.seed,
            effect,
            is_effective,
            answer,
            cause,
            when,
            error,
            sentence,
            graded.drift,
        )

    if finding is None:
        return made("quiet" if is_clean else "silent")
    if is_clean:
        return made("alarm")
    has_one = of.is_of_one and case.cause != "moves from rank to rank"
    is_right = finding.rank == graded.culprit if has_one else finding.rank is None
    is_cause = (
        is_right
        and (not of.kinds or finding.cause in of.kinds)
        and (not of.phases or finding.phase in of.phases)
        and graded.layer in {"", finding.layer}
    )
    error = None
    if is_right and finding.without is not None:
        predicted_s = finding.without.step_s if lasts else finding.without.mean_s
        error = predicted_s / then_s - 1
    return made(
        "right" if is_right else "wrong",
        cause=is_cause,
        when=is_right and finding.when in of.when,
        error=error,
    )


@dataclass(frozen=True)
class Row:
    """Grades of one cause and strength, counted."""

    cause: str
    strength: float
    unit: str
    num: int
    num_effective: int
    num_right: int
    num_wrong: int
    num_silent: int
    num_cause: int
    num_when: int
    num_predicted: int
    num_close: int
    worst_error: float
    num_directed: int = 0  # of how many a direction was asked
    num_direction: int = 0

    def cells(self) -> tuple[str, ...]:
        if self.cause == "clean":
            answers = (f"{self.num - self.num_wrong} quiet", f"{self.num_wrong} alarms", "", "", "", "", "")
            return ("clean", "", str(self.num), "", *answers)
        return (
            self.cause,
            f"{self.strength:g} {self.unit}",
            str(self.num),
            str(self.num_effective),
            str(self.num_right),
            str(self.num_wrong),
            str(self.num_silent),
            str(self.num_cause),
            str(self.num_when),
            f"{self.num_close} of {self.num_predicted}" if self.num_predicted else "",
            f"{self.num_direction} of {self.num_directed}" if self.num_directed else "",
        )


COLUMNS = (
    "cause",
    "strength",
    "runs",
    "effective",
    "right rank",
    "wrong",
    "silent",
    "right cause",
    "right pattern",
    "what-if within 5 %",
    "right direction",
)


def rows_of(grades: Iterable[Grade], units: Mapping[str, str]) -> list[Row]:
    """Count by cause and strength, in the order in which they came first."""
    grades = list(grades)
    keys = list(dict.fromkeys((x.cause, x.strength) for x in grades))
    keys.sort(
        key=lambda key: (list(units).index(key[0]) if key[0] in units else 99, grades_order(key, grades))
    )
    return [_row([x for x in grades if (x.cause, x.strength) == key], units.get(key[0], "")) for key in keys]


def grades_order(key: tuple[str, float], grades: Sequence[Grade]) -> int:
    return next(i for i, x in enumerate(grades) if (x.cause, x.strength) == key)


def _row(grades: Sequence[Grade], unit: str) -> Row:
    asked = [x for x in grades if x.counts]
    errors = [x.error for x in asked if x.error is not None]
    return Row(
        grades[0].cause,
        grades[0].strength,
        unit,
        len(grades),
        len(asked),
        sum(x.answer == "right" for x in asked),
        sum(x.answer in {"wrong", "alarm"} for x in asked),
        sum(x.answer == "silent" for x in asked),
        sum(x.is_cause_right for x in asked),
        sum(x.is_when_right for x in asked),
        len(errors),
        sum(abs(x) <= _CLOSE for x in errors),
        max(errors, key=abs, default=0.0),
        sum(x.direction != "" for x in asked),
        sum(x.direction == "right" for x in asked),
    )


def from_samples(samples: Iterable[Mapping[str, Any]]) -> list[Grade]:
    """From a stored report."""
    return [Grade(**sample) for sample in samples]
