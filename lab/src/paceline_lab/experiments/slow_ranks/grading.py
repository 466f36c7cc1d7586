"""Grading of the doctor's answers. Misses stay in the table. Two rules decide from the records which answers are right.

Rules
1. A case counts if its effect is verified. The injection must have made the step at least 5 % longer. It must also
   exceed three times the noise: the root mean square difference of clean runs' steps from those before and after them.
2. A process on a core that other ranks may use as well delays any rank that the kernel puts there. If its chosen rank
   is not 5 % of a step later than every other, "all ranks" is right, and naming that rank is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, median_high

from paceline.diagnosis import Finding, diagnose
from paceline.diagnosis.step_table import table_of
from paceline.observe.run_reading import Run
from paceline_lab.experiments.slow_ranks.injections import Case
from paceline_lab.experiments.slow_ranks.links import CLEAN_LINKS, LINK_CAUSES
from paceline_lab.experiments.slow_ranks.records import BEFORE, REPAIRED, SLOW, Recorded

LEAST_EFFECT, _TIMES_CHANCE = 0.05, 3.0  # of the repaired step; and of what clean runs show
_CLOSE = 0.05  # a prediction of the repaired step
_OF_LINKS = 1000  # clean runs on links have seeds from here on, beside those of one machine


@dataclass(frozen=True)
class Grade:
    """One graded case, with the doctor's answer.

    Attributes:
        cause: Cause of the injection.
        strength: Strength of the injection.
        seed: Seed of the rank and the layer.
        effect: The step with the injection over the repaired one, less 1.
        is_effective: Whether that is enough to be asked for (rule 1).
        answer: "right" or "wrong" of the rank, "silent", or of clean runs "quiet" or "alarm".
        is_cause_right: Phase, layer and cause as well.
        is_when_right: And the pattern in time.
        error: The predicted step over the measured one after the repair, less 1; None: none predicted.
        sentence: Answer of the doctor.
        drift: The median step after the repair over the one before the injection, less 1: what the machine did.
        direction: Grade of a link's direction, if one is asked: "right", "wrong" or "silent"; otherwise "".
        load: Load of the machine at the end.
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
    load: float = 0.0

    @property
    def counts(self) -> bool:
        return self.is_effective or self.cause == "clean"


@dataclass(frozen=True)
class _Steps:
    median_s: float
    mean_s: float


def _steps_of(*runs: Run) -> _Steps:
    steps_s = [table_of(run).steps_s for run in runs]
    return _Steps(fmean(median_high(x) for x in steps_s), fmean(fmean(x) for x in steps_s))


def grades_of(recorded: Mapping[Case, Recorded]) -> list[Grade]:
    """Return the grades of all cases. A link's case is compared with the clean jobs of all seeds."""
    cleans_s = [_steps_of(x.runs[SLOW]).median_s for case, x in recorded.items() if case.cause == CLEAN_LINKS]
    found = []
    for case, x in recorded.items():
        if case.cause not in LINK_CAUSES:
            found.append(grade_rank(x))
        elif cleans_s:
            found.append(grade_link(x, median(cleans_s)))
    chance = [x.effect for x in found if x.cause == "clean" and x.seed < _OF_LINKS]
    bar = max(LEAST_EFFECT, _TIMES_CHANCE * math.sqrt(fmean(x * x for x in chance)) if chance else 0.0)
    return [replace(x, is_effective=x.cause != "clean" and x.effect >= bar) for x in found]


def grade_rank(recorded: Recorded) -> Grade:
    """Compare the doctor's answers for the slow steps with the injection, and with the steps before and after."""
    case, of = recorded.case, recorded.case.of
    diagnosis = diagnose(recorded.runs[SLOW])
    finding = diagnosis.finding
    lasts = bool(of.when & {"always", "moving", "since"})
    before, slow, after = (_steps_of(recorded.runs[x]) for x in (BEFORE, SLOW, REPAIRED))
    then_s = fmean(x.median_s if lasts else x.mean_s for x in (before, after))
    effect = (slow.median_s if lasts else slow.mean_s) / then_s - 1
    is_clean = case.cause == "clean"
    is_right = is_cause = False
    error = None
    if finding is not None:
        has_one = of.is_of_one and case.cause != "moves from rank to rank"
        has_one &= not of.may_hit_all or _is_latest(recorded, then_s)
        is_right = not is_clean and finding.rank == (recorded.culprit if has_one else None)
        is_cause = (
            is_right
            and (not of.kinds or finding.cause in of.kinds)
            and (not of.phases or finding.phase in of.phases)
            and recorded.layer in {"", finding.layer}
        )
        if is_right and finding.without is not None:
            error = (finding.without.step_s if lasts else finding.without.mean_s) / then_s - 1
    return Grade(
        case.cause,
        case.strength,
        case.seed,
        effect,
        False,
        _answer(finding, is_clean=is_clean, is_right=is_right),
        is_cause,
        finding is not None and is_right and finding.when in of.when,
        error,
        diagnosis.words,
        after.median_s / before.median_s - 1,
        load=recorded.load,
    )


def _is_latest(recorded: Recorded, then_s: float) -> bool:
    """Return whether the rank that was struck works longer than every other (rule 2)."""
    table = table_of(recorded.runs[SLOW])
    place = table.ranks.index(recorded.culprit)
    return median(leads[place] for leads in table.leads_s()) >= LEAST_EFFECT * then_s


def grade_link(recorded: Recorded, then_s: float) -> Grade:
    """The same of a link: with steps on clean ones."""
    case, of = recorded.case, LINK_CAUSES[recorded.case.cause]
    diagnosis = diagnose(recorded.runs[SLOW])
    finding = diagnosis.finding
    effect = _steps_of(recorded.runs[SLOW]).median_s / then_s - 1
    is_clean = case.cause == CLEAN_LINKS
    is_right = (
        finding is not None and not is_clean and finding.kind == "link" and finding.rank == recorded.culprit
    )
    is_cause = finding is not None and is_right and finding.cause == of.kind
    said = finding.direction if finding is not None and is_right else ""
    predicted = finding.without if finding is not None and is_right else None
    return Grade(
        "clean" if is_clean else case.cause,
        case.strength,
        case.seed + (_OF_LINKS if is_clean else 0),
        effect,
        False,
        _answer(finding, is_clean=is_clean, is_right=is_right),
        is_cause,
        is_cause,
        None if predicted is None else predicted.step_s / then_s - 1,
        diagnosis.words,
        direction=""
        if not of.direction
        else "right"
        if said == of.direction
        else "wrong"
        if said
        else "silent",
        load=recorded.load,
    )


def _answer(finding: Finding | None, *, is_clean: bool, is_right: bool) -> str:
    if finding is None:
        return "quiet" if is_clean else "silent"
    return "alarm" if is_clean else "right" if is_right else "wrong"


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
