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
from paceline.demo.progress_pipe import Progress, RankOutcome
from paceline.launch import num_cores
from paceline_lab.report import ReportFolder
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, LIMIT, OURS
from paceline_lab.report.panels import Line, Lines, Stacks

if TYPE_CHECKING:
    from paceline.demo.two_trainings import DemoSettings


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


def write_figures(folder: ReportFolder, parallel: Training, single: Training, dtype: str) -> list[Path]:
    """Draw the losses of both trainings and how far they are apart, and where a step's time goes."""
    paths = [folder.path / "losses.png", folder.path / "step.png"]
    _draw_losses(paths[0], parallel, single, dtype)
    _draw_step(paths[1], parallel, single)
    return paths


def _draw_losses(path: Path, parallel: Training, single: Training, dtype: str) -> None:
    epochs = range(1, len(single.losses) + 1)
    ticks = {float(epoch): str(epoch) for epoch in epochs}
    losses = [
        Line(parallel.name, list(zip(epochs, parallel.losses, strict=True)), OURS),
        Line(single.name, list(zip(epochs, single.losses, strict=True)), BASELINE, "--"),
    ]
    apart = [abs(ours / one - 1) for ours, one in zip(parallel.losses, single.losses, strict=True)]
    rounding, allowed = float(np.finfo(dtype).eps), ALLOWED_DIFFERENCE[dtype]
    nothing = rounding / 10  # where the logarithmic axis has its zero
    differences = [
        Line("of the losses", [(x, max(y, nothing)) for x, y in zip(epochs, apart, strict=True)], OURS),
        Line(f"one rounding of a {dtype}", [(x, rounding) for x in epochs], LIMIT, ":", ""),
        Line("the demo fails (parameters)", [(x, allowed) for x in epochs], LIMIT, "--", ""),
    ]
    decades = {10.0**n: f"1e{n}" for n in range(-16, 0, 2) if rounding < 10.0**n}
    draw_figure(
        path,
        f"{parallel.name} learn what {single.name} learns: losses differ by at most {max(apart):.0e} of their value",
        [
            Lines("training loss, mean of an epoch", "epoch", "loss", losses, ticks),
            Lines("relative difference", "epoch", "", differences, ticks, y_ticks={nothing: "0", **decades}),
        ],
        f"Both see the same global batches, in {dtype}; what is left is the order in which numbers are added up.",
        columns=1,
    )


def _draw_step(path: Path, parallel: Training, single: Training) -> None:
    milliseconds = {
        training.name: [
            (part, 1e3 * part_s) for part, part_s in zip(STEP_PARTS, mean_parts_s(training), strict=True)
        ]
        for training in (parallel, single)
    }
    parts_ms = dict(milliseconds[parallel.name])
    draw_figure(
        path,
        f"{parallel.name} wait for communication in {parts_ms['exposed communication']:.2f} of the "
        f"{sum(parts_ms.values()):.2f} ms of a step",
        [Stacks("", "ms a step, mean over ranks", milliseconds)],
        "The same global batch: one process computes all of it, each of several its share.",
    )
