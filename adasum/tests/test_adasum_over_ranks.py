"""Adasum over ranks: against the tree in one process, bytes counted in the transport, and as a training run has it."""

import copy
import math
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.in_memory import InMemoryNetwork
from harness.models import WORKLOADS, Branches, Mlp, digest, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError, PeerAbortedError
from paceline.process_group.host_collectives import HostVectors
from paceline.reductions import Message
from paceline.schedules import Link, Links, Topology, price
from paceline_adasum import Adasum, AdasumOptimizer, combine
from paceline_adasum.operator import Segments
from paceline_adasum.over_ranks import AdasumOverRanks
from paceline_adasum.vector_halving import vector_halving

FREE = Links(Link(0.0, 1e9), Link(0.0, 1e9))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}

pytestmark = pytest.mark.usefixtures("one_thread")


def perform(topology, flats, sizes):
    """Every rank's vector and norms after the schedule, and what each rank sent; by threads."""
    network = InMemoryNetwork(len(flats))  # which checks that nothing is changed while it is on its way
    outputs = [flat.clone() for flat in flats]

    def main(transport):
        norms = AdasumOverRanks(transport, vector_halving(topology), 20.0).run(
            outputs[transport.rank], Segments(sizes)
        )
        return norms, transport.bytes_sent

    results = network.run(main)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return outputs, *zip(*results, strict=True)


def random_flats(num_ranks, sizes, dtype, seed):
    source = generator(seed, num_ranks, *sizes)
    return [
        torch.randn(sum(sizes), generator=source, dtype=torch.float64).to(dtype) for _ in range(num_ranks)
    ]


def in_one_process(flats, sizes, hosts=None):
    """The tree over hosts' means, in float64."""
    lists = [list(flat.double().split(sizes)) for flat in flats]
    if hosts is None:
        return torch.cat(combine(lists))
    means = [
        [torch.stack(tensors).mean(0) for tensors in zip(*(lists[rank] for rank in ranks), strict=True)]
        for ranks in hosts
    ]
    return torch.cat(combine(means))


@pytest.mark.parametrize(
    ("num_ranks", "dtype"),
    [(num, torch.float64) for num in (1, 2, 3, 4, 5, 7, 8)] + [(3, torch.float32), (3, torch.bfloat16)],
)
def test_it_equals_the_tree_in_one_process(num_ranks, dtype):
    """Tensors that straddle the cuts; sizes 1, odd, P-1; several pieces; bitwise equal on all ranks."""
    for sizes in ((1,), (num_ranks - 1, 1), (3, 0, 1001, 2, 0), (40_001, 3, 70_000)):
        flats = random_flats(num_ranks, sizes, dtype, 0)
        outputs, norms, _ = perform(Topology.one_rank_a_host(num_ranks), flats, sizes)
        expected = in_one_process(flats, sizes)
        of_inputs = sum(float(flat.double().square().sum()) for flat in flats)
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        assert (outputs[0].double() - expected).norm() <= TOLERANCE[dtype] * math.sqrt(of_inputs)
        if num_ranks > 1:
            assert len(set(norms)) == 1
            assert norms[0].of_inputs == pytest.approx(of_inputs)
            assert norms[0].of_result == pytest.approx(
                float(expected.square().sum()), abs=TOLERANCE[dtype] * of_inputs
            )


@settings(deadline=None, max_examples=12)
@given(st.integers(2, 9), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 99))
def test_swapping_the_ranks_of_a_pair_changes_no_bit(num_ranks, sizes, seed):
    flats = random_flats(num_ranks, sizes, torch.float32, seed)
    swapped = [flats[1], flats[0], *flats[2:]]
    topology = Topology.one_rank_a_host(num_ranks)
    first, *_ = perform(topology, flats, tuple(sizes))
    second, *_ = perform(topology, swapped, tuple(sizes))
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    "host_of_rank", [(0, 0, 1, 1), (0, 0, 0, 1, 1, 2), (0, 1, 0, 1, 1), (0, 0), (0, 0, 1, 1, 2, 2, 2, 3)]
)
def test_hosts_average_first(host_of_rank):
    """The mean of each host, then Adasum over hosts, weighted by their ranks."""
    topology = Topology(host_of_rank)
    sizes = (3, 0, 1005, 2, 40)
    flats = random_flats(len(host_of_rank), sizes, torch.float64, 1)
    outputs, norms, _ = perform(topology, flats, sizes)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert len(set(norms)) == 1
    if len({len(ranks) for ranks in topology.ranks_of_host}) == 1:  # then all weights are equal
        expected = in_one_process(flats, sizes, topology.ranks_of_host)
        torch.testing.assert_close(outputs[0], expected, rtol=1e-11, atol=1e-11)
    # Parallel vectors: the mean over all ranks, however they are spread over hosts.
    v = flats[0]
    parallel, *_ = perform(topology, [v * (rank + 1) for rank in range(len(flats))], sizes)
    torch.testing.assert_close(parallel[0], v * (len(flats) + 1) / 2, rtol=1e-11, atol=1e-11)


def priced(plan, num_elements, num_tensors, dtype):
    """Bytes that each rank should send: the message, the completions, and the words that the last team tells."""
    topology, per = plan.topology, dtype.itemsize
    parts = [price(plan.schedule, num_elements * per, topology, FREE, element_bytes=per)]
    words = (3 * num_tensors + 2) * 8
    for level in plan.levels:
        parts.append(price(level.completion, words, topology, FREE, element_bytes=8))
        if dtype == torch.float64:
            parts.append(price(level.completion, num_tensors * 8, topology, FREE, element_bytes=8))
    parts.append(price(plan.tell, 16, topology, FREE, element_bytes=8))
    return [sum(part.bytes_sent[rank] for part in parts) for rank in range(topology.num_ranks)], parts


@pytest.mark.parametrize(
    ("num_ranks", "dtype"),
    [(num, torch.float32) for num in (2, 3, 4, 7, 8)] + [(7, torch.float64), (8, torch.bfloat16)],
)
def test_priced_bytes_are_sent_bytes(num_ranks, dtype):
    """But for the headers of the small sums and of spreading; and no more than 2 n (P-1)/P where P = 2^m."""
    sizes = (1 << 10, 1 << 12, 3 << 10)
    plan = vector_halving(Topology.one_rank_a_host(num_ranks))
    flats = random_flats(num_ranks, sizes, dtype, 2)
    _, _, sent = perform(plan.topology, flats, sizes)
    expected, parts = priced(plan, sum(sizes), len(sizes), dtype)
    halving = sum(t.source == 0 for level in plan.levels for t in level.halving)
    spread = price(
        plan.spread, sum(sizes) * dtype.itemsize, plan.topology, FREE, element_bytes=dtype.itemsize
    )
    headers = [sum(part.header_bytes[rank] for part in [*parts[1:], spread]) for rank in range(num_ranks)]
    assert list(sent) == [a + b for a, b in zip(expected, headers, strict=True)]
    n = sum(sizes) * dtype.itemsize
    if num_ranks & (num_ranks - 1) == 0:
        assert parts[0].bytes_sent == (2 * n * (num_ranks - 1) // num_ranks,) * num_ranks
        assert halving == num_ranks.bit_length() - 1
    else:
        core = 1 << num_ranks.bit_length() - 1
        assert max(parts[0].bytes_sent) == 2 * n * (core - 1) // core + n


# Processes, process groups, DistributedDataParallel.


def gradients(model, rank, step, workload):
    model.zero_grad()
    workload.loss(model(*workload.batch(generator(rank, step)))).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def each_step(rank, num_ranks, name, shared_memory):
    """Three steps (the buckets are cut anew after the first) against the tree over what each rank alone has."""
    os.environ["PACELINE_SHARED_MEMORY"] = shared_memory
    try:
        return check_steps(rank, num_ranks, name, shared_memory == "yes")
    finally:
        del os.environ["PACELINE_SHARED_MEMORY"]


def check_steps(rank, num_ranks, name, sees_all):
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    plain = workload.build()
    twin = copy.deepcopy(plain)
    model = DistributedDataParallel(plain, reduction="adasum", bucket_cap_mb=0.0005)
    digests = []
    for step in range(3):
        mine = gradients(model, rank, step, workload)
        alone = [gradients(twin, other, step, workload) for other in range(num_ranks)]
        for index, (result, expected) in enumerate(zip(mine, combine(alone), strict=True)):
            scale = max(float(gradients_[index].abs().double().norm()) for gradients_ in alone)
            tolerance = {2: 2e-2, 4: 1e-5}.get(result.dtype.itemsize, 1e-6) * max(scale, 1e-30)
            assert float((result - expected).abs().double().norm()) <= tolerance, (name, step, index)
        digests.append(digest(mine))
    if getattr(model.reducer.process_groups[0], "shares_memory", False):
        assert model.reduction._connection is None  # nothing is sent
    elif num_ranks > 1:
        assert isinstance(model.reduction._connection._combiner, HostVectors if sees_all else AdasumOverRanks)
    if num_ranks == 1:
        assert math.isnan(model.reduction.orthogonality)  # nothing was combined
        return digests
    squares_of = sum(float(g.abs().double().square().sum()) for gs in alone for g in gs)
    ratio = sum(float(g.abs().double().square().sum()) for g in mine) / squares_of
    assert math.isclose(model.reduction.orthogonality, ratio, rel_tol=1e-2), (model.reduction, ratio)
    return digests


@pytest.mark.processes
@pytest.mark.parametrize(
    ("num_ranks", "name", "shared_memory"),
    [
        (1, "mlp", "yes"),
        (2, "mixed_dtypes", "yes"),
        (2, "complex", "0"),
        (3, "conv_bn", "0"),
        (3, "odd_shapes", "yes"),
        (4, "wide_mlp", "yes"),
        (4, "mixed_dtypes", "0"),
    ],
)
def test_gradients_are_the_adasum_of_what_each_rank_has(num_ranks, name, shared_memory):
    """Mixed, half-precision and complex buckets, large and small gradients, empty ones; bitwise equal on all ranks."""
    digests = pool(num_ranks).run(each_step, name, shared_memory)
    assert all(each == digests[0] for each in digests)


def train_both_forms(rank, num_ranks):
    """Both forms on a small problem: where each begins and ends, and the parameters' bits."""
    found = []
    for form in ("gradients", "updates"):
        torch.manual_seed(0)
        model = Mlp()
        if form == "gradients":
            model = DistributedDataParallel(model, reduction="adasum")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        else:
            optimizer = AdasumOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        reduction = model.reduction if form == "gradients" else optimizer.reduction
        losses, ratios = [], []
        for step in range(25):
            x = torch.randn(16, 8, generator=generator(rank, step))
            loss = nn.functional.mse_loss(model(x), x[:, :4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            ratios.append(reduction.orthogonality)
        found.append((losses[0], losses[-1], min(ratios), max(ratios), digest(list(model.parameters()))))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_training(num_ranks):
    """The loss falls, the ranks agree bit by bit, and gradients lie between agreeing (1/P) and orthogonal (1)."""
    values = pool(num_ranks).run(train_both_forms)
    for form in range(2):
        assert len({value[form][-1] for value in values}) == 1
        for first, last, lowest, highest, _ in (value[form] for value in values):
            assert last < 0.8 * first
            assert 0.9 / num_ranks < lowest <= highest < 1.3


def odd_uses(rank, num_ranks):
    """One after the other on one group, while other collectives and messages run on it."""
    torch.manual_seed(0)
    plain = Mlp()
    twin = copy.deepcopy(plain)
    group = dist.new_group([0, 2]) if num_ranks > 2 else dist.group.WORLD
    if rank == 1 and num_ranks > 2:
        return None  # not a member of the group
    place, size = dist.get_rank(group), dist.get_world_size(group)
    model = DistributedDataParallel(plain, reduction=Adasum(), process_group=group)

    def backward(of, who, step):
        squares(of(torch.randn(4, 8, generator=generator(who, step)))).backward()

    def expected(steps):
        lists = []
        for who in range(size):
            twin.zero_grad()
            for step in steps:
                backward(twin, who, step)
            lists.append(
                [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in twin.parameters()]
            )
        return combine(lists)

    def check(steps):
        for parameter, wanted in zip(model.parameters(), expected(steps), strict=True):
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)

    # Accumulation: Adasum of the sums, not the sum of Adasums.
    model.zero_grad()
    with model.no_sync():
        backward(model, place, 0)
        backward(model, place, 1)
    backward(model, place, 2)
    check([0, 1, 2])
    # Other traffic on the same group, launched before, between and after.
    model.zero_grad()
    ones = torch.ones(1000)
    sum_before = dist.all_reduce(ones, group=group, async_op=True)
    loss = squares(model(torch.randn(4, 8, generator=generator(place, 3))))
    there, back = torch.full((8,), float(place)), torch.empty(8)
    peer = dist.get_global_rank(group, 1 - place)
    messages = [dist.isend(there, peer, group=group, tag=5), dist.irecv(back, peer, group=group, tag=5)]
    loss.backward()
    for work in (sum_before, *messages):
        work.wait()
    assert bool((ones == size).all())
    assert bool((back == 1 - place).all())
    check([3])
    # A frozen parameter that is unfrozen later.
    frozen = model.module.layers[0].weight
    frozen.requires_grad_(requires_grad=False)
    other = DistributedDataParallel(model.module, reduction="adasum", process_group=group)
    for step in (4, 5):
        other.zero_grad()
        frozen.requires_grad_(requires_grad=step == 5)
        backward(other, place, step)
    model = other
    check([5])
    copied = copy.deepcopy(other) if group is dist.group.WORLD else other
    assert repr(copied.reduction) == "Adasum(hosts=None)"
    return digest([p.grad for p in other.parameters()])


@pytest.mark.processes
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_odd_uses(num_ranks):
    """`no_sync`, other traffic, unfreezing, a group over some of the ranks, a second model."""
    values = [value for value in pool(num_ranks).run(odd_uses) if value is not None]
    assert values == values[:1] * 2


def launched_alone(rank, num_ranks):
    """Rank 1 launches only when rank 0 has come back from launching three messages."""
    group = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    adasum = Adasum()
    flats = [torch.full((size,), float(rank + 1)) for size in (5, 300_000, 1)]
    if rank:
        store.wait(["rank 0 is back"])
    pending = [
        adasum.launch(Message(index, index == 2, flat, len(flat), [flat], [flat], group))
        for index, flat in enumerate(flats)
    ]
    store.set("rank 0 is back", "yes")
    for each in pending:
        assert each.wait(20.0)
    assert all(bool((flat == 1.5).all()) for flat in flats)  # 1 and 2 times the same vector


@pytest.mark.processes
def test_launching_does_not_wait():
    """Autograd's thread goes on, whatever the other ranks do; messages are performed in the order of their launch."""
    pool(2).run(launched_alone)


def one_branch(rank, num_ranks):
    torch.manual_seed(0)
    plain = Branches(6)
    twin = copy.deepcopy(plain)
    model = DistributedDataParallel(plain, reduction="adasum", find_unused_parameters=True)

    def backward(of, who):
        used = of(torch.randn(4, 4, generator=generator(who)), left=who == 0, right=who == 1)
        squares(used[who]).backward()
        return [
            p.grad if p.grad is not None else torch.zeros_like(p) for p in of.parameters() if p.requires_grad
        ]

    alone = []
    for who in range(num_ranks):
        twin.zero_grad()
        alone.append([gradient.clone() for gradient in backward(twin, who)])
    backward(model, rank)
    mine = [p.grad for p in model.parameters() if p.requires_grad]
    torch.testing.assert_close(mine, combine(alone))


@pytest.mark.processes
def test_what_one_rank_used_reaches_all():
    """A rank that did not use a parameter counts as zero, which leaves the others' gradient as it is."""
    pool(2).run(one_branch)


def adasum_refused(rank, num_ranks, case):
    model, reduction, words = {
        "sparse": (WORKLOADS["sparse"].build(), "adasum", "words.weight, bags.weight would have sparse ones"),
        "missing": (Mlp(), Adasum(hosts=[[0], [2]]), "names the ranks [0, 2]; the process group has 2"),
        "twice": (Mlp(), Adasum(hosts=[[0, 1], [1]]), "Name each rank from 0 to 1"),
        "8 bit": (nn.Linear(2, 2).to(torch.float8_e5m2), "adasum", "which is torch.float8_e5m2"),
    }[case]
    with pytest.raises(ConfigurationError) as caught:
        DistributedDataParallel(model, reduction=reduction)
    assert words in str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("case", ["sparse", "missing", "twice", "8 bit"])
def test_refused(case):
    """On every rank, before anything is started."""
    pool(2).run(adasum_refused, case)


def test_hosts_are_a_word_or_lists():
    with pytest.raises(ConfigurationError, match='give None, "auto" or lists'):
        Adasum(hosts="automatic")


class UsedTwice(nn.Module):
    """A layer that reentrant checkpointing touches twice in a backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = torch.tanh(checkpoint(self.second, x, use_reentrant=True))
        return x


def late(rank, num_ranks):
    torch.manual_seed(0)
    plain = UsedTwice()
    twin = copy.deepcopy(plain)
    model = DistributedDataParallel(plain, reduction="adasum", bucket_cap_mb=0.0001)
    workload = WORKLOADS["mlp"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PeerAbortedError, match="cannot add afterwards"):
            gradients(model, rank, 0, workload)
        assert all(parameter.grad is None for parameter in model.parameters())
        for step in (1, 2):
            mine = gradients(model, rank, step, workload)
            expected = combine([gradients(twin, other, step, workload) for other in range(num_ranks)])
            torch.testing.assert_close(mine, expected)


@pytest.mark.processes
def test_late_gradients_are_refused_once():
    """What cannot be added afterwards is dropped on all ranks; the next steps wait for the end of backward."""
    pool(2).run(late)


def over_hosts(rank, num_ranks, hosts):
    torch.manual_seed(0)
    plain = Mlp()
    twin = copy.deepcopy(plain)
    reduction = Adasum(hosts=hosts)
    model = DistributedDataParallel(plain, reduction=reduction)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = gradients(model, rank, 0, WORKLOADS["mlp"])
    alone = [gradients(twin, other, 0, WORKLOADS["mlp"]) for other in range(num_ranks)]
    given = [list(range(num_ranks))] if hosts == "auto" else hosts
    means = [
        [torch.stack(same).mean(0) for same in zip(*(alone[r] for r in host), strict=True)] for host in given
    ]
    torch.testing.assert_close(mine, combine(means), rtol=1e-4, atol=1e-6)
    warned = [str(each.message) for each in caught if "one host" in str(each.message)]
    return digest(mine), warned


@pytest.mark.processes
@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 3], [1, 2]], "auto"])
def test_hosts(hosts):
    """Given, in any order; or found, with a remark where all ranks turn out to be on one."""
    values = pool(4).run(over_hosts, hosts)
    assert len({digests for digests, _ in values}) == 1
    assert [len(warned) for _, warned in values] == [int(hosts == "auto"), 0, 0, 0]
