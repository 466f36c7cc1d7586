"""Writes the workloads that `paceline plan` ships, from the models: `python -m` this module."""

from __future__ import annotations

from pathlib import Path

import paceline_plan
from paceline_lab.bench.layer_profile import default_profile
from paceline_lab.bench.timed_model import planned
from paceline_lab.workloads import WORKLOADS

FOLDER = Path(paceline_plan.__file__).parent / "shipped"


def write_all(folder: Path) -> None:
    """Write a file a workload: published or assumed times, and float32 gradients of the model's shapes."""
    for name in WORKLOADS:
        planned(default_profile(name)).save(folder / f"{name}.json")


if __name__ == "__main__":
    write_all(FOLDER)
