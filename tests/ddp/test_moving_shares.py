"""Whoever moves samples between ranks: training is one process's, none is lost or doubled, and all ranks agree."""

import os
import time
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from harness.models import digest
from harness.ranks import pool
from harness.unequal_oracle import NUM_SAMPLES, dataset, make, make_pair, mean_loss, train_window
from paceline import DistributedDataParallel
from paceline.data import Balance, GlobalBatch, GlobalShuffle
from paceline.errors import ConfigurationError, PeerOutOfMemoryError, ProtocolError
from paceline.optim import shard


class Slow(torch.nn.Module):
    """A rank that takes `sample_s` for each sample, and has no memory for more than `most` of them."""

    def __init__(self, sample_s=0.0, most=NUM_SAMPLES):
        super().__init__()
        self.body, self.sample_s, self.most = make(), sample_s, most

    def forward(self, x):
        if len(x) > self.most:
            raise MemoryError(f"{len(x)} samples")
        time.sleep(self.sample_s * len(x))
        return self.body(x)


def train_epochs(model, shuffle, loader, num_epochs, is_sharded=False):
    """Train by SGD. Return which samples were trained in each epoch here, and how often a step was repeated."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    optimizer = shard(optimizer, model) if is_sharded else optimizer
    seen, num_repeats = [], 0
    for _ in range(num_epochs):
        seen.append([])
        for batches in shuffle.steps(loader):
            window = train_window(model, batches)
            optimizer.step()
            if window.repeats:
                num_repeats += 1
                continue
            seen[-1] += [i for _, index in batches for i in index.tolist()]
    return seen, num_repeats


def as_one_process(num_epochs, size):
    """Parameters that one process comes to with these global batches."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    shuffle = GlobalShuffle(NUM_SAMPLES, GlobalBatch((size,)), 0)
    for _ in range(num_epochs):
        for rows in shuffle:
            optimizer.zero_grad()
            x, index = dataset()[rows]
            mean_loss(model(x), index).backward()
            optimizer.step()
    return list(model.parameters())


def apart(model, wanted):
    pairs = zip(model.parameters(), wanted, strict=True)
    return max(((p - q).norm() / q.norm()).item() for p, q in pairs)


class Ahead:
    """Fetches batches early, as worker processes do; a test's ranks cannot have any."""

    def __init__(self, loader, num_batches):
        self.loader, self.num_batches = loader, num_batches

    def __iter__(self):
        fetched = []
        for batch in self.loader:
            fetched.append(batch)
            if len(fetched) > self.num_batches:
                yield fetched.pop(0)
        yield from fetched


def balanced(rank, num_ranks, is_sharded=False):
    """Rank 1 is ten times slower; rank 0 fetches further ahead."""
    shuffle = GlobalShuffle(NUM_SAMPLES, GlobalBatch((5, 5)))
    loader = Ahead(DataLoader(dataset(), batch_sampler=shuffle), num_batches=3 - 2 * rank)
    model = DistributedDataParallel(
        Slow((0.002, 0.02)[rank]), batch_sampler=shuffle, balance=Balance(num_ignored=1)
    )
    seen, _ = train_epochs(model, shuffle, loader, 3, is_sharded)
    return {
        "seen": seen,
        "apart": apart(model, as_one_process(3, 10)),
        "samples": shuffle.batch.samples,
        "report": model.balance_report(),
    }


def out_of_memory(rank, num_ranks, is_sharded=False):
    """Rank 1 has room for two samples, and is first given five; then for none; then nobody makes room."""
    found = {}
    shuffle = GlobalShuffle(NUM_SAMPLES, GlobalBatch((5, 5), accumulation=2))
    loader = Ahead(DataLoader(dataset(), batch_sampler=shuffle), num_batches=2)
    network = Slow(most=(NUM_SAMPLES, 2)[rank])
    model = DistributedDataParallel(network, batch_sampler=shuffle, balance="auto")
    found["seen"], found["repeats"] = train_epochs(model, shuffle, loader, 2, is_sharded)
    found["apart"] = apart(model, as_one_process(2, 20))
    found["batch"] = shuffle.batch
    found["parameters"] = digest(model.parameters())
    if is_sharded:
        return found

    network.most = (NUM_SAMPLES, 0)[rank]
    with pytest.raises(ConfigurationError) as no_room:
        train_epochs(model, shuffle, loader, 1)
    found["no room"] = str(no_room.value)

    shuffle = GlobalShuffle(NUM_SAMPLES, GlobalBatch((5, 5)))
    alone = DistributedDataParallel(network, batch_sampler=shuffle)
    with pytest.raises((MemoryError, PeerOutOfMemoryError)) as raised:
        train_epochs(alone, shuffle, DataLoader(dataset(), batch_sampler=shuffle), 1)
    found["unbalanced"] = type(raised.value).__name__
    return found


def not_in_the_same_step(rank, num_ranks):
    """Rank 1 has changed its shares alone; then it has left an epoch alone."""
    told = []
    model, shuffle, loader = make_pair((5, 5))
    if rank == 1:
        shuffle.change(GlobalBatch((4, 6)))
    with pytest.raises(ProtocolError) as raised:
        train_epochs(model, shuffle, loader, 1)
    told.append(str(raised.value))
    model, shuffle, loader = make_pair((5, 5))
    loop = shuffle.steps(loader)
    for _ in range(1 + rank):
        batches = next(loop)
    with pytest.raises(ProtocolError) as raised:
        train_window(model, batches)
    told.append(str(raised.value))
    loop.close()
    loop = shuffle.steps(loader)
    train_window(model, next(loop))
    return told, digest(p.grad for p in model.parameters())


def two_ranks(rank, num_ranks):
    """One launch."""
    return {each.__name__: each(rank, num_ranks) for each in (balanced, out_of_memory, not_in_the_same_step)}


def two_sharded_ranks(rank, num_ranks):
    """The same with a sharded optimizer, on ranks that believe to be on two hosts."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}):
        return {each.__name__: each(rank, num_ranks, True) for each in (balanced, out_of_memory)}


@pytest.fixture(scope="module")
def plain_pairs():
    return pool(2).run(two_ranks, deadline_s=180)


@pytest.fixture(scope="module", params=["plain", "sharded"])
def pairs(request, plain_pairs):
    return plain_pairs if request.param == "plain" else pool(2).run(two_sharded_ranks, deadline_s=180)


@pytest.mark.processes
def test_balance_moves_samples_and_nothing_else(pairs):
    """To the fast rank; every sample once an epoch, in the same steps, with one process's result."""
    both = [pair["balanced"] for pair in pairs]
    for seen in zip(*(one["seen"] for one in both), strict=True):
        assert sorted(seen[0] + seen[1]) == list(range(NUM_SAMPLES))
    assert both[0]["samples"] == both[1]["samples"]
    assert both[0]["samples"][0] > both[0]["samples"][1]
    assert sum(both[0]["samples"]) == 10
    assert max(one["apart"] for one in both) < 1e-12
    assert both[0]["report"] == both[1]["report"]
    assert {entry["what"] for entry in both[0]["report"]["history"]} == {"moved"}


@pytest.mark.processes
def test_a_rank_without_memory_trains_less(pairs):
    """The same global batch again, none lost or doubled; where nothing helps, all ranks raise."""
    both = [pair["out_of_memory"] for pair in pairs]
    for seen in zip(*(one["seen"] for one in both), strict=True):
        assert sorted(seen[0] + seen[1]) == list(range(NUM_SAMPLES))
    assert [one["repeats"] for one in both] == [2, 2]  # 5, then 3, then 2
    batch = both[0]["batch"]
    assert batch == both[1]["batch"]
    assert (sum(batch.local), batch.accumulation) == (10, GlobalBatch((8, 2), accumulation=2).accumulation)
    assert batch.local[1] <= 2  # fewer, if it happened to be slower, too
    assert both[0]["parameters"] == both[1]["parameters"]
    assert max(one["apart"] for one in both) < 1e-12
    if "no room" not in both[0]:  # with a sharded optimizer the rest is left out
        return
    assert both[0]["no room"] == both[1]["no room"]
    assert "No room is left" in both[0]["no room"]
    assert [one["unbalanced"] for one in both] == ["PeerOutOfMemoryError", "MemoryError"]


@pytest.mark.processes
def test_ranks_in_different_steps_are_told(plain_pairs):
    """All of them, in the step in which they differ; after that training may go on."""
    for told, _ in (pair["not_in_the_same_step"] for pair in plain_pairs):
        assert "Rank 1 is at sample 0 of epoch 0" in told[0]
        assert "in other shares" in told[0]
        assert "Rank 1 is at sample 10 of epoch 0, rank 0 at 0" in told[1]
    assert len({bits for _, bits in (pair["not_in_the_same_step"] for pair in plain_pairs)}) == 1
