"""Batches of so many tokens: the same whatever the shares, every sequence once, parts by tokens, exact restarts."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from paceline.data import GlobalBatch, TokenShuffle
from paceline.data.token_shuffle import cut_by_tokens
from paceline.errors import ConfigurationError

quick = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
lengths_of_samples = st.lists(st.integers(1, 40), min_size=1, max_size=80)
shares = st.lists(st.integers(0, 60), min_size=3, max_size=3).filter(lambda each: sum(each) >= 40)


def loops_of(shuffles):
    """Each rank's loop over steps, with the indices themselves as batches."""
    return [shuffle.steps(_Batches(shuffle)) for shuffle in shuffles]


class _Batches:
    """As a `DataLoader` without workers."""

    def __init__(self, shuffle):
        self.shuffle = shuffle

    def __iter__(self):
        return iter(self.shuffle)


def moved(batch, draw):
    """The same tokens in other shares."""
    cuts = sorted(draw.randint(0, sum(batch.local)) for _ in range(2))
    return GlobalBatch(
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, sum(batch.local)))), batch.accumulation
    )


@quick
@given(
    lengths=lengths_of_samples,
    local=shares,
    accumulation=st.integers(1, 2),
    draw=st.randoms(use_true_random=False),
)
def test_every_sequence_once_in_the_same_batches(lengths, local, accumulation, draw):
    """While shares move and steps are repeated; no batch has more tokens than the budget, padding included."""
    batch = GlobalBatch(tuple(local), accumulation)
    fixed = TokenShuffle(lengths, GlobalBatch((batch.size,)), 0)
    wanted = [[i for batches in lists for i in batches] for lists in fixed.steps(_Batches(fixed))]
    ranks = [TokenShuffle(lengths, batch, rank) for rank in range(3)]
    found = []
    for lists in zip(*loops_of(ranks), strict=True):
        step = ranks[0].step
        assert all(rank.step == step for rank in ranks)
        mine = [i for batches in lists for part in batches for i in part]
        assert max(lengths[i] for i in mine) * len(mine) <= batch.size
        for rank, batches in enumerate(lists):
            assert step.weights(rank) == [sum(lengths[i] for i in part) for part in batches]
        other = moved(batch, draw)
        if draw.random() < 0.2:
            for rank in ranks:
                rank.repeat(other)
            continue
        for rank in ranks:
            rank.change(other)
        found.append(mine)
    assert list(map(sorted, found)) == list(map(sorted, wanted))
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(lengths)))


@quick
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), wanted=shares)
def test_parts_by_tokens(lengths, wanted):
    """Each ends at the sample nearest to where its share does, but that nobody who wants some is left without."""
    counts = cut_by_tokens(lengths, wanted)
    assert sum(counts) == len(lengths)
    assert all(
        (count == 0) == (part == 0) for count, part in zip(counts, wanted, strict=True) if len(lengths) > 2
    )
    sums = [0, *itertools.accumulate(lengths)]
    if all(count > 1 for count, part in zip(counts, wanted, strict=True) if part):
        for place in range(1, 3):
            goal = sums[-1] * sum(wanted[:place]) / sum(wanted)
            end = sums[sum(counts[:place])]
            assert abs(end - goal) == pytest.approx(min(abs(each - goal) for each in sums))


def test_batches_have_sequences_of_about_one_length():
    """So that little is padded, and epochs are shuffled: batches come in another order, with other sequences."""
    lengths = [1 + 7 * i % 97 for i in range(4000)]
    shuffle = TokenShuffle(lengths, GlobalBatch((400, 400)), 0)
    epochs = []
    for epoch in range(2):
        steps = list(shuffle._make_plan(0, epoch).steps(0))
        order = shuffle.order(epoch).tolist()
        batches = [order[step.position : step.end] for step in steps]
        padded = sum(max(lengths[i] for i in each) * len(each) for each in batches)
        assert sum(lengths) / padded > 0.95
        assert padded / len(batches) > 0.9 * 800
        first = [max(lengths[i] for i in each) for each in batches[:20]]
        assert first != sorted(first)
        epochs.append({frozenset(each) for each in batches})
    assert len(epochs[0] & epochs[1]) < len(epochs[0]) / 10


def test_resumed_by_other_ranks():
    """At the exact sequence, in the same batches; another budget, which would make others, is refused."""
    lengths = [1 + 5 * i % 23 for i in range(200)]
    first = TokenShuffle(lengths, GlobalBatch((60, 40)), 0)
    loop = first.steps(_Batches(first))
    for _ in range(7):
        next(loop)
    state = json.loads(json.dumps(first.state_dict()))
    rest = [
        sorted(first.order(0).tolist()[step.position : step.end])
        for step in first._plan.steps(first.step.end)
    ]
    later = [TokenShuffle(lengths, GlobalBatch((20, 30, 50)), rank, seed=9) for rank in range(3)]
    for rank in later:
        rank.load_state_dict(state)
    found = [
        sorted(i for batches in lists for part in batches for i in part)
        for lists in zip(*loops_of(later), strict=True)
    ]
    assert found == rest
    assert len(later[0]) > 10
    with pytest.raises(ConfigurationError, match="steps of 100 tokens, these have 90"):
        TokenShuffle(lengths, GlobalBatch((60, 30)), 0).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TokenShuffle([3, 0], GlobalBatch((8,))), "Leave out samples without tokens"),
        (lambda: TokenShuffle([float("nan"), 3], GlobalBatch((8,))), "whole numbers"),
        (lambda: TokenShuffle(["long", 3], GlobalBatch((8,))), "whole numbers"),
        (lambda: TokenShuffle([3, 9], GlobalBatch((4, 4)), 0), "sample 1 has 9 tokens, a step 8"),
        (
            lambda: TokenShuffle([3], GlobalBatch((8,))).change(GlobalBatch((9,))),
            "token budget cannot change from 8 to 9 within an epoch",
        ),
        (lambda: next(iter(TokenShuffle([3], GlobalBatch((8,))))), "over steps"),
        (
            lambda: next(iter(DataLoader([0], batch_sampler=TokenShuffle([3], GlobalBatch((8,)))))),
            "over steps",
        ),
    ],
)
def test_refused(make, words):
    """Before anything is trained."""
    with pytest.raises(ConfigurationError, match=words):
        make()
