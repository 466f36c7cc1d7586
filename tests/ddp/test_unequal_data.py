"""Tokens and streams under shares that change: one process's gradients, every sample once, the same learning rate."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from harness.models import Mlp, digest
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.data import Balance, GlobalBatch, GlobalStream, TokenShuffle
from paceline_recipes import Curve, LargeMinibatch

NUM_SAMPLES, BUDGET, IGNORED = 120, 120, -1
SHARES = [(64, 32, 16, 8), (30, 30, 30, 30), (0, 70, 0, 50), (120, 0, 0, 0), (8, 8, 8, 96)]


class Sequences(Dataset):
    """Rows of 8 numbers a token, and targets, of which every fifth does not count; sample i is the same everywhere."""

    def __init__(self):
        source = torch.Generator().manual_seed(3)
        self.lengths = torch.randint(1, 21, (NUM_SAMPLES,), generator=source).tolist()
        self.rows = [torch.randn(n, 8, generator=source, dtype=torch.float64) for n in self.lengths]

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, i):
        targets = torch.arange(self.lengths[i]) + i
        return self.rows[i], torch.where(targets % 5 == 0, IGNORED, targets)


def padded(samples):
    """A batch whose sequences are as long as the longest."""
    rows = torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence(
        [y for _, y in samples], batch_first=True, padding_value=IGNORED
    )
    return rows, targets


def mean_over_tokens(output, targets):
    counts = targets != IGNORED
    return (output.square().sum(-1) * (1 + targets))[counts].sum() / counts.sum()


def every_token(output, lengths):
    """A mean over the tokens of sequences, padding left out: what the sampler's own weights are for."""
    counts = torch.arange(output.shape[1]) < lengths[:, None]
    return output.square().sum(-1)[counts].sum() / counts.sum()


def make():
    torch.manual_seed(0)
    return Mlp().double()


def apart(model, alone):
    """The largest difference of a gradient from one process's, relative."""
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(((p.grad - q.grad).norm() / q.grad.norm()).item() for p, q in pairs)


def tokens(rank, _num_ranks):
    """Each step in other shares of its tokens; weighed by what counts, and by the sampler's own lengths."""
    data = Sequences()
    shuffle = TokenShuffle(data.lengths, GlobalBatch(SHARES[0]))
    loader = DataLoader(
        data,
        batch_sampler=shuffle,
        collate_fn=lambda samples: (*padded(samples), [len(x) for x, _ in samples]),
    )
    model = DistributedDataParallel(make(), batch_sampler=shuffle)
    order = shuffle.order(0).tolist()
    worst, num_seen, bits = {"weight": 0.0, "lengths": 0.0, "constant": 9.0}, 0, []
    for place, batches in enumerate(shuffle.steps(loader)):
        step = shuffle.step
        rows = order[step.position : step.end]
        x, y = padded([data[i] for i in rows])
        lengths = torch.tensor([data.lengths[i] for i in rows])
        for way, weight in (
            ("weight", lambda batch: (batch[1] != IGNORED).sum()),
            ("lengths", None),
            ("constant", lambda _: 1),
        ):
            model.zero_grad()
            with model.accumulate(batches, weight=weight) as micro_batches:
                for own_x, own_y, own_lengths in micro_batches:
                    if way == "lengths":
                        every_token(model(own_x), torch.tensor(own_lengths)).backward()
                    else:
                        mean_over_tokens(model(own_x), own_y).backward()
            alone = make()
            (every_token(alone(x), lengths) if way == "lengths" else mean_over_tokens(alone(x), y)).backward()
            choose = min if way == "constant" else max
            if way != "constant" or sum(map(bool, step.samples)) > 1:
                worst[way] = choose(worst[way], apart(model, alone))
            bits.append(digest(p.grad for p in model.parameters()))
        num_seen += len(rows)
        shuffle.change(GlobalBatch(SHARES[(place + 1) % len(SHARES)]))
    return worst, num_seen, bits


class Rows:
    """A stream of samples that depend on their place; it keeps state as torchdata's do."""

    def __init__(self, num_samples=90):
        self.num_samples, self.at, self.begins = num_samples, 0, 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begins = state["at"]

    def __iter__(self):
        self.at, self.begins = self.begins, 0
        while self.at < self.num_samples:
            self.at += 1
            yield row(self.at - 1)


def row(i):
    source = torch.Generator().manual_seed(i)
    return torch.randn(8, generator=source, dtype=torch.float64), torch.tensor(i)


def weighed(output, index):
    return (output.square().sum(1) * (1 + index)).mean()


def stream(rank, _num_ranks):
    """Trained with shares that change, to the middle; then by a new process' objects, with others, to the end."""
    shares = [(8, 4, 2, 1), (0, 7, 0, 8), (15, 0, 0, 0), (5, 4, 3, 3)]
    state, seen, worst = None, [], 0.0
    for begins in (0, 1):
        source = GlobalStream(Rows(), GlobalBatch(shares[begins]))
        if state is not None:
            source.load_state_dict(state)
        model = DistributedDataParallel(make(), batch_sampler=source)
        for place, batches in enumerate(source.steps()):
            step = source.step
            model.zero_grad()
            with model.accumulate(batches) as micro_batches:
                for x, index in micro_batches:
                    seen += index.tolist()
                    weighed(model(x), index).backward()
            alone = make()
            x, index = map(torch.stack, zip(*map(row, range(step.position, step.end)), strict=True))
            weighed(alone(x), index).backward()
            worst = max(worst, apart(model, alone))
            source.change(GlobalBatch(shares[(place + 2) % 4]))
            if begins == 0 and place == 2:
                state = source.state_dict()
                break
    return worst, seen, state


class Slow(torch.nn.Module):
    """Has no memory for more than `most` samples."""

    def __init__(self, most):
        super().__init__()
        self.body, self.most = make(), most

    def forward(self, x):
        if len(x) > self.most:
            raise MemoryError(f"{len(x)} samples")
        return self.body(x)


def rates(rank, num_ranks):
    """Of a recipe with a fixed world, while shares move: a rank runs out of memory twice."""
    source = GlobalStream(Rows(128), GlobalBatch((8,) * num_ranks))
    model = DistributedDataParallel(
        Slow(4 if rank == 2 else 99), batch_sampler=source, balance=Balance(gain_ratio=0.9)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    recipe = LargeMinibatch(optimizer, 8, source.batch, Curve(total=9), fixed_world=True)
    found, seen, num_repeats = [], [], 0
    for batches in source.steps():
        optimizer.zero_grad()
        with model.accumulate(batches) as micro_batches:
            for x, index in micro_batches:
                weighed(model(x), index).backward()
        if micro_batches.repeats:
            num_repeats += 1
            recipe.update(source.batch)
            continue
        found.append(optimizer.param_groups[0]["lr"])
        seen += [i for _, index in batches for i in index.tolist()]
        optimizer.step()
        recipe.step()
    return found, seen, num_repeats, recipe.batch, recipe.samples


def all_of_it(rank, num_ranks):
    """One launch."""
    return {each.__name__: each(rank, num_ranks) for each in (tokens, stream, rates)}


@pytest.fixture(scope="module")
def outcomes():
    return pool(4).run(all_of_it, deadline_s=180)


@pytest.mark.processes
def test_the_mean_over_tokens_is_exact(outcomes):
    """To 1e-12, whichever ranks have which tokens; a weight that does not know them is wrong in every step."""
    for worst, num_seen, bits in (outcome["tokens"] for outcome in outcomes):
        assert num_seen == NUM_SAMPLES
        assert max(worst["weight"], worst["lengths"]) < 1e-12
        assert worst["constant"] > 1e-3
        assert bits == outcomes[0]["tokens"][2]


@pytest.mark.processes
def test_a_stream_is_trained_once(outcomes):
    """Exact to 1e-12 in every step; resumed at the sample that follows, without reading the rest again."""
    found = [outcome["stream"] for outcome in outcomes]
    assert max(worst for worst, _, _ in found) < 1e-12
    assert sorted(itertools.chain.from_iterable(seen for _, seen, _ in found)) == list(range(90))
    assert all(state == found[0][2] for _, _, state in found)
    assert found[0][2]["position"] == 45
    assert found[0][2]["source"]["position"] >= 30


@pytest.mark.processes
def test_moving_shares_does_not_change_the_rate(outcomes):
    """A recipe that refuses other batches accepts other shares, and its rate stays; nobody lost a sample to memory."""
    for rates, _, num_repeats, batch, samples in (outcome["rates"] for outcome in outcomes):
        assert num_repeats == 2
        assert rates == [4e-5, 4e-5, 4e-5, 4e-5]
        assert (batch.size, samples) == (32, 128)
        assert batch.local[2] <= 4
    seen = [outcome["rates"][1] for outcome in outcomes]
    assert sorted(itertools.chain.from_iterable(seen)) == list(range(128))
