"""Adasum of vectors that all ranks see: against the tree in one process, in float64; threads stand for ranks."""

import threading

import pytest
import torch
import torch.distributed as dist

from harness.models import digest, generator
from harness.ranks import pool
from paceline.process_group.host_collectives import SharedVectors
from paceline.reductions import Message
from paceline_adasum import Adasum, combine
from paceline_adasum.operator import Segments
from paceline_adasum.over_ranks import combine_shared, levels_of

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SIZES = ((1,), (3, 0, 1001, 2, 0), (40_001, 3, 70_000))

pytestmark = pytest.mark.usefixtures("one_thread")


def perform(flats, sizes):
    """Every rank's vector and norms; ranks are threads, each with its share of the elements."""
    num_ranks, outputs = len(flats), [flat.clone() for flat in flats]
    meeting = threading.Barrier(num_ranks, timeout=30)
    partial, norms = [None] * num_ranks, [None] * num_ranks

    def rank_main(rank):
        def all_reduce(small, name):
            partial[rank] = small.clone()
            meeting.wait()
            stacked = torch.stack(partial)
            small.copy_(stacked.sum(0) if name == "SUM" else stacked.amax(0))
            meeting.wait()

        first, last = (len(flats[0]) * part // num_ranks for part in (rank, rank + 1))
        norms[rank] = combine_shared(SharedVectors(tuple(outputs), first, last, all_reduce), Segments(sizes))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs, norms


def random_flats(num_ranks, sizes, dtype, scale=1.0):
    source = generator(num_ranks, *sizes)
    flats = [torch.randn(sum(sizes), generator=source, dtype=torch.float64) for _ in range(num_ranks)]
    return [(scale * (flat + flats[0])).to(dtype) for flat in flats]  # neither parallel nor orthogonal


def formula(flats, sizes):
    return torch.cat(combine([list(flat.double().split(sizes)) for flat in flats]))


@pytest.mark.parametrize(
    ("num_ranks", "dtype"),
    [(num, torch.float64) for num in (2, 3, 4, 5, 8)]
    + [(num, dtype) for num in (3, 4) for dtype in (torch.float32, torch.float16, torch.bfloat16)],
    ids=str,
)
def test_it_equals_the_formula(num_ranks, dtype):
    """Tensors that straddle the shares, empty ones, several chunks; bitwise equal on all ranks; and both norms."""
    for sizes in SIZES:
        flats = random_flats(num_ranks, sizes, dtype)
        outputs, norms = perform(flats, sizes)
        expected = formula(flats, sizes)
        of_inputs = sum(float(flat.double().square().sum()) for flat in flats)
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        assert (outputs[0].double() - expected).norm() <= TOLERANCE[dtype] * of_inputs**0.5
        assert len(set(norms)) == 1
        assert norms[0].of_inputs == pytest.approx(of_inputs)
        of_result = float(expected.square().sum())
        assert norms[0].of_result == pytest.approx(of_result, rel=5 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1e30), (torch.float32, 1e-30), (torch.float64, 1e250), (torch.float64, 1e-250)],
)
def test_large_and_small_numbers(dtype, scale):
    """Squares would overflow or vanish in the gradients' own precision."""
    sizes = (1000, 7)
    flats = random_flats(2, sizes, dtype, scale)
    outputs, _ = perform(flats, sizes)
    torch.testing.assert_close(outputs[0] / scale, formula(flats, sizes).to(dtype) / scale)


@pytest.mark.parametrize("exponent", [-90, -110])
def test_a_much_smaller_gradient_counts_as_zero(exponent):
    """Below a ratio of norms of 2^-100: then the larger one stays as it is; above it, orthogonal or not is seen."""
    large = torch.tensor([1.0, 1.0])
    outputs, _ = perform([large, large * 2.0**exponent], (2,))
    assert torch.equal(outputs[0], large if exponent < -100 else large / 2)


def test_swapping_two_ranks_changes_no_bit():
    flats = random_flats(4, (40_001, 3, 70_000), torch.float32)
    outputs, _ = perform(flats, (40_001, 3, 70_000))
    swapped, _ = perform([flats[1], flats[0], flats[3], flats[2]], (40_001, 3, 70_000))
    assert torch.equal(outputs[0], swapped[0])


def test_every_rank_is_a_leaf_once():
    for num_ranks in range(2, 20):
        pairs = [pair for level in levels_of(num_ranks) for pair in level]
        assert len(pairs) == num_ranks - 1
        assert sorted(p.right for p in pairs) == list(range(1, num_ranks))
        assert (pairs[-1].left, pairs[-1].num_left + pairs[-1].num_right) == (0, num_ranks)


def over_a_group(rank, num_ranks, dtype):
    """Resident and ordinary tensors between all-reduces on the same group; how many bytes a connection has sent."""
    ours = dist.new_group(backend="paceline")
    sizes, adasum = (40_001, 3, 70_000), Adasum()
    flats = random_flats(num_ranks, sizes, dtype)
    found = []
    for is_resident in (True, False):
        flat = ours.allocate_tensor(sum(sizes), dtype=dtype, device=torch.device("cpu"))
        flat = flat.copy_(flats[rank]) if is_resident else flats[rank].clone()
        ones = torch.ones(5)
        before = dist.all_reduce(ones, group=ours, async_op=True)
        views = list(flat.split(sizes))
        adasum.begin_step(num_ranks)
        pending = adasum.launch(Message(0, True, flat, flat.numel(), views, views, ours))
        after = dist.all_reduce(ones, group=ours, async_op=True)
        for each in (before, pending, after):
            each.wait()
        adasum.note_step()
        assert ones.tolist() == [num_ranks**2] * 5
        error = (flat.double() - formula(flats, sizes)).norm() / sum(
            f.double().square().sum() for f in flats
        ).sqrt()
        found.append((float(error), digest([flat]), adasum.orthogonality))
    assert adasum._connection is None
    return found


@pytest.mark.processes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_over_a_group_that_shares_memory(num_ranks, dtype):
    """A collective of the group among others; no connections are made."""
    results = pool(num_ranks).run(over_a_group, dtype)
    assert all(found == results[0] for found in results)
    (error, bits, orthogonality), staged = results[0]
    assert error <= TOLERANCE[dtype]
    assert (error, bits, orthogonality) == staged
    assert 1 / num_ranks < orthogonality < 1
