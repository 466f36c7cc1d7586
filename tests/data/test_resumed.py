"""Whatever hands out batches, whenever it was saved, whoever goes on: every sample of every epoch exactly once."""

import importlib.util
import itertools
import json
import pickle
import random
import warnings
from collections import defaultdict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from paceline.data import GlobalBatch, GlobalShuffle, GlobalStream, TokenShuffle
from paceline.errors import ConfigurationError, ProtocolError

SIZE, NUM_EPOCHS = 6, 3
STYLES = ("epochs follow", "named from the loaded one on", "named from the saved one on")


# ---- sources of streams


class Rows(IterableDataset):
    """Numbers from 0 on, with the epoch that it was told."""

    def __init__(self, num_samples, _seed):
        self.num_samples, self.epoch = num_samples, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from ((self.epoch, i) for i in range(self.num_samples))


class Generator(Rows):
    """Keeps state, and is written as a plain generator, whose body runs with the first sample."""

    at = resumed = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.resumed = state["at"]

    def __iter__(self):
        self.at, self.resumed = self.resumed, 0
        while self.at < self.num_samples:
            self.at += 1
            yield self.epoch, self.at - 1


class Iterator(Generator):
    """Keeps state, and is its own iterator."""

    def __iter__(self):
        self.at, self.resumed = self.resumed, 0
        return self

    def __next__(self):
        if self.at == self.num_samples:
            raise StopIteration
        self.at += 1
        return self.epoch, self.at - 1


class LiveState(Rows):
    """Gives away its state itself, adopts what it is given, and goes on changing it."""

    def __init__(self, num_samples, _seed):
        super().__init__(num_samples, _seed)
        self.state, self.is_resumed = {"at": 0}, False

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state, self.is_resumed = state, True

    def __iter__(self):
        if not self.is_resumed:
            self.state["at"] = 0
        self.is_resumed = False
        while self.state["at"] < self.num_samples:
            self.state["at"] += 1
            yield self.epoch, self.state["at"] - 1


class OwnOrder(IterableDataset):
    """Draws an order whenever it begins, another one in each process; its state holds it. It knows no epochs."""

    def __init__(self, num_samples, seed):
        self.draw, self.num_samples, self.left, self.resumed = random.Random(seed), num_samples, [], None

    def state_dict(self):
        return {"left": list(self.left)}

    def load_state_dict(self, state):
        self.resumed = state["left"]

    def __iter__(self):
        drawn = self.draw.sample(range(self.num_samples), self.num_samples)
        self.left, self.resumed = drawn if self.resumed is None else self.resumed, None
        while self.left:
            yield None, self.left.pop()


def stateful_loader(*args, **kwargs):
    """Torchdata's, where that is installed; importing it warns of what it uses of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchdata = pytest.importorskip("torchdata.stateful_dataloader")
        return torchdata.StatefulDataLoader(*args, batch_size=None, **kwargs)


def torchdatas(num_samples, seed):
    return stateful_loader(Generator(num_samples, seed))


def torchdatas_shuffled(num_samples, seed):
    order = torch.Generator().manual_seed(seed)
    return stateful_loader([(None, i) for i in range(num_samples)], shuffle=True, generator=order)


# ---- ranks in one process


class Plain:
    """`GlobalShuffle` in a loop over a loader."""

    can_repeat = False

    @staticmethod
    def make(num_samples, batch, rank, _seed):
        return GlobalShuffle(num_samples, batch, rank)

    @staticmethod
    def loop(sampler):
        loader = DataLoader(Identity(), batch_sampler=sampler, collate_fn=list)
        return ([[(None, i) for i in batch]] for batch in loader)


class Identity:
    """A data set of its own indices."""

    def __getitem__(self, index):
        return index

    def __len__(self):
        return 1000


class Steps(Plain):
    """`GlobalShuffle` in a loop over steps."""

    can_repeat = True

    @staticmethod
    def loop(sampler):
        loader = DataLoader(Identity(), batch_sampler=sampler, collate_fn=list)
        steps = sampler.steps(loader)
        try:
            for batches in steps:
                yield [[(None, i) for i in batch] for batch in batches]
        finally:
            steps.close()


class Tokens(Steps):
    """`TokenShuffle`, with sequences that are all of one length, so that a step has as many as elsewhere."""

    @staticmethod
    def make(num_samples, batch, rank, _seed):
        tokens = GlobalBatch(tuple(10 * size for size in batch.local))
        return TokenShuffle([10] * num_samples, tokens, rank)


class Stream:
    """`GlobalStream` of a source."""

    can_repeat = True

    def __init__(self, source):
        self.source = source

    def make(self, num_samples, batch, rank, seed):
        return GlobalStream(self.source(num_samples, seed), batch, rank, collate=list)

    @staticmethod
    def loop(sampler):
        return sampler.steps()


KINDS = {
    "a loop over a loader": Plain(),
    "steps": Steps(),
    "tokens": Tokens(),
    "a stream of a list": Stream(lambda num_samples, _seed: [(None, i) for i in range(num_samples)]),
    "a stream of a data set": Stream(Rows),
    "a stream of a generator with state": Stream(Generator),
    "a stream of an iterator with state": Stream(Iterator),
    "a stream of a source that gives away its state": Stream(LiveState),
    "a stream of a source with an order of its own": Stream(OwnOrder),
}
if importlib.util.find_spec("torchdata") is not None:
    KINDS["a stream of torchdata's loader"] = Stream(torchdatas)
    KINDS["a stream of torchdata's loader that shuffles"] = Stream(torchdatas_shuffled)


class Job:
    """All ranks of one run; what was trained is noted by epoch, and kept from run to run."""

    def __init__(self, kind, num_samples, batch, trained=None, names_epochs=False, seed=0):
        self.kind, self.num_samples, self.names_epochs, self.seed = kind, num_samples, names_epochs, seed
        self.ranks = [kind.make(num_samples, batch, rank, seed) for rank in range(batch.num_ranks)]
        self.trained = defaultdict(list) if trained is None else trained
        self.loops = None

    def begin(self, epoch=None):
        """A loop of the next epoch, or the one named."""
        if self.names_epochs and epoch is not None:
            self.set_epoch(epoch)
        self.loops = [self.kind.loop(rank) for rank in self.ranks]

    def set_epoch(self, epoch):
        for rank in self.ranks:
            rank.set_epoch(epoch)

    def step(self, is_trained=True):
        """One step of all ranks; False if the epoch is over."""
        lists = [next(loop, None) for loop in self.loops]
        if lists[0] is None:
            assert lists == [None] * len(lists)
            return False
        epoch = self.ranks[0].epoch
        samples = [sample for batches in lists for batch in batches for sample in batch]
        assert {said for said, _ in samples} <= {None, epoch}
        if is_trained:
            self.trained[epoch] += [i for _, i in samples]
        return True

    def leave(self):
        for loop in self.loops:
            loop.close()

    def finish(self):
        while self.step():
            pass

    def state(self):
        """The same on every rank, and as a checkpoint has it."""
        assert len({self.said(rank) for rank in range(len(self.ranks))}) == 1
        return pickle.loads(pickle.dumps(self.ranks[0].state_dict()))

    def said(self, rank=0):
        """The state in one line, to be compared."""
        return json.dumps(self.ranks[rank].state_dict(), default=torch.Tensor.tolist)

    def goes_on(self, state, batch, style):
        """Another run from there, in a new process, whose source is another object."""
        later = Job(self.kind, self.num_samples, batch, self.trained, style != STYLES[0], self.seed + 1)
        for rank in later.ranks:
            rank.load_state_dict(state)
        return later

    def train_to_the_end(self, saved_epoch, style):
        begin = saved_epoch if style == STYLES[2] else self.ranks[0].epoch
        for epoch in range(begin, NUM_EPOCHS):
            self.begin(epoch)
            self.finish()

    def check(self):
        check(self.trained, self.num_samples)


def check(trained, num_samples):
    """Every sample once in each epoch, and no further epoch."""
    everything = list(range(num_samples))
    assert sorted(trained) == list(range(NUM_EPOCHS))
    assert [sorted(trained[epoch]) for epoch in range(NUM_EPOCHS)] == [everything] * NUM_EPOCHS


# ---- moments: what a run does before its state is taken; each returns the state


def before_the_first_step(job, epoch):
    if epoch or job.names_epochs:
        job.set_epoch(epoch)
    return job.state()


def after_steps(count):
    def moment(job, epoch):
        job.begin(epoch)
        for _ in range(count):
            assert job.step()
        return job.state()

    return moment


def between_epochs(job, epoch):
    job.begin(epoch)
    job.finish()
    return job.state()


def after_a_loop_that_was_left(job, epoch):
    after_steps(2)(job, epoch)
    said = job.said()
    job.leave()
    assert job.said() == said
    return job.state()


def in_a_step_that_is_repeated(job, epoch):
    after_steps(1)(job, epoch)
    job.step(is_trained=False)
    for rank in job.ranks:
        rank.repeat(rank.batch)
    return job.state()


def of_a_run_that_only_loaded(before):
    """Saved again before it has trained anything."""

    def moment(job, epoch):
        state = before(job, epoch)
        return job.goes_on(state, GlobalBatch.of(SIZE, 2), STYLES[0]).state()

    return moment


def after_going_back_within_the_loop(job, epoch):
    """A checkpoint is loaded where the loop is left, as after a loss that is no number."""
    state = after_steps(1)(job, epoch)
    job.step(is_trained=False)
    for rank in job.ranks:
        rank.load_state_dict(state)
    job.leave()
    return job.state()


MOMENTS = {
    "before the first step": before_the_first_step,
    "the first step": after_steps(1),
    "the second step": after_steps(2),
    "the last step": after_steps(4),
    "between epochs": between_epochs,
    "a loop that was left": after_a_loop_that_was_left,
    "a repeated step": in_a_step_that_is_repeated,
    "loaded in mid-epoch and saved again": of_a_run_that_only_loaded(after_steps(2)),
    "loaded at an end and saved again": of_a_run_that_only_loaded(between_epochs),
    "went back within the loop": after_going_back_within_the_loop,
}


@pytest.mark.parametrize(
    ("kind", "moment"),
    [(kind, at) for kind in KINDS for at in MOMENTS if KINDS[kind].can_repeat or at != "a repeated step"],
)
def test_every_sample_of_every_epoch_once(kind, moment):
    """By fewer, as many and more ranks, in any way to write the loop; the last step is a whole one, or is not."""
    cases = itertools.product((0, 1), (1, 2, 3), STYLES, (4 * SIZE - 1, 4 * SIZE))
    for epoch, num_ranks, style, num_samples in cases:
        job = Job(KINDS[kind], num_samples, GlobalBatch.of(SIZE, 2), names_epochs=style != STYLES[0])
        for before in range(epoch):
            job.begin(before)
            job.finish()
        state = MOMENTS[moment](job, epoch)
        later = job.goes_on(state, GlobalBatch.of(SIZE, num_ranks), style)
        later.train_to_the_end(epoch, style)
        later.check()


chains = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),  # the ranks' samples of a step
        st.integers(0, 9),  # steps of this run
        st.sampled_from(["within the loop", "after leaving it", "saved again"]),
        st.booleans(),  # whether it names its epochs
    ),
    max_size=5,
)


@pytest.mark.parametrize("kind", [name for name in KINDS if name not in ("a loop over a loader", "tokens")])
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(chain=chains, num_samples=st.integers(4, 30))
def test_after_any_number_of_restarts(kind, chain, num_samples):
    """With batches of any size, also ranks without samples, each run being cut off anywhere, also before its start."""
    job = Job(KINDS[kind], num_samples, GlobalBatch((3, 2)))
    for local, num_steps, where, names_epochs in [*chain, ((4,), 1000, "after leaving it", False)]:
        epoch, left = job.ranks[0].epoch, num_steps
        while left and epoch < NUM_EPOCHS:
            job.begin(epoch)
            while left and job.step():
                left -= 1
            epoch += left > 0
        if where == "after leaving it" and job.loops is not None:
            job.leave()
        state = job.state()
        if where == "saved again":
            other = Job(job.kind, num_samples, GlobalBatch((1,)), seed=job.seed + 1)
            other.ranks[0].load_state_dict(state, batch_may_change=True)
            state = {**other.state(), "batch": state["batch"]}
        job = Job(job.kind, num_samples, GlobalBatch(tuple(local)), job.trained, names_epochs, job.seed + 1)
        for rank in job.ranks:
            rank.load_state_dict(state, batch_may_change=True)
    job.check()


@pytest.mark.processes
@pytest.mark.parametrize("is_shuffled", [True, False], ids=["shuffle", "stream"])
def test_with_workers_that_persist(is_shuffled):
    """Which have read ahead when the state is taken; resumed twice, by three ranks and by one."""

    def make(num_ranks, rank):
        batch = GlobalBatch.of(SIZE, num_ranks)
        data = range(40) if is_shuffled else Rows(40, 0)
        kwargs = {"num_workers": 1, "multiprocessing_context": "fork"}
        if is_shuffled:
            shuffle = GlobalShuffle(40, batch, rank)
            loader = DataLoader(
                data, batch_sampler=shuffle, collate_fn=list, persistent_workers=True, **kwargs
            )
            return shuffle, lambda: shuffle.steps(loader)
        stream = GlobalStream(DataLoader(data, batch_size=None, **kwargs), batch, rank, collate=list)
        return stream, stream.steps

    trained, state = defaultdict(list), None
    for num_ranks, num_steps in ((2, 9), (3, 6), (1, 100)):
        ranks = [make(num_ranks, rank) for rank in range(num_ranks)]
        for sampler, _ in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        left = num_steps
        while left and ranks[0][0].epoch < NUM_EPOCHS:
            for lists in zip(*(begin() for _, begin in ranks), strict=True):
                epoch = ranks[0][0].epoch
                samples = [sample for batches in lists for batch in batches for sample in batch]
                trained[epoch] += samples if is_shuffled else [i for told, i in samples if told == epoch]
                left -= 1
                state = ranks[0][0].state_dict()
                if not left:
                    break
    check(trained, 40)


def test_torchdatas_loader_is_a_source():
    """With a worker and a snapshot now and then; it goes on where it was, without reading all of it again."""
    stream = GlobalStream(
        stateful_loader(Generator(40, 0), num_workers=1), GlobalBatch((4,)), 0, collate=list
    )
    for steps in (stream.steps(), stream.steps()):
        *_, last = itertools.islice(steps, 3)
        state = pickle.loads(pickle.dumps(stream.state_dict()))
        steps.close()
    assert last == [[[1, i] for i in range(8, 12)]]
    later = GlobalStream(stateful_loader(Generator(40, 0), num_workers=1), GlobalBatch((2,)), 0, collate=list)
    later.load_state_dict(state, batch_may_change=True)
    steps = later.steps()
    assert next(steps) == [[[1, 12], [1, 13]]]
    steps.close()


@pytest.mark.parametrize("kind", ["steps", "a stream of a data set"])
@pytest.mark.parametrize("names_epochs", [True, False])
def test_what_is_left_makes_no_larger_batch(kind, names_epochs):
    """With last="drop": the next loop has nothing if it is of that epoch by name; else it is the next epoch."""
    job = Job(KINDS[kind], 10, GlobalBatch((4,)), names_epochs=names_epochs)
    job.ranks[0].last = "drop"
    after_steps(1)(job, 0)
    state = job.state()
    later = Job(KINDS[kind], 10, GlobalBatch((7,)), names_epochs=names_epochs)
    later.ranks[0].last = "drop"
    later.ranks[0].load_state_dict(state, batch_may_change=True)
    for epoch in (0, 1) if names_epochs else (1,):
        later.begin(epoch)
        later.finish()
    assert {epoch: len(set(samples)) for epoch, samples in later.trained.items()} == {1: 7}


# ---- what is refused


@pytest.mark.parametrize("kind", KINDS)
def test_another_size_of_the_batch_is_refused_unless_asked_for(kind):
    """With both numbers, and how to keep the size; nothing is changed. Shares may differ as they like."""
    job = Job(KINDS[kind], 30, GlobalBatch((2, 4)))
    job.begin()
    job.step()
    state = job.state()
    other = Job(KINDS[kind], 30, GlobalBatch((3, 3, 3)))
    before = other.said()
    factor = 10 if kind == "tokens" else 1
    with pytest.raises(
        ConfigurationError, match=rf"steps of {6 * factor} .*GlobalBatch.of\({6 * factor}, 3\)"
    ):
        other.ranks[0].load_state_dict(state)
    assert other.said() == before
    if kind == "tokens":
        with pytest.raises(ConfigurationError, match="the batches would be"):
            other.ranks[0].load_state_dict(state, batch_may_change=True)
        return
    for rank in other.ranks:
        rank.load_state_dict(state, batch_may_change=True)
    other.train_to_the_end(0, STYLES[1])
    assert sorted(job.trained[0] + other.trained[0]) == list(range(30))
    job.goes_on(state, GlobalBatch((1, 0, 5)), STYLES[0])


def test_what_a_size_is_divided_into():
    """Whole samples that add up, whatever the number of ranks."""
    assert GlobalBatch.of(64, 3) == GlobalBatch((22, 21, 21))
    assert GlobalBatch.of(64, 3, accumulation=2) == GlobalBatch((11, 11, 10), 2)
    assert GlobalBatch.of(2, 3) == GlobalBatch((1, 1, 0))
    for args in ((0, 2), (64, 0), (64, 2, 0), (64, 2, 3)):
        with pytest.raises(ConfigurationError, match="cannot be divided so"):
            GlobalBatch.of(*args)


@pytest.mark.parametrize(
    ("source", "end"), [(list(range(9)), 9), (list(range(12)), 12), (Generator(9, 0), 10)]
)
def test_a_source_that_ends_before_its_position_is_refused(source, end):
    """It would go on with the next epoch. Said by rank, with numbers and what to do; the position stays."""
    stream = GlobalStream(source, GlobalBatch((1, 5)), 1, collate=list)
    place = None if isinstance(source, list) else {"position": 10, "state": {"at": 9}}
    state = {"epoch": 1, "position": 12, "is_over": False, "source": place, "batch": 6}
    stream.load_state_dict(state)
    with pytest.raises(
        ConfigurationError,
        match=rf"rank 1: .* ended after {end} samples of epoch 1, .* after 12, .*set_epoch\(2\)",
    ):
        next(stream.steps())
    assert stream.state_dict() == state
    stream.set_epoch(2)
    assert next(stream.steps())


def test_states_of_other_data_are_refused():
    """Of another class, of other lengths, of a source with state where this one keeps none."""
    batch = GlobalBatch((30,))
    tokens, shuffle = TokenShuffle([10] * 40, batch, 0), GlobalShuffle(40, batch, 0)
    with pytest.raises(ConfigurationError, match="is of a TokenShuffle, this is a GlobalShuffle"):
        shuffle.load_state_dict(tokens.state_dict())
    with pytest.raises(ConfigurationError, match="lacks 'tokens'"):
        tokens.load_state_dict(shuffle.state_dict())
    with pytest.raises(ConfigurationError, match="other lengths="):
        TokenShuffle([10] * 39 + [9], batch, 0).load_state_dict(tokens.state_dict())
    with pytest.raises(ConfigurationError, match="lacks 'is_over', 'source'"):
        GlobalStream(range(40), batch, 0).load_state_dict(shuffle.state_dict())
    stateful = GlobalStream(Generator(40, 0), GlobalBatch((4,)), 0, collate=list)
    next(loop := stateful.steps())
    with pytest.raises(ConfigurationError, match="this one, range, has none"):
        GlobalStream(range(40), GlobalBatch((4,)), 0).load_state_dict(stateful.state_dict())
    loop.close()


@pytest.mark.parametrize("kind", [name for name, each in KINDS.items() if each.can_repeat])
def test_a_loop_that_was_ended_does_not_go_on(kind):
    """After another loop, `set_epoch` or `load_state_dict` a forgotten one says so, and its end changes nothing."""
    job = Job(KINDS[kind], 30, GlobalBatch.of(SIZE, 1))
    [sampler] = job.ranks
    enders = (
        lambda: next(job.kind.loop(sampler)),
        lambda: sampler.set_epoch(1),
        lambda: sampler.load_state_dict(state),
    )
    for end in enders:
        job.begin()
        job.step()
        state = job.state()
        end()
        after = job.said()
        with pytest.raises(
            ProtocolError, match="rank 0 asked a loop over steps for more after it had been ended"
        ):
            job.step()
        assert job.said() == after


def test_epochs_are_counted_alike():
    """A loop that asks for the epoch trains as many, resumed or not."""
    for make in (lambda: KINDS["steps"], lambda: KINDS["a stream of a data set"]):
        job = Job(make(), 12, GlobalBatch.of(SIZE, 1))
        while job.ranks[0].epoch < NUM_EPOCHS:
            job.begin()
            job.finish()
        job.check()
