"""The mean over logical ranks has the same bits in shared memory and without it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from harness.ranks import pool
from paceline.reductions import ordered_mean


def both_ways(rank, num_ranks):
    group = dist.new_group(backend="paceline")
    mean, found = ordered_mean.LogicalMean(num_ranks), []
    for dtype, size in ((torch.float32, 100_003), (torch.bfloat16, 50_000), (torch.float32, 7)):
        flat = torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)
        results = []
        for shares in (ordered_mean.shares_memory, lambda _: False):
            own = flat.clone()
            before, ordered_mean.shares_memory = ordered_mean.shares_memory, shares
            mean.launch(SimpleNamespace(process_group=group, flat=own, parameters=(), gradients=())).wait()
            ordered_mean.shares_memory = before
            results.append(own)
        found.append((dtype, torch.equal(*results), torch.equal(results[0], flat)))
    return found


@pytest.mark.processes
def test_shared_memory_folds_in_logical_order():
    """Three ranks, an uneven size, 16 bits, a message small enough to be staged whole."""
    for found in pool(3).run(both_ways):
        assert all(is_equal and not is_own for _, is_equal, is_own in found), found


@pytest.mark.parametrize("num_ranks", range(1, 12))
def test_a_part_that_is_put_aside_is_scaled_as_one_that_is_not(num_ranks):
    """A quotient by five had other bits than a product with a fifth: after a loss parameters ended with others."""
    mean, weights = ordered_mean.LogicalMean(num_ranks), torch.rand(99, dtype=torch.float64).tolist()
    for weight in weights:
        mean.put_aside([], weight)
        assert mean._aside[0][0] == weight * mean.begin_step(num_ranks)
