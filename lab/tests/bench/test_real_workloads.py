"""Real compute: every workload trains, at its smallest, and all ranks end with the same parameters."""

from __future__ import annotations

import pytest

from harness.ranks import pool
from paceline_lab.bench.step import StepConfig, check, measure

pytestmark = pytest.mark.processes


def _measured(
    rank: int, num_ranks: int, workload: str, sides: tuple[str, ...]
) -> tuple[list[str], list[float | None]]:
    outcome = measure(StepConfig(workload, sides, 2, quick=True), lambda _: None)
    check(outcome)
    return [side.name for side in outcome.sides], [side.error for side in outcome.sides]


@pytest.mark.parametrize(
    "workload",
    [
        "tiny",
        "wide_mlp",
        pytest.param("resnet50", marks=pytest.mark.lab),
        pytest.param("vgg16", marks=pytest.mark.lab),
        "transformer",
        "mlstm",
    ],
)
def test_workload_trains_on_two_ranks(workload: str) -> None:
    """Forward, backward and optimizer of the real model; `check` has compared the ranks bit by bit."""
    sides = (
        ("ours",) if workload in ("resnet50", "vgg16") else ("ours", "torch")
    )  # a step takes half a second
    for names, errors in pool(2).run(_measured, workload, sides):
        assert names == list(sides)
        assert errors == [None] * len(sides)  # the mean is not known in advance
