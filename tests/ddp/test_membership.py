"""A model goes on over other ranks: bitwise equal on all of them, torch's means, memory shared, nothing left behind."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from harness.held import held, settled
from harness.models import squares
from harness.ranks import pool
from harness.rebuilding import batch, mlp, refused, train_steps
from paceline import DistributedDataParallel
from paceline.comm.collectives import shares_memory
from paceline.errors import ProtocolError, ReplicaMismatchError

pytestmark = pytest.mark.processes


def moved_to_a_part(rank, _num_ranks, backend, members, how):
    model = DistributedDataParallel(mlp())
    train_steps(model, rank, range(2))
    group, of_torch = dist.new_group(members, backend=backend), dist.new_group(members)
    if rank not in members:
        return None
    (model.membership.rebuild if how == "rebuild" else model._update_process_group)(group)
    copy = mlp()
    copy.load_state_dict(model.module.state_dict())
    torchs = TorchDDP(copy, process_group=of_torch)
    same = train_steps(model, rank, range(2, 6)), train_steps(torchs, rank, range(2, 6))
    here = model.membership
    return *same, (here.epoch, here.size, here.rank, here.name), model.process_group is group


@pytest.mark.processes
@pytest.mark.parametrize("how", ["rebuild", "_update_process_group"])
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_means_are_over_the_members_that_there_are_now(backend, how):
    """Two of three ranks go on, with the bits of torch's DDP over these two."""
    first, _, last = pool(3).run(moved_to_a_part, backend, [0, 2], how)
    assert first[0] == first[1] == last[0] == last[1]
    assert first[2][:2] == (1, 2)
    assert (first[2][2], last[2][2]) == (0, 1)
    assert first[2][3:] == last[2][3:]
    assert first[3]
    assert last[3]


def several_times(rank, _num_ranks):
    model = DistributedDataParallel(mlp())
    bits, names = [], set()
    for turn, members in enumerate([[0, 1, 2], [0, 1], [2, 1, 0], [1, 2]]):
        group = dist.new_group(members)
        if rank in members:
            source = members.index(1)
            model.membership.rebuild(group, source=source)
            bits.append((turn, train_steps(model, rank, range(3))))
            names.add(model.membership.name)
    return bits, len(names), model.membership.epoch


@pytest.mark.processes
def test_members_come_and_go():
    """With `source` all take one rank's parameters: those who have missed steps, and those in another order."""
    results = pool(3).run(several_times)
    for turn in range(4):
        found = [dict(bits)[turn] for bits, _, _ in results if turn in dict(bits)]
        assert found == found[:1] * len(found)
        assert len(found) > 1
    assert [epoch for _, _, epoch in results] == [3, 4, 4]
    assert [num_names for _, num_names, _ in results] == [3, 4, 3]


def grown(rank, _num_ranks):
    first, everyone = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if rank < 2:
        model = DistributedDataParallel(mlp(), process_group=first)
        train_steps(model, rank, range(3))
    else:
        model = DistributedDataParallel(mlp(seed=9), process_group=everyone, init_sync=False)
    told = refused(lambda: model.membership.rebuild(everyone), ProtocolError)
    before = train_steps(model, rank, range(3, 5)) if rank < 2 else None  # in the old membership, still
    model.membership.rebuild(everyone, source=1)
    after = train_steps(model, rank, range(5, 8))
    alone = mlp(seed=9)
    alone.load_state_dict(model.module.state_dict())
    model.zero_grad()
    squares(model(batch(8, rank))).backward()
    for other in range(3):
        (squares(alone(batch(8, other))) / 3).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return told, before, after, max((p.grad - q.grad).abs().max().item() for p, q in pairs)


@pytest.mark.processes
def test_a_new_rank_takes_the_model_of_those_who_are_there():
    """It is refused, on every rank, until somebody says whose; then means are over one rank more."""
    results = pool(3).run(grown)
    assert {told for told, *_ in results} == {results[0][0]}
    assert "rank 0 after 3 steps" in results[0][0]
    assert "rank 2 after 0 steps" in results[0][0]
    assert "source=0" in results[0][0]
    assert results[0][1] == results[1][1]
    assert results[0][2] == results[1][2] == results[2][2]
    assert max(error for *_, error in results) < 1e-12


def another_model(rank, _num_ranks):
    first, everyone = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if rank < 2:
        model = DistributedDataParallel(mlp(), process_group=first)
    else:
        model = DistributedDataParallel(nn.Linear(8, 3), process_group=everyone, init_sync=False)
    told = refused(lambda: model.membership.rebuild(everyone), ReplicaMismatchError)
    return told, train_steps(model, rank, range(2)) if rank < 2 else None


@pytest.mark.processes
def test_a_new_rank_with_another_model_is_refused_and_the_others_go_on():
    """All are told, and the old membership still trains."""
    (told, bits), (_, others), (third, _) = pool(3).run(another_model)
    assert told == third != "not refused"
    assert bits == others


# ---- memory, threads, descriptors


def shared_memory(rank, _num_ranks, backend):
    model = DistributedDataParallel(mlp())
    found = [shares_memory(model.reducer.process_groups[0])]
    group = dist.new_group([0, 2], backend=backend)
    if rank == 1:
        return [True] * 3
    model.membership.rebuild(group)
    train_steps(model, rank, range(2))
    used = model.membership.gradient_groups[0]
    return [*found, shares_memory(used), shares_memory(model.reducer.process_groups[0])]


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_gradients_go_through_shared_memory_again(backend):
    """Beside the script's Gloo group, as those of the old members did; or in its own."""
    assert pool(3).run(shared_memory, backend) == [[True] * 3] * 3


def after_others_left(rank, _num_ranks):
    model = DistributedDataParallel(mlp())
    group = dist.new_group([0, 2])
    if rank != 1:
        model.membership.rebuild(group)
    another = DistributedDataParallel(mlp())
    return train_steps(another, rank, range(2)), shares_memory(another.membership.gradient_groups[0])


@pytest.mark.processes
def test_who_was_left_can_train_with_the_others_again():
    """The others have closed the group beside the old one; a new model over it opens another, on all ranks."""
    results = pool(3).run(after_others_left)
    assert results == results[:1] * 3
    assert results[0][1]


def many_rebuilds(rank, num_ranks, how):
    module = nn.Sequential(mlp(), nn.SyncBatchNorm(4, dtype=torch.float64)) if how == "batch norm" else mlp()
    model = DistributedDataParallel(module, compression="onebit" if how == "compression" else None)
    before = None
    gc.collect()
    gc.disable()
    for turn in range(20):
        backend = "paceline" if how == "paceline" else "gloo"
        group = dist.new_group(list(range(num_ranks)), backend=backend)
        old = model.process_group
        model.membership.rebuild(group)
        train_steps(model, rank, range(2))
        model.zero_grad()
        dist.barrier()  # no rank is in the old group any more
        if old is not dist.group.WORLD:
            dist.destroy_process_group(old)
        del old, group
        for thread in threading.enumerate():
            if thread.name == "paceline-close":  # lets a group go once nobody else holds it
                thread.join(20.0)
        if turn == 1:
            before = held()
    after = settled(before, collects=False)
    gc.enable()
    return before, after


@pytest.mark.processes
@pytest.mark.parametrize("how", ["plain", "paceline", "batch norm", "compression"])
def test_twenty_rebuilds_leave_nothing_behind(how):
    """Threads, descriptors and shared memory are as many after the last rebuild as after the second, without the GC."""
    for before, after in pool(2).run(many_rebuilds, how):
        assert after.within(before), (before, after)
