"""Ranks on several hosts: reduced in each host, then by columns across hosts, with Gloo's results."""

import os
import signal
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import paceline  # noqa: F401  registers the backend
from harness.linear_oracle import train_linear
from harness.models import digest, generator
from harness.ranks import Ranks, pool
from harness.several_hosts import LINKS, group_on
from paceline.process_group.staging import STAGING_BYTES
from paceline.transports.shared_memory.neighbours import SWITCH

pytestmark = pytest.mark.processes


def reductions(rank, num_ranks, hosts, only, seed):
    with group_on(hosts, rank, only=only) as ours:
        return reduced(ours, rank, num_ranks, seed)


def reduced(ours, rank, num_ranks, seed):
    shape = (ours.host.num_ranks, len(ours.host.hosts))
    results = []
    for size in (0, 1, 5, 1000, 300_001):
        for dtype in (torch.int64, torch.float64, torch.bfloat16):
            values = torch.randint(-50, 50, (size,), generator=generator(seed, size, rank)).to(dtype)
            theirs = values.double().clone()
            dist.all_reduce(theirs)
            mine = values.clone()
            dist.all_reduce(mine, group=ours)
            results.append(bool(torch.equal(mine.double(), theirs.to(dtype).double())))
            results.append(digest([mine]))
    mean = torch.tensor([float(rank), 7.0])
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=ours)
    for size in (7, 100_001):  # whose sum is more than 16 bits hold
        halves = torch.full((size,), 40_000.0 if rank else 48_000.0, dtype=torch.float16)
        dist.all_reduce(halves, dist.ReduceOp.AVG, group=ours)
        results.append(torch.allclose(halves.double(), torch.tensor(40e3 + 8e3 / num_ranks).double(), 2e-3))
        results.append(digest([halves]))
    most = torch.tensor([float(rank)])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=ours)
    rows = [torch.zeros(3) for _ in range(num_ranks)]
    dist.all_gather(rows, torch.full((3,), float(rank)), group=ours)
    copy = torch.full((3,), float(rank))
    dist.broadcast(copy, num_ranks - 1, group=ours)
    scattered = torch.zeros(2, dtype=torch.bfloat16)
    dist.reduce_scatter(
        scattered,
        [torch.full((2,), float(r + rank), dtype=torch.bfloat16) for r in range(num_ranks)],
        group=ours,
    )
    dist.barrier(group=ours)
    others = (
        mean.tolist(),
        most.tolist(),
        [row[0].item() for row in rows],
        copy.tolist(),
        scattered.tolist(),
    )
    return shape, results, others


@pytest.mark.parametrize(
    ("hosts", "only"),
    [
        ("01", "ring"),
        ("01", "halving_doubling"),
        ("0011", None),
        ("0101", "ring"),
        ("0012", "halving_doubling"),
        ("0012", None),
    ],
)
def test_reductions_over_hosts(hosts, only):
    """One and two ranks a host, hosts of unequal size, ranks in any order: exact sums, one value on all ranks."""
    num_ranks = len(hosts)
    answers = pool(num_ranks).run(reductions, hosts, only, 1)
    for rank, (shape, results, others) in enumerate(answers):
        assert shape == (hosts.count(hosts[rank]), len(set(hosts)))
        assert results == answers[0][1]
        assert all(result is not False for result in results)
        mean, most, rows, copy, scattered = others
        assert mean == [(num_ranks - 1) / 2, 7.0]
        assert most == [num_ranks - 1.0]
        assert rows == [float(r) for r in range(num_ranks)]
        assert copy == [num_ranks - 1.0] * 3
        assert scattered == [float(num_ranks * rank + sum(range(num_ranks)))] * 2


def the_rest(rank, num_ranks, hosts):
    """What is not cut into columns across hosts: a reduction to one rank, a scaled one, an exchange of unequal rows."""
    with group_on(hosts, rank) as ours:
        to_one = torch.full((5,), rank + 1.0, dtype=torch.bfloat16)
        dist.reduce(to_one, 1, dist.ReduceOp.AVG, group=ours)
        scattered = torch.zeros(2)
        rows = [torch.full((2,), float(r)) for r in range(num_ranks)]
        dist.reduce_scatter(scattered, rows, dist._make_nccl_premul_sum(0.5), group=ours)
        mine = [torch.full((r,), float(rank)) for r in range(num_ranks)]
        received = [torch.zeros(rank) for _ in range(num_ranks)]
        dist.all_to_all(received, mine, group=ours)
    return (
        to_one.tolist(),
        scattered.tolist(),
        [row.tolist() for row in received],
        [row[:1].tolist() for row in rows],
    )


def test_other_collectives_over_hosts():
    for rank, (to_one, scattered, received, rows) in enumerate(pool(4).run(the_rest, "0011")):
        assert rank != 1 or to_one == [2.5] * 5
        assert scattered == [0.5 * 4 * rank] * 2
        assert received == [[float(source)] * rank for source in range(4)]
        assert rows == [[float(r)] for r in range(4)]  # what was scaled was a copy


def train_over_hosts(rank, num_ranks, hosts, seed):
    with group_on(hosts, rank) as ours:
        return train_linear(rank, num_ranks, seed, (300, 200), 3, process_group=ours)


def test_data_parallel_over_hosts():
    """Two hosts of two ranks: gradients equal one process on the whole batch, bitwise equal on all ranks."""
    results = pool(4).run(train_over_hosts, "0011", 2)
    assert max(error for error, _ in results) < 1e-12
    assert len({bits for _, bits in results}) == 1


def differ(rank, _num_ranks, hosts):
    with group_on(hosts, rank) as ours, pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(10 if hosts[rank] == "0" else 12), group=ours)
    return str(caught.value)


def test_disagreement_between_hosts_is_named():
    """The hosts agree within, but not with each other."""
    for message in pool(2).run(differ, "01"):
        assert "rank 0" in message
        assert "rank 1" in message
        assert "10" in message
        assert "12" in message


def lose(rank, _num_ranks, hosts, victim):
    words = {SWITCH: f"host {hosts[rank]}", "PACELINE_LINKS": LINKS}
    with mock.patch.dict(os.environ, words):
        ours = dist.new_group(backend="paceline", timeout=timedelta(seconds=4))
    tensor = torch.ones(200_000)
    dist.all_reduce(tensor, group=ours)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TimeoutError) as caught:
        for _ in range(5):
            dist.all_reduce(tensor, group=ours)
    return str(caught.value)


def test_a_lost_rank_is_told_on_every_host():
    """Rank 3, on the second of two hosts, is killed: its neighbour names it, the other host's ranks raise too."""
    with Ranks(4) as ranks:
        outcomes = ranks.outcomes(lose, "0011", 3, deadline_s=40)
    messages = [outcome.value for outcome in outcomes[:3]]
    assert all(messages), [outcome.story() for outcome in outcomes]
    assert "rank 3" in messages[2]
    assert "died" in messages[2]
    assert "rank 3" in messages[1]  # the one that exchanges its share with rank 3


def reduce_long(rank, _num_ranks, hosts, ordinary):
    """A message longer than the staging area; in shared memory where a rank has neighbours, unless it is `ordinary`."""
    with group_on(hosts, rank) as ours:
        size = STAGING_BYTES // 4 + 12_345
        tensor = torch.zeros(size)
        if rank not in ordinary:
            tensor = ours.allocate_tensor(size, dtype=torch.float32, device=torch.device("cpu"))
        tensor += torch.arange(size) % 1000 + rank
        expected = (torch.arange(size) % 1000) * len(hosts) + sum(range(len(hosts)))
        dist.all_reduce(tensor, group=ours)
        mean = tensor.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=ours)
        return torch.equal(tensor, expected.float()), torch.equal(mean, expected.float())


@pytest.mark.parametrize(
    ("hosts", "ordinary"), [("0011", (0,)), ("0012", ()), ("0012", (0,)), ("0012", (0, 1, 2, 3))], ids=str
)
def test_long_messages_wherever_they_lie(hosts, ordinary):
    """Some ranks' tensors lie in shared memory, others' do not, and some hosts have one rank: one exchange for all."""
    assert pool(4).run(reduce_long, hosts, ordinary) == [(True, True)] * 4


def name_a_schedule(rank, _num_ranks, hosts):
    with group_on(hosts, rank) as ours:
        with pytest.raises(ValueError, match=r"no schedule called 'rings'.*there are.*ring"):
            ours.use_schedule("rings")
        ours.use_schedule("ring")
        tensor = torch.ones(5)
        dist.all_reduce(tensor, group=ours)
        return tensor.tolist(), ours.explain(1000)


def test_an_unknown_schedule_is_refused_at_once():
    """Before anything is sent: the group stays usable, and takes the one that is named next."""
    for values, words in pool(2).run(name_a_schedule, "01"):
        assert values == [2.0] * 5
        assert "ring (" in words
        assert "over the interface lo" in words  # as the pools' GLOO_SOCKET_IFNAME says


def name_no_schedule(rank, _num_ranks, hosts):
    with pytest.raises(ValueError, match="PACELINE_ALLREDUCE"), group_on(hosts, rank, only="halving"):
        pass


def test_an_unknown_schedule_in_the_environment_is_refused():
    """Where the group is made, with the variable's name."""
    pool(2).run(name_no_schedule, "01")
