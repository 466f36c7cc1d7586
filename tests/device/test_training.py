"""Training on the device equals training on the CPU to the last bit: torch's wrapper, ours, and ours on our backend."""

from __future__ import annotations

import functools

import pytest

from device import late
from device.cases import BOTH, CASES, OURS, SIDES, TOLERANCES
from device.marks import device
from device.ranks import differences, ranks

pytestmark = device


def performed(rank, _num_ranks, name, side, schedule):
    case = functools.partial(CASES[name], side=side)
    return differences(case, rank, SIDES[side], schedule, TOLERANCES.get(name, 0.0))


BRIEF = {
    "torch": {"mlp"},
    "nccl": {
        "mlp",
        "conv_bn",
        "transformer",
        "side stream",
        "accumulated",
        "unused parameters",
        "compression int8",
        "adasum",
        "forward overlap",
    },
    "paceline": {"mlp", "side stream", "compression int8", "forward overlap"},
}
"""By side, what `make test` runs; `make test-device` and `make test-lab` run all."""


def params(names, sides):
    return [
        pytest.param(name, side, marks=[] if name in BRIEF[side] else [pytest.mark.lab], id=f"{name}-{side}")
        for name in names
        for side in sides
    ]


@pytest.mark.parametrize("schedule", late.SCHEDULES)
@pytest.mark.parametrize(("name", "side"), params(BOTH, SIDES))
def test_what_torch_s_wrapper_does(name, side, schedule):
    """Two ranks, no race, every loss, gradient, parameter and buffer bitwise the CPU's over Gloo."""
    assert ranks().run(performed, name, side, schedule) == ["", ""]


@pytest.mark.parametrize("schedule", late.SCHEDULES)
@pytest.mark.parametrize(("name", "side"), params(OURS, ["nccl", "paceline"]))
def test_what_ours_alone_does(name, side, schedule):
    """The same of reductions, optimizers and options that torch has not."""
    assert ranks().run(performed, name, side, schedule) == ["", ""]


def on_the_second(rank, _num_ranks, name, side, schedule):
    case = functools.partial(CASES[name], side=side)
    return differences(case, rank, SIDES[side], schedule, index=1)


@pytest.mark.parametrize("schedule", late.SCHEDULES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["mlp", "side stream"])
def test_the_second_device_of_a_process(name, side, schedule):
    """While the first one is current: whatever forgets to say on which device is wrong."""
    assert ranks().run(on_the_second, name, side, schedule) == ["", ""]
