"""The demo's result as rows and as figures."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline import __version__
from paceline.lab.demo.comparison import Difference, Training
from paceline.lab.report import ReportFolder, lines_figure, stacked_bars_figure
from paceline.launch import num_cores

if TYPE_CHECKING:
    from paceline.lab.demo.run import DemoSettings

STEP_PARTS = ("forward", "backward", "exposed communication", "optimizer", "other")


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
