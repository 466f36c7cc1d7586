"""In which order do the sides take their turns?"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One block of consecutive steps of one side."""

    round_index: int
    side_index: int


def turns(num_sides: int, num_rounds: int) -> Iterator[Turn]:
    """Yield ABBA, BAAB, ABBA, ...: every side twice a round, so that a linear drift cancels within the round."""
    for round_index in range(num_rounds):
        forward = list(range(num_sides))
        if round_index % 2:
            forward.reverse()
        for side_index in forward + forward[::-1]:
            yield Turn(round_index, side_index)
