"""What came out of the two trainings, and whether the promise held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.lab.demo.messages import Progress, RankOutcome

# Summation order changes the last bits of a gradient, and training amplifies them; anything larger than this,
# relative to the largest parameter, is not rounding.
ALLOWED_DIFFERENCE = {"float64": 1e-9, "float32": 1e-2}


@dataclass(frozen=True)
class Training:
    """One of the two trainings.

    Attributes:
        name: `2 processes` or `1 process`.
        losses: Mean loss of every epoch, over all ranks.
        outcomes: One a rank, in rank order.
        parameters: File with rank 0's final parameters.
        wall_s: From starting the processes to the last one's end.
    """

    name: str
    losses: tuple[float, ...]
    outcomes: tuple[RankOutcome, ...]
    parameters: Path
    wall_s: float

    @property
    def accuracy(self) -> float:
        """Of rank 0, on the test set."""
        return next(outcome.accuracy for outcome in self.outcomes if outcome.accuracy is not None)

    @property
    def samples_per_s(self) -> float:
        """Of all ranks together."""
        return sum(outcome.samples_per_s for outcome in self.outcomes)

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks ended with bitwise the same parameters."""
        return len({outcome.fingerprint for outcome in self.outcomes}) == 1


@dataclass(frozen=True)
class Difference:
    """How far two sets of parameters are apart.

    Attributes:
        largest: The largest absolute difference of two elements.
        parameter: Where it is.
        scale: The largest absolute value of any parameter.
        dtype: In which the trainings computed.
    """

    largest: float
    parameter: str
    scale: float
    dtype: str

    @property
    def is_rounding(self) -> bool:
        """Whether it can be explained by the order in which numbers were added up."""
        return self.largest <= ALLOWED_DIFFERENCE[self.dtype] * self.scale


def difference(one: Path, other: Path, dtype: str) -> Difference:
    """Compare two files of parameters that rank 0 of two trainings wrote."""
    largest, where, scale = 0.0, "", 0.0
    with np.load(one) as ours, np.load(other) as theirs:
        for name in ours.files:
            apart = float(np.abs(ours[name] - theirs[name]).max())
            scale = max(scale, float(np.abs(theirs[name]).max()))
            # `not <=` rather than `>`: a NaN must win.
            if not apart <= largest or not where:
                largest, where = apart, name
    return Difference(largest, where, scale, dtype)


def epoch_losses(progress: Sequence[Progress]) -> tuple[float, ...]:
    """Mean over ranks of every epoch's final loss; the ranks' slices are of equal size."""
    by_epoch: dict[int, list[float]] = {}
    for report in progress:
        if report.epoch_done:
            by_epoch.setdefault(report.epoch, []).append(report.loss)
    return tuple(sum(losses) / len(losses) for _, losses in sorted(by_epoch.items()))
