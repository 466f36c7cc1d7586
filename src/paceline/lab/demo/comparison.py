"""What came out of the demo's two trainings: whether they agree, and the rows and figures of the report."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline import __version__
from paceline.lab.demo.progress_pipe import Progress, RankOutcome
from paceline.lab.report import ReportFolder, lines_figure, stacked_bars_figure
from paceline.launch import num_cores

if TYPE_CHECKING:
    from paceline.lab.demo.two_trainings import DemoSettings


# Summation order changes the last bits of a gradient, and training amplifies them; anything larger than this,
# relative to the largest parameter, is not rounding.
ALLOWED_DIFFERENCE = {"float64": 1e-9, "float32": 1e-2}
STEP_PARTS = ("forward", "backward", "exposed communication", "optimizer", "other")


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


def mean_parts_s(training: Training) -> tuple[float, ...]:
    """Seconds of a step's parts, in the order of `STEP_PARTS`, mean over ranks."""
    per_rank = [(o.forward_s, o.backward_s, o.exposed_s, o.optimizer_s, o.other_s) for o in training.outcomes]
    return tuple(float(mean) for mean in np.mean(per_rank, axis=0))


def rows(
    settings: DemoSettings, data: str, parallel: Training, single: Training, apart: Difference
) -> dict[str, object]:
    """Everything the demo found, ready for JSON."""
    return {
        "settings": {**dataclasses.asdict(settings), "report": str(settings.report), "data": data},
        "global_batch": settings.global_batch,
        "machine": {
            "cores": num_cores(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "paceline": __version__,
        },
        "trainings": [_training_row(training) for training in (parallel, single)],
        "ranks_bitwise_equal": parallel.ranks_agree,
        "difference": {**dataclasses.asdict(apart), "is_rounding": apart.is_rounding},
    }


def _training_row(training: Training) -> dict[str, object]:
    return {
        "name": training.name,
        "losses": list(training.losses),
        "accuracy": training.accuracy,
        "samples_per_s": training.samples_per_s,
        "wall_s": training.wall_s,
        "step_s": dict(zip(STEP_PARTS, mean_parts_s(training), strict=True)),
        "ranks": [dataclasses.asdict(outcome) for outcome in training.outcomes],
    }


def write_figures(folder: ReportFolder, parallel: Training, single: Training) -> list[Path]:
    """Draw the losses of both trainings, and where a step's time goes."""
    losses = lines_figure(
        "Training loss: both trainings see the same global batches",
        "epoch",
        "loss",
        {parallel.name: parallel.losses, single.name: single.losses},
    )
    milliseconds = {
        training.name: tuple(1e3 * part_s for part_s in mean_parts_s(training))
        for training in (parallel, single)
    }
    steps = stacked_bars_figure(
        "Where a step's time goes (mean over ranks)", "milliseconds per step", STEP_PARTS, milliseconds
    )
    return [folder.write_figure("losses.png", losses), folder.write_figure("step.png", steps)]
