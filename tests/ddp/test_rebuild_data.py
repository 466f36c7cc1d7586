"""The data follow other ranks: every sample once, also when a rank has died or hangs."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from harness.models import squares
from harness.ranks import Ranks, pool
from harness.rebuilding import NUM_SAMPLES, batch, bits_of, mlp, samples, train_some
from paceline import DistributedDataParallel
from paceline.comm import gradient_group
from paceline.data import Balance, GlobalBatch, GlobalShuffle
from paceline.errors import PeerLostError

pytestmark = pytest.mark.processes


def moved_shares(rank, _num_ranks, in_loop, how):
    shuffle = GlobalShuffle(NUM_SAMPLES, GlobalBatch((4, 2, 6)), rank=rank)
    model = DistributedDataParallel(mlp(), batch_sampler=shuffle)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    group = dist.new_group([0, 2])

    def move():
        if rank != 1:
            (model.membership.rebuild if how == "rebuild" else model._update_process_group)(group)

    if rank == 1:
        return train_some(model, shuffle, optimizer, 3), None, None
    if in_loop:
        seen = train_some(model, shuffle, optimizer, during=move)
    else:
        seen = train_some(model, shuffle, optimizer, 3)
        move()
        seen += train_some(model, shuffle, optimizer)
    return seen, shuffle.batch.local, bits_of(model)


def one_process():
    shuffle = GlobalShuffle(NUM_SAMPLES, GlobalBatch((12,)), 0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for rows in shuffle:
        squares(model(samples()[rows])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.processes
@pytest.mark.parametrize("how", ["rebuild", "_update_process_group"])
@pytest.mark.parametrize("in_loop", [True, False], ids=["in the loop", "between loops"])
def test_the_samples_of_a_rank_that_has_left_are_trained_by_the_others(in_loop, how):
    """Each sample once, the global batch as large as before, cut by what the ranks had."""
    results = pool(3).run(moved_shares, in_loop, how)
    assert sorted(row for seen, _, _ in results for row in seen) == list(range(NUM_SAMPLES))
    assert results[0][1] == results[2][1] == (5, 7)
    assert results[0][2] == results[2][2]


def balanced(rank, _num_ranks):
    shuffle = GlobalShuffle(NUM_SAMPLES, GlobalBatch((4, 4, 4)), rank=rank)
    balance = Balance(gain_ratio=0.0, num_ignored=0)
    model = DistributedDataParallel(mlp(), batch_sampler=shuffle, balance=balance)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train_some(model, shuffle, optimizer)
    everyone, group = dist.new_group([0, 1, 2]), dist.new_group([2, 0])
    if rank != 1:
        model.membership.rebuild(group)
        assert shuffle.batch.size == 12
        first = len(model.balance_report()["samples"])
        seen = train_some(model, shuffle, optimizer)
    else:
        seen, first = list(range(NUM_SAMPLES)), 2
    model.membership.rebuild(everyone, source=2)
    again = train_some(model, shuffle, optimizer)
    return seen, again, first, shuffle.batch, model.balance_report()["samples"], bits_of(model)


@pytest.mark.processes
def test_balance_measures_the_new_members():
    """Limits and estimates are of the ranks that there are; decisions stay the same on all of them."""
    results = pool(3).run(balanced)
    assert sorted(results[0][0] + results[2][0]) == list(range(NUM_SAMPLES))
    assert sorted(row for _, again, *_ in results for row in again) == list(range(NUM_SAMPLES))
    assert [result[2] for result in results] == [2] * 3
    assert results[0][3].size == 12
    assert results[0][3:] == results[1][3:] == results[2][3:]


def survive(rank, num_ranks, how, backend, timeout_s):
    """Rank 1 dies or hangs in the fourth step; the others go on without it."""
    shuffle = GlobalShuffle(NUM_SAMPLES, GlobalBatch((4,) * num_ranks), rank=rank)
    timeout = timedelta(seconds=timeout_s)
    everyone = dist.new_group(backend=backend, timeout=timeout)
    model = DistributedDataParallel(mlp(), process_group=everyone, batch_sampler=shuffle)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, trained, lost, step = samples(), [], None, 0
    loader = DataLoader(range(NUM_SAMPLES), batch_sampler=shuffle, collate_fn=list)
    is_over = False
    while not is_over:
        try:
            for batches in shuffle.steps(loader):
                if rank == 1 and step == 3:
                    os.kill(os.getpid(), how)
                with model.accumulate(batches) as micro_batches:
                    for rows in micro_batches:
                        squares(model(x[rows])).backward()
                optimizer.step()
                optimizer.zero_grad()
                trained += [row for rows in batches for row in rows]
                step += 1
            is_over = True
        except PeerLostError as error:
            assert lost is None
            lost, members = str(error), [r for r in range(num_ranks) if r != 1]
            group = dist.new_group(members, timeout, backend, use_local_synchronization=True)
            model.membership.rebuild(group)
    return trained, lost, step, bits_of(model), model.membership.size


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_others_go_on_without_a_rank_that_has_died(how, backend):
    """The step is made again, with the lost rank's samples of it: the global batches are those of one process."""
    timeout_s = 60.0 if how == signal.SIGKILL else 6.0
    with Ranks(3, group_timeout_s=timeout_s, store="tcp") as ranks:
        outcomes = ranks.outcomes(survive, how, backend, timeout_s, deadline_s=90.0)
    first, dead, last = outcomes
    assert not dead.clean
    assert first.clean, first.story()
    assert last.clean, last.story()
    assert sorted(first.value[0] + last.value[0]) != list(
        range(NUM_SAMPLES)
    )  # rank 1 has trained three steps
    assert len(set(first.value[0] + last.value[0])) == NUM_SAMPLES - 3 * 4
    assert len(first.value[0] + last.value[0]) == NUM_SAMPLES - 3 * 4
    assert first.value[2:] == last.value[2:]
    assert first.value[2:3] == (5,)
    assert first.value[4] == 2
    assert "rank 1" in first.value[1]


def lose_two(rank, _num_ranks, dies_in):
    """Rank 1 dies in a step, and rank 2 while the others take its place."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    lost = []
    for step in range(6):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            squares(model(batch(step, rank))).backward()
        except PeerLostError:
            for members in ([0, 2, 3], [0, 3]):
                group = dist.new_group(members, use_local_synchronization=True)
                # Gloo refuses the group to whoever still connects when a rank dies that has already connected.
                store = dist.distributed_c10d._get_default_store()
                store.set(f"{rank} of {members}", b"")
                if rank == 2:
                    store.wait([f"{other} of {members}" for other in members])
                    where = {"data_position": model._paceline_coordinator, "group_like": gradient_group}[
                        dies_in
                    ]
                    setattr(where, dies_in, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
                try:
                    model.membership.rebuild(group)
                    break
                except PeerLostError as error:
                    lost.append(str(error))
            model.zero_grad()
            squares(model(batch(step, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return lost, bits_of(model), model.membership.size, model.membership.epoch


@pytest.mark.processes
@pytest.mark.parametrize("dies_in", ["data_position", "group_like"], ids=["as they meet", "opening groups"])
def test_a_rank_that_dies_in_a_rebuild_is_left_as_well(dies_in):
    """The others are told, still in the old membership, and go on in yet another group."""
    with Ranks(4, store="tcp") as ranks:
        first, _, _, last = ranks.outcomes(lose_two, dies_in, deadline_s=90.0)
    assert first.clean, first.story()
    assert last.clean, last.story()
    assert first.value[1:] == last.value[1:]
    assert first.value[2] == 2
    assert "process" in first.value[0][0]
