"""Real compute: every workload trains, at its smallest, and all ranks end with the same parameters."""

from __future__ import annotations

import pytest

from paceline.lab.bench.step import StepConfig, check, measure
from ranks import pool


def _measured(rank: int, num_ranks: int, workload: str) -> tuple[list[str], list[float]]:
    outcome = measure(StepConfig(workload, ("ours", "torch"), 2, quick=True), lambda _: None)
    check(outcome)
    return [side.name for side in outcome.sides], [side.error for side in outcome.sides]


@pytest.mark.parametrize("workload", ["tiny", "wide_mlp", "resnet50", "vgg16", "transformer", "mlstm"])
def test_workload_trains_on_two_ranks(workload: str) -> None:
    """Forward, backward and optimizer of the real model; `check` has compared the ranks bit by bit."""
    for names, errors in pool(2).run(_measured, workload):
        assert names == ["ours", "torch"]
        assert errors == [None, None]  # the mean is not known in advance
