"""`bucket_cap_mb="auto"`: the search finds good caps and never a worse one; what it tries changes no number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.join import Join

from harness.models import digest, generator
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.ddp import cap_search
from paceline.ddp.cap_search import course
from paceline.errors import ConfigurationError

DEFAULT, LEAST, MOST = 16.0, 1.0, 1024.0


def search(cost, default=DEFAULT, least=LEAST, most=MOST):
    """What the course returns for these costs, and what it has tried."""
    steps, tried = course(default, least, most), []
    cap = next(steps)
    while True:
        tried.append(cap)
        try:
            cap = steps.send(cost(cap))
        except StopIteration as end:
            return end.value, tried


@given(st.floats(0, 10))
def test_of_costs_with_one_valley_the_best_cap_is_found_within_a_factor_of_two(place):
    best, tried = search(lambda cap: 1 + abs(math.log2(cap) - place))
    assert abs(math.log2(best) - place) <= 1
    assert len(tried) <= 20


@given(st.dictionaries(st.integers(0, 10), st.floats(0.5, 2.0)), st.floats(0.02, 5.0))
def test_whatever_steps_cost_what_is_found_is_not_worse_than_the_default(costs, otherwise):
    def cost(cap):
        return costs.get(round(math.log2(cap)), otherwise)

    best, tried = search(cost)
    assert all(LEAST <= cap <= MOST for cap in tried)
    assert best == DEFAULT or cost(best) < 0.99 * cost(DEFAULT)


def test_a_cap_that_was_fast_only_once_is_not_taken():
    costs = {DEFAULT: iter([1.0, 1.0, 1.0, 1.0]), 4.0: iter([0.5, 1.1, 1.0, 1.1])}
    best, tried = search(lambda cap: next(costs[cap]) if cap in costs else 2.0)
    assert best == DEFAULT
    assert tried[-6:] == [DEFAULT, 4.0] * 3


@pytest.mark.parametrize("size", [0.5, 1.0, 3.0])
def test_small_models_end_at_once(size):
    assert len(search(lambda _: 1.0, default=size, most=size)[1]) <= 3


def train_with_cap(rank, cap, steps):
    """The digest of parameters after each step, the numbers of buckets, and the search."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))), bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    digests, num_buckets = [], []
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 32, generator=generator(rank, step))).square().mean().backward()
        optimizer.step()
        digests.append(digest([p.detach() for p in model.parameters()]))
        num_buckets.append(len(model.reducer.buckets))
    return digests, num_buckets, model.cap_search


def searched(rank, num_ranks):
    """A search in which three buckets make the shortest steps, on the last rank; and the same training without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cap_search, "LEAST_CAP_BYTES", 1024)
        patch.setattr(cap_search, "DEFAULT_FIRST_BUCKET_BYTES", 256)
        patch.setattr(cap_search, "WARM_UP_STEPS", 1)
        patch.setattr(cap_search, "STEPS_EACH", 2)

        def step_s(timings):
            return 1.0 + abs(len(timings.last.buckets) - 3) if rank == num_ranks - 1 else 0.5

        patch.setattr(cap_search, "_median_step_s", step_s)
        digests, num_buckets, search = train_with_cap(rank, "auto", 40)
    plain, _, nothing = train_with_cap(rank, None, 40)
    return digests, plain, num_buckets, search.best_mb, [each.cap_mb for each in search.tried], nothing


@pytest.mark.processes
def test_ranks_try_the_same_caps_and_no_number_changes():
    first, second = pool(2).run(searched)
    assert first == second
    digests, plain, num_buckets, best_mb, tried, nothing = first
    assert digests == plain
    assert num_buckets[0] == 1
    assert len(set(num_buckets)) > 3
    assert num_buckets[-1] == 3
    assert best_mb in tried
    assert tried[-1] == best_mb
    assert nothing is None


def misuse_cap_search(rank, num_ranks):
    said = []
    for options in (
        {"compression": "fp16"},
        {"bucket_cap_mb_list": [1, 2]},
        {"overlap_forward": True},
        {"bucket_cap_mb": "fast"},
    ):
        with pytest.raises(ConfigurationError) as caught:
            DistributedDataParallel(nn.Linear(2, 2), **{"bucket_cap_mb": "auto", **options})
        said.append(str(caught.value))
    model = DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb="auto")
    for join in (model.join, lambda: Join([model])):
        with pytest.raises(ConfigurationError) as caught:
            join()
        said.append(str(caught.value))
    with pytest.raises(RuntimeError) as caught:
        model.register_comm_hook(None, torch.nn.Identity())
    said.append(str(caught.value))
    return said


@pytest.mark.processes
def test_what_keeps_to_buckets_is_refused():
    words = (
        "only the mean",
        "bucket_cap_mb_list",
        "overlap_forward",
        "'fast'",
        "join()",
        "join()",
        "register_comm_hook",
    )
    for said in pool(2).run(misuse_cap_search):
        for word, message in zip(words, said, strict=True):
            assert word in message, message


def alone(rank, num_ranks):
    return train_with_cap(rank, "auto", 2)[2]


@pytest.mark.processes
def test_one_rank_has_nothing_to_search():
    assert pool(1).run(alone) == [None]
