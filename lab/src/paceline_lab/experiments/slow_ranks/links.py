"""The doctor on three emulated hosts of which one has a slow or lossy link, in one direction or both; root only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline_lab.bench.ranks import ClusterRanks
from paceline_lab.emulation import ClusterSpec
from paceline_lab.experiments.registry import IS_ROOT
from paceline_lab.experiments.slow_ranks.grading import LEAST_EFFECT, Grade
from paceline_lab.experiments.slow_ranks.injected_training import Graded, Training, train_cases
from paceline_lab.experiments.slow_ranks.injections import Case

_HOSTS, _RATE = 3, "200Mbit"
_CLEAN = "clean links"


@dataclass(frozen=True)
class LinkCause:
    """What one host's link has.

    Attributes:
        strengths: Of it.
        unit: Of them, as `ClusterSpec.parse` takes it.
        option: Of `ClusterSpec.parse`.
        others: What the other hosts have.
        kind: What the doctor may call it.
        direction: As `Finding`'s; "": not asked.
        besides: Further options.
    """

    strengths: tuple[float, ...]
    unit: str
    option: str
    others: str
    kind: str
    direction: str = ""
    besides: Mapping[str, str] = field(default_factory=dict)


LINK_CAUSES = {
    "slow link": LinkCause((20, 50), "Mbit", "rate", _RATE, "slow link: rate", "both"),
    "slow link, towards it only": LinkCause(
        (20, 50), "Mbit", "port_rate", _RATE, "slow link: rate", "towards"
    ),
    "slow link, from it only": LinkCause(
        (20, 50), "Mbit", "rate", _RATE, "slow link: rate", "from", {"port_rate": _RATE}
    ),
    "lossy link": LinkCause((0.5, 1, 2), "%", "loss", "0%", "slow link: loss"),
    _CLEAN: LinkCause((0,), "", "", "", ""),
}


def is_possible() -> bool:
    """Whether hosts can be emulated here."""
    return IS_ROOT


def grade_links(seed: int, known: Collection[tuple[str, float, int]]) -> Iterator[Grade]:
    """Grade what is not known yet of one seed; the clean run, which the others are compared with, always runs."""
    missing = [
        (name, strength)
        for name, of in LINK_CAUSES.items()
        for strength in of.strengths
        if (("clean", 0, seed + 1000) if name == _CLEAN else (name, strength, seed)) not in known
    ]
    if not missing:
        return
    clean = _run(seed, {})
    for name, strength in missing:
        of, culprit = LINK_CAUSES[name], (seed + int(10 * strength)) % _HOSTS
        if name == _CLEAN:
            yield _grade(name, strength, seed, -1, clean, clean)
            continue
        values = [f"{strength:g}{of.unit}" if host == culprit else of.others for host in range(_HOSTS)]
        yield _grade(
            name, strength, seed, culprit, _run(seed, {**of.besides, of.option: ",".join(values)}), clean
        )


def _run(seed: int, links: dict[str, Any]) -> Graded:
    spec = ClusterSpec.parse(**{"hosts": _HOSTS, "rate": _RATE, **links})
    with ClusterRanks(spec) as ranks:
        return ranks.run(train_cases, Training((Case("clean", 0, seed),)), "three hosts")[0][0]


def _grade(name: str, strength: float, seed: int, culprit: int, graded: Graded, clean: Graded) -> Grade:
    finding, of = graded.diagnosis.finding, LINK_CAUSES[name]
    effect = graded.step_s / clean.step_s - 1
    is_effective = name != _CLEAN and effect >= LEAST_EFFECT
    answer, is_right, error = "silent", False, None
    if finding is not None:
        is_right = finding.kind == "link" and finding.rank == culprit
        answer = "right" if is_right else "wrong"
        if is_right and finding.without is not None:
            error = finding.without.step_s / clean.step_s - 1
    is_cause = is_right and finding is not None and finding.cause == of.kind
    if name == _CLEAN:
        name, answer = "clean", "quiet" if finding is None else "alarm"
        seed += 1000  # beside the clean runs of one machine
    direction = ""
    if of.direction:
        said = finding.direction if finding is not None and is_right else ""
        direction = "right" if said == of.direction else "wrong" if said else "silent"
    return Grade(
        name,
        strength,
        seed,
        effect,
        is_effective,
        answer,
        is_cause,
        is_cause,
        error,
        graded.diagnosis.words,
        direction=direction,
    )
