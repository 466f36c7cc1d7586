"""Training on the device equals training on the CPU to the last bit: torch's wrapper, ours, and ours on our backend."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch.distributed as dist

from device import late
from device.cases import BOTH, CASES, OURS, SIDES, TOLERANCES, made, vectors, wrapped
from device.marks import device
from device.nccl.group import Members
from device.ranks import differences, ranks
from harness.models import Mlp, sgd, squares
from paceline_lossy.datagrams.datagram_loop import compile_all

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
    if name == "bounded loss":
        compile_all()  # for a while, and ranks have a deadline
    assert ranks().run(performed, name, side, schedule) == ["", ""]


@pytest.mark.lab
@pytest.mark.parametrize("schedule", late.SCHEDULES)
@pytest.mark.parametrize("name", ["compression bf16", "compression powersgd"])
def test_three_ranks_fold_shares(name, schedule):
    """Sums in the order of the ranks, each rank's a share of them: they take an all-to-all more than two ranks'."""
    assert ranks(3).run(performed, name, "nccl", schedule) == ["", "", ""]


def shrinking(here):
    """Two steps of three ranks, two of the first two: in a group that gets other members, or in another group."""
    group = dist.new_group(backend="gloo" if here.device.type == "cpu" else here.group.name())
    model = wrapped(made(Mlp, here), replace(here, group=group), "nccl")
    optimizer, found = sgd(model), []

    def step(number):
        optimizer.zero_grad()
        squares(model(vectors(here, number))).backward()
        optimizer.step()
        found.extend(p.detach().clone() for p in model.parameters())

    step(0)
    step(1)
    later = dist.new_group([0, 1]) if here.device.type == "cpu" else _with_other_members(group, here.rank)
    if here.rank < 2:
        model.membership.rebuild(later)
        step(2)
        step(3)
    return found


def _with_other_members(group, rank):
    """The group itself, now of the first two ranks; c10d's tables are changed as torch does from 2.14 on."""
    late.drain()
    handles = [None] * 3
    dist.all_gather_object(handles, group.get_reconfigure_handle())
    if rank < 2:
        group.reconfigure(Members(1, handles[:2])).wait()
        dist.distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def shrunk(rank, _num_ranks, schedule):
    return differences(shrinking, rank, SIDES["nccl"], schedule, tolerance=1e-6)


@pytest.mark.lab
@pytest.mark.parametrize("schedule", late.SCHEDULES)
def test_training_goes_on_in_a_group_with_other_members(schedule):
    """Of three ranks two stay: the same group object, `rebuild`, and the numbers of the CPU's over another group."""
    assert ranks(3).run(shrunk, schedule) == ["", "", ""]


def on_the_second(rank, _num_ranks, name, side, schedule):
    case = functools.partial(CASES[name], side=side)
    return differences(case, rank, SIDES[side], schedule, index=1)


@pytest.mark.parametrize("schedule", late.SCHEDULES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["mlp", "side stream"])
def test_the_second_device_of_a_process(name, side, schedule):
    """While the first one is current: whatever forgets to say on which device is wrong."""
    assert ranks().run(on_the_second, name, side, schedule) == ["", ""]
