"""Data that is read in order: every sample once whatever the shares, and restarts at the exact sample."""

import itertools
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from paceline.data import GlobalBatch, GlobalStream
from paceline.errors import ConfigurationError, ProtocolError

quick = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
locals_of_three = st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any).map(tuple)


class Rows(IterableDataset):
    """Numbers from 0 on, other ones in each epoch; counts how many were read."""

    def __init__(self, num_samples):
        self.num_samples, self.num_read, self.epoch = num_samples, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i in range(self.num_samples):
            self.num_read += 1
            yield 1000 * self.epoch + i


class StatefulRows(Rows):
    """By the convention of torchdata: what `load_state_dict` is given, the next iteration begins at."""

    def __init__(self, num_samples):
        super().__init__(num_samples)
        self._at, self._begins = 0, None

    def state_dict(self):
        return {"at": self._at}

    def load_state_dict(self, state):
        self._begins = state["at"]

    def __iter__(self):
        self._at, self._begins = self._begins or 0, None
        while self._at < self.num_samples:
            self.num_read += 1
            self._at += 1
            yield 1000 * self.epoch + self._at - 1


def streams(make, num_samples, batch, **kwargs):
    return [
        GlobalStream(make(num_samples), batch, rank, collate=list, **kwargs)
        for rank in range(batch.num_ranks)
    ]


def samples_of(lists):
    """All ranks', in the stream's order within a step."""
    return sorted(i for batches in lists for batch in batches for i in batch)


@pytest.mark.parametrize("make", [Rows, StatefulRows])
@quick
@given(
    first=st.tuples(locals_of_three, st.lists(st.integers(1, 3), min_size=3, max_size=3)),
    num_samples=st.integers(1, 70),
    part=st.floats(0, 1),
    after=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any).map(tuple),
    draw=st.randoms(use_true_random=False),
)
def test_every_sample_once_also_resumed_by_other_ranks(make, first, num_samples, part, after, draw):
    """Shares change between steps, steps are repeated, and at some point another number of ranks goes on."""
    batch = GlobalBatch(first[0], tuple(first[1]))
    ranks, trained = streams(make, num_samples, batch), []
    for lists in zip(*(rank.steps() for rank in ranks), strict=True):
        assert all(rank.step == ranks[0].step for rank in ranks)
        assert tuple(sum(map(len, batches)) for batches in lists) == ranks[0].step.samples
        other = GlobalBatch(tuple(draw.sample(first[0], 3)), tuple(first[1]))
        what = draw.random()
        if what < 0.2:
            for rank in ranks:
                rank.repeat(other)
            assert ranks[0].state_dict()["position"] in (len(trained), 0)
            continue
        trained += samples_of(lists)
        if what < 0.6:
            for rank in ranks:
                rank.change(other)
        if len(trained) >= part * num_samples:
            break
    states = {json.dumps(rank.state_dict()) for rank in ranks}
    assert len(states) == 1
    state = json.loads(states.pop())
    later = streams(make, num_samples, GlobalBatch(after))
    for rank in later:
        rank.load_state_dict(state, batch_may_change=True)
    assert (state["epoch"], state["position"], state["is_over"]) == (
        0,
        len(trained),
        len(trained) == num_samples,
    )
    if len(trained) < num_samples:
        for lists in zip(*(rank.steps() for rank in later), strict=True):
            trained += samples_of(lists)
    assert trained == list(range(num_samples))
    lists = [next(rank.steps()) for rank in later]
    assert samples_of(lists)[0] == 1000


def test_a_source_with_state_is_not_read_again():
    """Up to two global batches of it; one without is read from the beginning. Nobody prepares others' samples."""
    for make, most in ((StatefulRows, 2 * 8), (Rows, 96)):
        prepared = []
        stream = GlobalStream(
            make(200), GlobalBatch((6, 2)), 1, prepare=lambda i, p=prepared: p.append(i) or i
        )
        loop = stream.steps()
        for _ in range(11):
            [batch] = next(loop)
        assert batch.tolist() == [86, 87]
        assert prepared == [i for i in range(88) if i % 8 >= 6]
        state = stream.state_dict()
        loop.close()
        assert stream.state_dict() == state
        assert state["position"] == 88
        later = GlobalStream(make(200), GlobalBatch((3, 1)), 0)
        later.load_state_dict(state, batch_may_change=True)
        [batch] = next(later.steps())
        assert batch.tolist() == [88, 89, 90]
        assert later._source.num_read <= most


def test_the_state_of_a_step_that_is_repeated():
    """Is before it, though more has been read by then."""
    stream = GlobalStream(StatefulRows(60), GlobalBatch((4, 2)), 0, collate=list)
    loop = stream.steps()
    for _ in range(3):
        next(loop)
    stream.repeat(GlobalBatch((5, 1)))
    state = stream.state_dict()
    assert (state["position"], state["source"]["position"]) == (12, 7)
    later = GlobalStream(StatefulRows(60), GlobalBatch((3,)), 0, collate=list)
    later.load_state_dict(state, batch_may_change=True)
    assert next(later.steps()) == [[12, 13, 14]]


@pytest.mark.processes
def test_from_a_loader_with_a_worker():
    """Which reads ahead in its own process; epochs follow each other, and a loop that was left is over."""
    loader = DataLoader(Rows(20), batch_size=None, num_workers=1)
    stream = GlobalStream(loader, GlobalBatch((3, 2)), 0, last="drop")
    assert [batch.tolist()[0] for [batch] in stream.steps()] == [0, 5, 10, 15]
    [batch] = next(stream.steps())
    assert torch.equal(batch, torch.tensor([1000, 1001, 1002]))
    stream.set_epoch(7)
    assert [batch.tolist()[0] for [batch] in stream.steps()] == [7000, 7005, 7010, 7015]
    assert stream.epoch == 8
    stream.set_epoch(8)
    assert next(stream.steps())[0].tolist()[0] == 8000


def test_refused():
    """What cannot be read twice, or not at all; what is too late."""
    stream = GlobalStream((i for i in range(4)), GlobalBatch((2, 2)), 0)
    assert len(list(stream.steps())) == 1
    with pytest.raises(ConfigurationError, match="gave no sample in epoch 1"):
        list(stream.steps())
    with pytest.raises(ConfigurationError, match="cannot be iterated over"):
        GlobalStream(5, GlobalBatch((2, 2)), 0)
    with pytest.raises(ConfigurationError, match="rank=2 has no part"):
        GlobalStream([1], GlobalBatch((2, 2)), 2)
    with pytest.raises(ConfigurationError, match="a state of nothing lacks 'epoch'"):
        stream.load_state_dict({})
    stream = GlobalStream(range(20), GlobalBatch((2, 2)), 0)
    loop = stream.steps()
    next(loop)
    with pytest.raises(ProtocolError, match="has fetched up to 4"):
        stream.change(GlobalBatch((1, 3)), position=0)
    loop.close()
    with pytest.raises(ProtocolError, match="no step to repeat"):
        stream.repeat(GlobalBatch((1, 3)))
    assert len(list(itertools.islice(stream.steps(), 2))) == 2
