"""Models that are wrapped, trained and dropped leave no thread, descriptor or shared memory, whatever their options."""

import ctypes
import gc
import warnings
import weakref
from dataclasses import astuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.held import Held, held, settled
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.optim import overlap
from paceline.reductions import PowerSGD
from paceline.reductions.by_name import COMPRESSIONS
from paceline_adasum import Adasum
from paceline_lossy import BoundedLoss

pytestmark = pytest.mark.processes

STEPS = 5
NUM_WARM = 2  # what is opened once stays
NUM_DROPPED = 4


OPTIONS = {
    "none": dict,
    "overlap_forward": lambda: {"overlap_forward": "always"},
    "several groups": lambda: {"process_group": groups()},
    "unused": lambda: {"find_unused_parameters": True},
    "static graph": lambda: {"static_graph": True},
    "skips unused": lambda: {"skip_all_reduce_unused_params": True},
    "droppable": lambda: {"droppable": ["2"]},
    "sync batch norm": lambda: {"middle": lambda: nn.SyncBatchNorm(8)},
    "weight": lambda: {"weight": len},
    "adasum": lambda: {"reduction": Adasum()},
    "powersgd": lambda: {"reduction": PowerSGD()},
    "bounded loss": lambda: {"reduction": BoundedLoss()},
    **{name: (lambda name=name: {"compression": name}) for name in COMPRESSIONS},
}


def groups(made=[]):  # noqa: B006 (made once a process: the script's groups are not the model's)
    if not made:
        made += [dist.new_group(), dist.new_group()]
    return made


def train_and_drop(options):
    middle = options.pop("middle", nn.Tanh)()
    net = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 2))
    model = DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if "overlap_forward" in options:
        overlap(optimizer, model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()


def memory_bytes():
    """What malloc has given out: not stacks that glibc keeps of ended threads, nor the holes in its arenas."""

    class Info(ctypes.Structure):
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Info
    info = ask()
    return info.uordblks + info.hblkhd


def drop_many(make, num_dropped=NUM_DROPPED):
    """What is held once the first models have been dropped, and once the others have."""
    kept = []
    for _ in range(NUM_WARM + num_dropped):
        train_and_drop(make())
        gc.collect()
        kept.append(held())
    before = Held(*(max(each) for each in zip(*map(astuple, kept[:NUM_WARM]), strict=True)))
    return before, settled(before)


def drop_fifty_of(_rank, _num_ranks, name):
    warnings.simplefilter("ignore")
    drop_many(OPTIONS[name], 15)  # the allocator keeps what the first ones needed
    before, finalizers = memory_bytes(), len(weakref.finalize._registry)
    return (
        drop_many(OPTIONS[name], 50),
        memory_bytes() - before,
        len(weakref.finalize._registry) - finalizers,
    )


def drop_of_all_options(_rank, _num_ranks):
    warnings.simplefilter("ignore")
    return {name: drop_many(make) for name, make in OPTIONS.items()}


def drop_in_a_part(rank, _num_ranks):
    """Over a group of two of three ranks, whose groups are named after how many there are."""
    warnings.simplefilter("ignore")
    part = dist.new_group([0, 1])
    found = {}
    if rank < 2:
        found["part"] = drop_many(lambda: {"process_group": part, "overlap_forward": "always"})
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "drop"), [pytest.param(2, drop_of_all_options, marks=pytest.mark.lab), (3, drop_in_a_part)]
)
def test_nothing_is_left_of_dropped_models(num_ranks, drop):
    for found in pool(num_ranks).run(drop, deadline_s=200):
        for name, (before, after) in found.items():
            assert after.within(before), (name, before, after)


@pytest.mark.lab
@pytest.mark.parametrize("name", OPTIONS)
def test_fifty_dropped_models_leave_no_memory_either(name):
    for (before, after), grown_bytes, more_finalizers in pool(2).run(drop_fifty_of, name, deadline_s=110):
        assert after.within(before), (before, after)
        assert grown_bytes < 2 << 20
        assert more_finalizers <= 0
