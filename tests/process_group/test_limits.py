"""Limits of a process (address space, file size, open files): what torch's class survives, ours does, on all ranks."""

import contextlib
import os
import resource
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.models import Mlp, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.transports.shared_memory.arena import MOST_BYTES, Arena, Budget, least_bytes, size_within
from paceline.transports.shared_memory.neighbours import SWITCH

GIB = 2**30


def used_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def limited(which, amount):
    """Lower a limit of this process; `amount` of address space is on top of what is used."""
    soft, hard = resource.getrlimit(which)
    wanted = amount + used_bytes() if which == resource.RLIMIT_AS else amount
    resource.setrlimit(which, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def trained(rank, _num_ranks, which, amount, who, switch):
    """The gradient of one step under the limit, whether it went through shared memory, and what was said."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1), group=group)  # Gloo has its threads
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        stack.enter_context(mock.patch.dict(os.environ, {SWITCH: switch} if switch else {}))
        if rank in who:
            stack.enter_context(limited(which, amount))
        torch.manual_seed(0)
        model = DistributedDataParallel(Mlp(), process_group=group)
        again = DistributedDataParallel(Mlp(), process_group=group)
        squares(model(torch.randn(4, 8, generator=generator(rank)))).backward()
        squares(again(torch.randn(4, 8, generator=generator(rank)))).backward()
        gradient = model.module.layers[0].weight.grad.clone()
        is_shared = model.reducer.process_groups[0] is not group
        del model, again
    return gradient, is_shared, [str(each.message) for each in said if "Gloo" in str(each.message)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("which", "amount", "who", "switch", "is_shared"),
    [
        (resource.RLIMIT_AS, 2 * GIB, (0, 1), "", True),
        (resource.RLIMIT_AS, 2 * GIB, (1,), "", True),
        (resource.RLIMIT_AS, 2 * GIB, (0, 1), "0", False),
        (resource.RLIMIT_AS, GIB // 8, (1,), "", False),
        (resource.RLIMIT_FSIZE, 64 * 2**20, (0,), "", True),
        (resource.RLIMIT_FSIZE, 2**20, (0,), "", False),
    ],
)
def test_a_limited_rank_trains(which, amount, who, switch, is_shared):
    """All ranks share what the poorest can afford, or all go over Gloo, and rank 0 says so once."""
    (first, *rest), *others = pool(2).run(trained, which, amount, who, switch)
    assert rest[0] == is_shared
    for gradient, shared, said in others:
        assert torch.equal(gradient, first)
        assert shared == is_shared
        assert not said
    if is_shared or switch:
        assert not rest[1]
    else:
        [words] = rest[1]
        assert "gradients go over Gloo" in words
        assert f"rank {who[0]} has too little" in words


def outgrow(rank, _num_ranks):
    with limited(resource.RLIMIT_FSIZE, 16 * 2**20):
        group = dist.new_group(backend="paceline", timeout=timedelta(seconds=20))
    fits = group.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu"))
    # One rank's lies in shared memory, the other's does not: it is copied in and out.
    num_elements = 8_000_000 if rank else 2**18
    larger = group.allocate_tensor(num_elements, dtype=torch.float32, device=torch.device("cpu"))[: 2**18]
    larger.fill_(rank + 1.0)
    dist.all_reduce(larger, group=group)
    arena = group.host.me.arena
    return arena.region_of(fits) is not None, arena.region_of(larger) is not None, larger.unique().tolist()


@pytest.mark.processes
def test_what_does_not_fit_is_copied():
    """A tensor that the shared memory has no room for is an ordinary one, and reduced all the same."""
    assert pool(2).run(outgrow) == [(True, True, [3.0]), (True, False, [3.0])]


def many_groups(_rank, _num_ranks, number):
    with limited(resource.RLIMIT_AS, 4 * GIB):
        groups = [dist.new_group(backend="paceline", timeout=timedelta(seconds=30)) for _ in range(number)]
    tensor = torch.ones(3)
    for group in groups:
        dist.all_reduce(tensor, group=group)
    return len(groups[-1].host.hosts), tensor.tolist()


@pytest.mark.processes
def test_many_groups_live_at_once():
    """Each takes a part of what is left, so the next finds something."""
    assert pool(2).run(many_groups, 12) == [(1, [4096.0] * 3)] * 2


def test_sizes():
    """The poorest decides; who can afford too little shares nothing; 300 groups of 8 ranks find room."""
    assert size_within([Budget(2**40, MOST_BYTES)] * 2) == MOST_BYTES
    assert size_within([Budget(2**40, MOST_BYTES), Budget(2**30, MOST_BYTES)]) == 2**29
    assert size_within([Budget(2**40, MOST_BYTES), Budget(2**20, MOST_BYTES)]) == 0
    assert size_within([Budget(2**40, 2**20)]) == 0
    left, num_ranks = 2**46, 8
    for _ in range(300):
        size = size_within([Budget(left // 64, MOST_BYTES)] * num_ranks)
        left -= size * num_ranks
        assert size >= least_bytes(num_ranks)


def test_a_place_comes_back_while_another_is_taken():
    """The garbage collector may run within `allocate`, and free a tensor there: a lock taken twice would hang."""
    arena = Arena(None, least_bytes(1), 4096)
    tensors = [arena.allocate(2**20, torch.uint8) for _ in range(9)]
    places = [arena.region_of(tensor) for tensor in tensors]

    def free():
        with arena._lock:
            tensors.clear()

    thread = threading.Thread(target=free, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    whole = arena.allocate(9 * 2**20, torch.uint8)  # their places are one again
    assert arena.region_of(whole).start == places[0].start
