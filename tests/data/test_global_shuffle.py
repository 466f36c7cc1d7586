"""One order an epoch, cut among ranks: every sample once, whatever the ranks, batches and restarts (remark 4)."""

import itertools
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.data import GlobalBatch, GlobalShuffle
from paceline.data.global_batch import cut_by
from paceline.errors import ConfigurationError, ProtocolError

quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
batches = st.lists(st.integers(1, 7), min_size=1, max_size=5).map(lambda local: GlobalBatch(tuple(local)))


def ranks_of(num_samples, batch, **kwargs):
    return [GlobalShuffle(num_samples, batch, rank, **kwargs) for rank in range(batch.num_ranks)]


def epoch_of(shuffles):
    """Every rank's batches, as rows of [rank 0's, rank 1's, ...]."""
    parts = [list(shuffle) for shuffle in shuffles]
    assert len({len(part) for part in parts}) == 1
    return list(zip(*parts, strict=True))


def flat(rows):
    """The samples in the order in which they were trained."""
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(rows)))


@quick
@given(batch=batches, num_samples=st.integers(1, 60), last=st.sampled_from(["uneven", "drop"]))
def test_every_sample_once_an_epoch(batch, num_samples, last):
    """Over all ranks, in the global order; equally many batches, none empty; the sizes are what was said."""
    least = batch.size if last == "drop" else batch.num_ranks
    if num_samples < least:
        with pytest.raises(ConfigurationError, match="do not make one batch"):
            GlobalShuffle(num_samples, batch, 0, last=last)
        return
    shuffles = ranks_of(num_samples, batch, last=last)
    rows = epoch_of(shuffles)
    trained = flat(rows)
    kept = num_samples - num_samples % batch.size if last == "drop" else num_samples
    assert trained == shuffles[0].order(0)[:kept].tolist()
    assert len(set(trained)) == kept
    assert all(part for row in rows for part in row)
    assert [tuple(map(len, row)) for row in rows] == [shuffles[0].sizes(i) for i in range(len(rows))]
    assert all(tuple(map(len, row)) == batch.local for row in rows[:-1])


def test_torchs_sampler_repeats_what_ours_does_not():
    """The wrong variant: it pads, so some samples count twice."""
    padded = flat([[list(DistributedSampler(range(10), 4, rank)) for rank in range(4)]])
    assert len(padded) == 12
    ours = flat(epoch_of(ranks_of(10, GlobalBatch((1,) * 4))))
    assert sorted(ours) == list(range(10))


def test_epochs_differ_and_ranks_do_not_matter():
    """Another order each epoch without anybody calling set_epoch; the same one for any number of ranks."""
    one, four = ranks_of(50, GlobalBatch((8,))), ranks_of(50, GlobalBatch((3, 2, 2, 1)))
    orders = [(flat(epoch_of(one)), flat(epoch_of(four))) for _ in range(3)]
    assert all(a == b for a, b in orders)
    assert len({tuple(a) for a, _ in orders}) == 3
    assert four[0].epoch == 2
    for shuffle in four:
        shuffle.set_epoch(1)
    assert flat(epoch_of(four)) == orders[1][0]
    assert flat(epoch_of(ranks_of(50, GlobalBatch((8,)), seed=1))) != orders[0][0]
    assert torch.equal(one[0].order(7), four[3].order(7))


@quick
@given(
    before=batches,
    after=batches,
    num_samples=st.integers(20, 60),
    epoch=st.integers(0, 2),
    part=st.floats(0, 1),
)
def test_restarted_in_mid_epoch_with_other_ranks(before, after, num_samples, epoch, part):
    """What the two runs train of this epoch is its order; what is left out at most is fewer than the ranks."""
    first = ranks_of(num_samples, before)
    for shuffle in first:
        shuffle.set_epoch(epoch)
    rows = epoch_of(first)
    done = int(part * len(rows))
    states = {json.dumps(shuffle.state_dict(num_batches=done)) for shuffle in first}
    assert len(states) == 1

    second = ranks_of(num_samples, after)
    for shuffle in second:
        shuffle.load_state_dict(json.loads(next(iter(states))), batch_may_change=True)
        shuffle.set_epoch(shuffle.epoch)  # as a loop over epochs does; it must not go back
    trained = flat(rows[:done])
    if second[0].epoch == epoch:
        trained += flat(epoch_of(second))
    order = first[0].order(epoch).tolist()
    assert trained == order[: len(trained)]
    assert num_samples - len(trained) < after.num_ranks
    assert flat(epoch_of(second)) == first[0].order(epoch + 1).tolist()


def test_the_state_follows_what_was_handed_out():
    """Without worker processes nobody needs to count. An iteration that was left is over, as one that ended."""
    shuffle = GlobalShuffle(20, GlobalBatch((4, 2)), 1)
    assert shuffle.state_dict()["position"] == 0
    iteration = iter(shuffle)
    next(iteration)
    next(iteration)
    assert shuffle.state_dict() == {"epoch": 0, "position": 12, "seed": 0, "num_samples": 20, "batch": 6}
    assert len(shuffle) == 4
    later = GlobalShuffle(20, GlobalBatch((1, 1)), 1)
    later.load_state_dict(shuffle.state_dict(), batch_may_change=True)
    assert len(later) == len(list(later)) == 4
    assert len(later) == len(list(later)) == 10
    assert later.epoch == 1
    assert next(iter(shuffle)) == shuffle.order(1)[4:6].tolist()
    with pytest.raises(ConfigurationError, match="a data set of 20 samples, this one has 21"):
        GlobalShuffle(21, GlobalBatch((4, 2)), 1).load_state_dict(shuffle.state_dict())
    with pytest.raises(
        ConfigurationError, match="a state of 'epoch' lacks 'num_samples', 'seed', 'position', 'batch'"
    ):
        shuffle.load_state_dict({"epoch": 0})


@pytest.mark.processes
def test_it_feeds_a_loader():
    """As `batch_sampler`, with and without worker processes that fetch ahead."""
    dataset = TensorDataset(torch.arange(23))
    for workers in (0, 1):
        seen = []
        for rank in range(2):
            shuffle = GlobalShuffle(dataset, GlobalBatch((3, 2)), rank)
            loader = DataLoader(dataset, batch_sampler=shuffle, num_workers=workers)
            assert len(loader) == 5
            seen += [index for (batch,) in loader for index in batch.tolist()]
        assert sorted(seen) == list(range(23))


@pytest.mark.parametrize("is_moved", [False, True], ids=["resumed", "moved"])
def test_an_epoch_that_goes_on_draws_no_random_numbers(is_moved):
    """Dropout in the rest of an epoch is that of an undisturbed run. Any iterator of a loader draws a seed."""
    dataset = TensorDataset(torch.arange(24))

    def drawn(handed_out, num_steps):
        return [torch.rand(1).item() for _ in itertools.islice(handed_out, num_steps)]

    shuffle = GlobalShuffle(dataset, GlobalBatch((3,)), 0)
    loader = DataLoader(dataset, batch_sampler=shuffle)
    torch.manual_seed(1)
    handed_out = shuffle.steps(loader)
    drawn(handed_out, 3)
    state = torch.get_rng_state()
    expected = drawn(handed_out, 5)
    other = GlobalShuffle(dataset, GlobalBatch((3,)), 0)
    handed_out = other.steps(DataLoader(dataset, batch_sampler=other))
    if is_moved:
        next(handed_out)
    other.move(GlobalBatch((3,)), 0, 0, 9)
    torch.set_rng_state(state)
    assert drawn(handed_out, 5) == expected


@quick
@given(batch=batches, part=st.floats(0, 1))
def test_cutting_by_shares(batch, part):
    """Whole samples that add up, within one of the exact share where everybody has enough."""
    num_samples = round(part * batch.size)
    cut = cut_by(batch.local, num_samples)
    assert sum(cut) == num_samples
    assert all(size >= (num_samples >= batch.num_ranks) for size in cut)
    spare = max(0, num_samples - batch.num_ranks)
    if num_samples >= batch.num_ranks and num_samples != batch.size:
        exact = [1 + spare * share for share in batch.shares]
        assert all(abs(size - wanted) < 1 for size, wanted in zip(cut, exact, strict=True))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GlobalShuffle(10, GlobalBatch((2, 2)), rank=2), "rank=2 has no part"),
        (lambda: GlobalShuffle(10, GlobalBatch((2, 2)), last="pad"), "last='pad' is not a way to end"),
        (lambda: GlobalShuffle(1, GlobalBatch((2, 2))), "1 samples do not make one batch"),
        (lambda: GlobalShuffle([], GlobalBatch((2,))), "0 samples do not make one batch"),
        (lambda: GlobalBatch(()), "names no rank"),
        (lambda: GlobalBatch((4, -1)), "rank 1 would train -1 samples"),
        (lambda: GlobalBatch((0, 0)), "trains nothing"),
        (lambda: GlobalBatch((4, 4), accumulation=(1, 2, 3)), "is for 3 ranks"),
        (lambda: GlobalBatch((4,), accumulation=-1), "accumulation=-1"),
        (lambda: GlobalBatch((4.5, 4)), "whole numbers"),
        (lambda: GlobalBatch((4,), accumulation=1.5), "whole numbers"),
    ],
)
def test_refused(make, words):
    """Before anything is trained."""
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert words in str(caught.value)


def test_a_batch_in_words():
    """As reports print it."""
    assert str(GlobalBatch((32,))) == "1 rank x 32 = 32 samples"
    assert str(GlobalBatch((32, 16), 2)) == "2 ranks with 32 + 16 x 2 micro-steps = 96 samples"
    assert str(GlobalBatch((*range(1, 10), 100))) == "10 ranks with 1 to 100 = 145 samples"
    assert GlobalBatch.from_dict(GlobalBatch((32, 16), 2).as_dict()) == GlobalBatch((32, 16), 2)


class _Rank:
    """A rank's loop over `steps`, whose loader is so many batches ahead."""

    def __init__(self, shuffle, ahead):
        self.shuffle, self.ahead = shuffle, ahead
        self.loop = shuffle.steps(self)

    def __iter__(self):
        """As a DataLoader with workers: indices are asked for early."""
        indices, fetched = iter(self.shuffle), []
        for batch in indices:
            fetched.append(batch)
            if len(fetched) > self.ahead:
                yield fetched.pop(0)
        yield from fetched


ranks_with_none = st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any).map(tuple)


@settings(quick, max_examples=25)
@given(
    first=st.tuples(ranks_with_none, st.lists(st.integers(1, 3), min_size=3, max_size=3)),
    num_samples=st.integers(20, 70),
    ahead=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    draw=st.randoms(use_true_random=False),
)
def test_shares_that_change_between_steps(first, num_samples, ahead, draw):
    """Every sample once, in the same global batches; ranks fetch unequally far ahead; some steps are repeated."""
    batch = GlobalBatch(first[0], tuple(first[1]))
    ranks = [_Rank(GlobalShuffle(num_samples, batch, rank), ahead[rank]) for rank in range(3)]
    order, trained = ranks[0].shuffle.order(0).tolist(), []
    while True:
        lists = [next(rank.loop, None) for rank in ranks]
        if lists[0] is None:
            assert lists == [None] * 3
            break
        steps = [rank.shuffle.step for rank in ranks]
        assert steps[0] == steps[1] == steps[2]
        assert tuple(sum(map(len, parts)) for parts in lists) == steps[0].samples
        mine = [i for parts in lists for batch in parts for i in batch]
        assert sorted(mine) == sorted(order[steps[0].position : steps[0].end])
        cuts = sorted(draw.randint(0, batch.size) for _ in range(2))
        local = tuple(b - a for a, b in itertools.pairwise((0, *cuts, batch.size)))
        what = draw.random()
        if what < 0.2:  # the step was given up; its samples come again
            for rank in ranks:
                rank.shuffle.repeat(GlobalBatch(local))
                assert rank.shuffle.state_dict()["position"] == steps[0].position
            continue
        trained += mine
        states = {json.dumps(rank.shuffle.state_dict()) for rank in ranks}
        assert len(states) == 1
        assert json.loads(states.pop())["position"] == len(trained)
        if what < 0.6:
            position = max(rank.shuffle.fetched for rank in ranks)
            for rank in ranks:
                rank.shuffle.change(GlobalBatch(local), position)
    assert sorted(trained) == list(range(num_samples))
    loop = ranks[0].shuffle.steps(ranks[0])
    assert len(next(loop)) >= 0
    assert ranks[0].shuffle.epoch == 1


@settings(quick, max_examples=25)
@given(part=st.floats(0, 1), before=ranks_with_none, after=batches, draw=st.randoms(use_true_random=False))
def test_resumed_at_the_exact_sample(part, before, after, draw):
    """In the middle of an epoch whose shares have moved, by other ranks with other shares."""
    ranks = [_Rank(GlobalShuffle(60, GlobalBatch(before), rank), rank) for rank in range(3)]
    trained = []
    for lists in zip(*(rank.loop for rank in ranks), strict=True):
        trained += [i for parts in lists for batch in parts for i in batch]
        if len(trained) >= 60 * part:
            break
        position = max(rank.shuffle.fetched for rank in ranks)
        batch = GlobalBatch(tuple(draw.sample(before, 3)))
        for rank in ranks:
            rank.shuffle.change(batch, position)
    for rank in ranks:
        rank.loop.close()  # what the state says does not change when the loop is left
    state = json.loads(json.dumps(ranks[0].shuffle.state_dict()))
    assert state["position"] == len(trained)
    later = [_Rank(GlobalShuffle(60, after, rank), 0) for rank in range(after.num_ranks)]
    for rank in later:
        rank.shuffle.load_state_dict(state, batch_may_change=True)
    if len(trained) < 60 and later[0].shuffle.epoch == 0:
        for lists in zip(*(rank.loop for rank in later), strict=True):
            trained += [i for parts in lists for batch in parts for i in batch]
    assert sorted(trained) == list(range(60))


@pytest.mark.processes
def test_workers_that_persist_follow_new_shares():
    """Real ones, with prefetching: no sample twice, and a repeated step has the same samples."""
    dataset = TensorDataset(torch.arange(48))
    seen = []
    for rank in range(2):
        shuffle = GlobalShuffle(dataset, GlobalBatch((3, 3)), rank)
        loader = DataLoader(dataset, batch_sampler=shuffle, num_workers=1, persistent_workers=True)
        for place, batches in enumerate(shuffle.steps(loader)):
            if place == 3 and shuffle.batch.local == (3, 3):
                shuffle.repeat(GlobalBatch((1, 5)))
                continue
            seen += [i for (batch,) in batches for i in batch.tolist()]
        assert shuffle.batch == GlobalBatch((1, 5))
        assert [len(batch) for (batch,) in next(shuffle.steps(loader))] == [(1, 5)[rank]]
    assert sorted(seen) == list(range(48))


def test_what_steps_refuse():
    """Changes that came too late, other loaders, ranks without samples in a plain loop."""
    shuffle = GlobalShuffle(20, GlobalBatch((2, 2)), 0)
    loop = iter(shuffle)
    next(loop)
    with pytest.raises(ProtocolError, match="has fetched up to 4"):
        shuffle.change(GlobalBatch((1, 3)), position=0)
    with pytest.raises(ProtocolError, match="no step to repeat"):
        shuffle.repeat(GlobalBatch((1, 3)))
    with pytest.raises(ConfigurationError, match="cannot follow"):
        shuffle.change(GlobalBatch((1, 1, 2)))
    with pytest.raises(ConfigurationError, match="BatchSampler as its batch sampler"):
        shuffle.steps(DataLoader(list(range(20)), batch_size=2))
    with pytest.raises(ConfigurationError, match="rank 1 has no samples"):
        next(iter(GlobalShuffle(20, GlobalBatch((2, 0)), 0)))
