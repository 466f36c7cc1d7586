"""Draws every picture of the results folder again, from the results that lie there. Nothing is measured.

A picture is a function of its stored report, so that one that is drawn again differs only if its drawing has changed.
"""

import importlib
import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.options import REPOSITORY, RESULTS_FOLDER, ResultsFolder, run_cli
from paceline_lab.bench import allreduce_report, step_report
from paceline_lab.studies.catalogue import STUDIES
from paceline_lab.studies.large_batch import draw_results
from paceline_lab.studies.loss_bound import draw_losses
from paceline_lab.studies.mlstm_scaling import ScalingStudy
from paceline_lab.studies.network_check import CheckStudy
from paceline_lab.studies.network_scale import draw_tails

Draw = Callable[[Mapping[str, Any], Path], object]


def _draw_shakespeare(record: Mapping[str, Any], path: Path) -> object:
    return runpy.run_path(str(REPOSITORY / "examples/mlstm_shakespeare.py"))["draw"](record, path)


# By the first word of a report's name; the longest that fits. None: a report without a picture.
DRAWN_BY: dict[str, Draw | str | None] = {
    "adasum": None,
    "adasum-updates": "adasum_updates",
    "allreduce": allreduce_report.draw,
    "auto-compression": "auto_compression",
    "bounded_loss": None,
    "bucket_caps": "bucket_caps",
    "collectives": None,
    "compression": "compression",
    "emulated-network": None,
    "forward_overlap": "forward_overlap",
    "forward_overlap_loss": "forward_overlap_loss",
    "fuzz": None,
    "hetseq_table": "hetseq_table",
    "large-batch": draw_results,
    "loss-bound": draw_losses,
    "memory": "memory",
    "mlstm-shakespeare": _draw_shakespeare,
    "network-check": CheckStudy().draw,
    "network-scale": draw_tails,
    "noise-scale": None,
    "optimizers": "optimizers",
    "parameter_servers": "parameter_servers",
    "overhead": "overhead",
    "overlap": "overlap",
    "guidelines": "guidelines",
    "minibatch-memory": None,
    "predicted-papers": "predicted_papers",
    "predicted-steps": "predicted_steps",
    "shared_port": None,
    "skipped_layers": "skipped_layers",
    "step": step_report.draw,
    "step_time": "step_time",
    "study-mlstm-scaling": ScalingStudy().draw,
    **{f"study-{study.name}": study.draw for study in STUDIES.values()},
    "svm": "svm",
    "svm-elimination": None,
    "svm-elimination-1ranks": "svm",
    "svm-elimination-2ranks": "svm",
    "svm-memory": None,
    "svm-ranks": "svm_ranks",
    "time_to_loss": "time_to_loss_outcome",
    "unequal": "unequal",
}


def drawing_of(name: str) -> Draw | None:
    """Return what draws the report of this name.

    Raises:
        KeyError: Nothing is known to draw it.
    """
    fitting = [prefix for prefix in DRAWN_BY if name == prefix or name.startswith(f"{prefix}-")]
    if not fitting:
        raise KeyError(f"{name}: say in {Path(__file__).name} what draws it")
    found = DRAWN_BY[max(fitting, key=len)]
    if not isinstance(found, str):
        return found
    draw: Draw = importlib.import_module(f"benchmarks.{found}").draw
    return draw


def main(results_folder: ResultsFolder = RESULTS_FOLDER) -> None:
    """Draw every picture again from the stored results."""
    for file in sorted(results_folder.glob("*.json")):
        record = json.loads(file.read_text())
        draw = drawing_of(file.stem)
        if draw is not None and draw(record, file.with_suffix(".png")):
            print(file.with_suffix(".png"))


if __name__ == "__main__":
    run_cli(main)
