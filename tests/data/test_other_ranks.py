"""Samplers, shares and balances that go on with other ranks: every sample once, the same on all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from paceline.data import Balance, GlobalBatch, GlobalShuffle, GlobalStream, StepWork, TokenShuffle
from paceline.data.global_batch import cut_among
from paceline.ddp.step_shares import DataPosition, StepShares
from paceline.errors import ConfigurationError


@pytest.mark.parametrize(
    ("had", "whole", "expected"),
    [
        ([4, 6], 12, (5, 7)),
        ([4, None], 12, (6, 6)),
        ([2, 6, None], 12, (3, 5, 4)),
        ([0, 6], 6, (0, 6)),
        ([None, None], 5, (3, 2)),
        ([3, 3, 3], 10, (4, 3, 3)),
    ],
)
def test_what_ranks_had_decides(had, whole, expected):
    """In proportion; a new rank gets the mean of the others, who had nothing gets nothing."""
    assert cut_among(had, whole) == expected


def test_fewer_samples_than_ranks():
    """There is no rank without any by accident."""
    with pytest.raises(ConfigurationError, match=r"rebuild\(batch=\.\.\.\)"):
        cut_among([1, 1, None], 2)


def steps_of(ranks, loops, num):
    """The next `num` steps of each rank's loop, as lists of samples; None where one has ended."""
    return [[next(loops[rank], None) for _ in range(num)] for rank in ranks]


def flat(found):
    return [row for steps in found for step in steps if step for rows in step for row in rows]


def loops_over(shuffles):
    return [shuffle.steps(shuffle) for shuffle in shuffles]


def test_a_shuffle_moves_within_its_loop():
    """From the next step on, or from the one under way, with other ranks; the rest of the epoch is trained once."""
    shuffles = [GlobalShuffle(50, GlobalBatch((2, 3, 5)), rank) for rank in range(3)]
    loops = loops_over(shuffles)
    first = steps_of(range(3), loops, 2)
    given_up = shuffles[0].step.position
    assert given_up == 10
    for rank, old in enumerate((2, 0)):
        shuffles[old].move(GlobalBatch((6, 4)), rank, 0, given_up)
        assert shuffles[old].state_dict()["position"] == given_up
    rest = [[], []]
    for rank, old in enumerate((2, 0)):
        for step in loops[old]:
            rest[rank] += [row for rows in step for row in rows]
    trained = flat([steps[:1] for steps in first]) + rest[0] + rest[1]
    assert sorted(trained) == list(range(50))
    assert (len(rest[0]), len(rest[1])) == (24, 16)
    assert (shuffles[0].epoch, shuffles[2].epoch) == (1, 1)
    assert [len(list(shuffle.steps(shuffle))) for shuffle in (shuffles[0], shuffles[2])] == [5, 5]


def test_a_shuffle_moves_between_loops():
    """A new rank goes where the others are, also into another epoch; at its end it goes on with the next."""
    here, new = GlobalShuffle(20, GlobalBatch((4, 4)), 0), GlobalShuffle(20, GlobalBatch((5,)), 0)
    for _ in here.steps(here):
        break
    here.move(GlobalBatch((4, 4)), 1, 0, 8)
    new.move(GlobalBatch((4, 4)), 0, 0, 8)
    both = [[row for step in each.steps(each) for rows in step for row in rows] for each in (new, here)]
    assert sorted(both[0] + both[1]) == sorted(here.order(0)[8:].tolist())
    new.move(GlobalBatch((4, 4)), 0, 3, 20)
    assert new.epoch == 4
    assert sum(len(rows) for step in new.steps(new) for rows in step) == 10
    assert new.state_dict()["epoch"] == 4


def test_a_move_that_cannot_be_changes_nothing():
    """The rank is none of the batch's."""
    shuffle = GlobalShuffle(20, GlobalBatch((4, 4)), 1)
    with pytest.raises(ConfigurationError, match="rank=2"):
        shuffle.move(GlobalBatch((4, 4)), 2, 0, 0)
    assert (shuffle.rank, shuffle.batch.local) == (1, (4, 4))


def test_tokens_move_as_well():
    """The budget stays; the same batches are cut among others."""
    lengths = [1 + place % 7 for place in range(60)]
    shuffles = [TokenShuffle(lengths, GlobalBatch((10, 20)), rank) for rank in range(2)]
    loops = loops_over(shuffles)
    first = steps_of(range(2), loops, 1)
    position = shuffles[0].step.end
    shuffles[1].move(GlobalBatch((30,)), 0, 0, position)
    rest = [row for step in loops[1] for rows in step for row in rows]
    assert sorted(flat(first) + rest) == list(range(60))


def test_a_stream_moves():
    """In its loop to the next step or the one under way, between loops anywhere."""
    streams = [GlobalStream(range(40), GlobalBatch((3, 5)), rank, collate=list) for rank in range(2)]
    loops = [stream.steps() for stream in streams]
    first = steps_of(range(2), loops, 2)
    streams[1].move(GlobalBatch((8,)), 0, 0, 8)  # the second step is given up
    with pytest.raises(ConfigurationError, match="read in order"):
        streams[0].move(GlobalBatch((8,)), 0, 0, 0)
    rest = [row for step in loops[1] for rows in step for row in rows]
    assert sorted(flat([steps[:1] for steps in first]) + rest) == list(range(40))
    loops[0].close()
    streams[0].move(GlobalBatch((8,)), 0, 0, 24)
    assert [row for step in streams[0].steps() for rows in step for row in rows] == list(range(24, 40))


def test_a_balance_begins_again_alike():
    """What an old rank has learnt and what a new one has not lead to the same decisions; limits stay with ranks."""
    old, new = Balance(num_ignored=0, gain_ratio=0.0), Balance(num_ignored=0, gain_ratio=0.0)
    old.begin(GlobalBatch((6, 6, 6)))
    for _ in range(7):
        old.observe(GlobalBatch((6, 6, 6)), [StepWork(6, 1.0)] * 3)
    new.begin(GlobalBatch((9, 9)))
    begun = [each.begin_again(GlobalBatch((12, 6)), [10, None], tells=True) for each in (old, new)]
    assert begun[0] == begun[1]
    assert begun[0].local[0] <= 10
    assert begun[0].size == 18
    decided = []
    for each in (old, new):
        batch = begun[0]
        for _ in range(12):
            work = [
                StepWork(count, count * speed) for count, speed in zip(batch.samples, (0.1, 0.4), strict=True)
            ]
            batch = each.observe(batch, work) or batch
        decided.append(batch.samples)
    assert decided[0] == decided[1] == (10, 8)
    assert old.limit_of(0) == 10
    assert old.limit_of(5) is None


def test_micro_steps_are_cut_where_these_move():
    """The size of a micro-step stays, and so does the global batch."""
    shuffle = GlobalShuffle(100, GlobalBatch((4, 4, 4), (1, 2, 3)), 0)
    shares = StepShares(shuffle, Balance(move="micro-steps"), 0, 3, torch.device("cpu"))
    told = shares.data_position(None)
    assert told == DataPosition(0, 0, 4, 1, 12, 6, 1, 0)
    others = [DataPosition(0, 0, 4, steps, 12, 6, 1, 0) for steps in (1, 3)]
    batch = told.batch_among(others)
    assert batch == GlobalBatch((4, 4), (2, 4))
    shares.follow(batch, 1, told, [0, 0])
    assert shuffle.rank == 1
    loop = shuffle.steps(shuffle)
    assert len(next(loop)) == 4
    assert shares.own_weights() == [4, 4, 4, 4]


SAMPLERS = {
    "shuffle": lambda count, batch, last: GlobalShuffle(count, batch, 0, last=last),
    "stream": lambda count, batch, last: GlobalStream(range(count), batch, 0, collate=list, last=last),
    "tokens": lambda count, batch, _: TokenShuffle([1] * count, batch, 0),
}


@pytest.mark.parametrize("kind", SAMPLERS)
@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 24),
    more=st.integers(0, 70),
    last=st.sampled_from(["uneven", "drop"]),
    ranks=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_an_epoch_has_the_steps_of_one_process_whichever_ranks_train_it(kind, size, more, last, ranks):
    """Ranks come and go between any two steps. A schedule of a fixed length ended the job after a loss."""
    batch = GlobalBatch.of(size, ranks[0])
    sampler = SAMPLERS[kind](size + more, batch, last)
    batches = BatchSampler(range(size + more), size, drop_last=last == "drop" and kind != "tokens")
    sizes = []
    for place, _ in enumerate(sampler.steps() if kind == "stream" else sampler.steps(sampler)):
        step = sampler.step
        assert step.position == sum(sizes)
        sizes.append(step.size)
        batch = batch.among(ranks[place % len(ranks)])
        sampler.move(batch, 0, sampler.epoch, step.end)
    assert sorted(sizes, reverse=True) == [len(each) for each in batches]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7])
def test_a_batch_among_other_ranks_has_as_many_samples_and_no_larger_micro_batch(num_ranks):
    """There are more micro-steps instead; as many ranks as before have what they had."""
    for batch in (
        GlobalBatch((8, 8, 8, 8)),
        GlobalBatch((3, 5), 4),
        GlobalBatch((7, 0, 4)),
        GlobalBatch((1, 1)),
    ):
        other = batch.among(num_ranks)
        assert other.size == batch.size
        assert other.num_ranks == num_ranks
        assert max(other.local) <= max(batch.local)
        assert batch.among(num_ranks).among(batch.num_ranks).size == batch.size
    assert GlobalBatch((3, 5), 4).among(2) == GlobalBatch((3, 5), 4)


def test_of_more_ranks_than_logical_ones_some_train_nothing():
    """A rank with a number that no logical rank has is no error. It computes one, or none."""
    found = []
    for rank, logical in ((0, range(1)), (1, range(1, 1)), (2, range(1, 2)), (0, range(2))):
        shuffle = GlobalShuffle(16, GlobalBatch.of(8, ranks=2), 0, seed=1)
        shuffle.move(GlobalBatch.of(8, 2), rank, 0, 8, logical)
        found.append([i for batches in shuffle.steps(shuffle) for batch in batches for i in batch])
    assert [len(each) for each in found] == [4, 0, 4, 8]
    assert sorted(found[0] + found[2]) == sorted(found[3])
