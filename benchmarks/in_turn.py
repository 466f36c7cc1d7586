"""What benchmarks that train several sides have in common: where they run, whose turn it is, which answers count."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from paceline_lab.bench.protocol import WrongAnswerError, turns
from paceline_lab.bench.rank_program import TellProgress
from paceline_lab.bench.ranks import Ranks, choose_place

Run = TypeVar("Run")


class Trains(Protocol):
    """One side."""

    def turn(self, num_steps: int) -> None:
        """Train so many steps, timed. Collective."""


def train_in_turn(trainees: Sequence[Trains], num_rounds: int, num_steps: int, tell: TellProgress) -> None:
    """Give every side two turns in each round, in alternating order (A B B A). Collective."""
    schedule = list(turns(len(trainees), num_rounds))
    for num_done, turn in enumerate(schedule):
        trainees[turn.side_index].turn(num_steps)
        tell((num_done + 1) / len(schedule))


def train_each(sides: Sequence[str], train: Callable[[str], Run], tell: TellProgress) -> dict[str, Run]:
    """Train one side after another; return what each found. Collective."""
    runs = {}
    for place, side in enumerate(sides):
        runs[side] = train(side)
        tell((place + 1) / len(sides))
    return runs


def cluster_or_loopback(hosts: int | None, rate: str, cpu: str = "") -> Ranks:
    """The hosts of an emulated cluster; without any, two ranks on loopback. Not entered yet."""
    if not hosts:
        return choose_place(None, 2)
    return choose_place(hosts, None, rate=None if rate == "none" else rate, cpu=cpu or None)


def refuse_unequal(sides: Iterable[str]) -> None:
    """Refuse times of sides whose ranks' parameters differ; raise WrongAnswerError if there are any."""
    if unequal := list(sides):
        raise WrongAnswerError(
            f"the ranks' parameters differ with {', '.join(unequal)}: its times mean nothing."
        )
