"""The doctor on three emulated hosts: one has a slow or lossy link, or all are some milliseconds apart; root only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline_lab.bench.ranks import ClusterRanks
from paceline_lab.emulation import ClusterSpec
from paceline_lab.experiments.registry import IS_ROOT
from paceline_lab.experiments.slow_ranks.injected_training import Training, train_cases
from paceline_lab.experiments.slow_ranks.injections import Case

_HOSTS, _RATE = 3, "400Mbit"
CLEAN_LINKS = "clean links"
"""Whose steps the other links' are compared with."""


@dataclass(frozen=True)
class LinkCause:
    """A fault of one host's link.

    Attributes:
        strengths: Strengths of the fault.
        unit: Unit of the strengths, as `ClusterSpec.parse` takes it.
        option: Option of `ClusterSpec.parse`.
        others: Value of the option on the other hosts.
        kind: Kind that the doctor may call it.
        direction: Direction of the right `Finding`; "": not graded.
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
    CLEAN_LINKS: LinkCause((0,), "", "", "", ""),
    "slow link": LinkCause((40, 100), "Mbit", "rate", _RATE, "slow link: rate", "both"),
    "slow link, towards it only": LinkCause(
        (40, 100), "Mbit", "port_rate", _RATE, "slow link: rate", "towards"
    ),
    "slow link, from it only": LinkCause(
        (40, 100), "Mbit", "rate", _RATE, "slow link: rate", "from", {"port_rate": _RATE}
    ),
    "lossy link": LinkCause((0.5, 1, 2), "%", "loss", "0%", "slow link: loss"),
}


def is_possible() -> bool:
    """Return whether hosts can be emulated here."""
    return IS_ROOT


def links_of(seed: int) -> list[Case]:
    """Return all cases of a seed; first the clean one, which the others are compared with."""
    return [Case(name, strength, seed) for name, of in LINK_CAUSES.items() for strength in of.strengths]


def record_apart(cases: Sequence[Case], file: Path) -> None:
    """Train causes that need hosts apart, with steps before and after each as on one machine."""
    for delay in dict.fromkeys(case.of.delay for case in cases):
        of_delay = tuple(case for case in cases if case.of.delay == delay)
        with ClusterRanks(ClusterSpec.parse(hosts=_HOSTS, rate=_RATE, delay=delay)) as ranks:
            ranks.run(
                train_cases, Training(of_delay, file.absolute()), f"{len(of_delay)} cases, {delay} apart"
            )


def record_link(case: Case, file: Path) -> None:
    """Train on three hosts with this case's links, and store the records."""
    of, culprit = LINK_CAUSES[case.cause], -1
    options: dict[str, Any] = {"hosts": _HOSTS, "rate": _RATE, "offload": False}
    if case.cause != CLEAN_LINKS:
        culprit = (case.seed + int(10 * case.strength)) % _HOSTS
        values = [f"{case.strength:g}{of.unit}" if host == culprit else of.others for host in range(_HOSTS)]
        options |= {**of.besides, of.option: ",".join(values)}
    with ClusterRanks(ClusterSpec.parse(**options)) as ranks:
        ranks.run(train_cases, Training((case,), file.absolute(), culprit), f"{case.cause} {case.strength:g}")
