"""Unequal shares: gradients of one process on the whole batch, whatever each rank trains."""

import warnings

import pytest
import torch

from harness.models import digest
from harness.ranks import pool, seeded
from harness.unequal_oracle import (
    NUM_SAMPLES,
    dataset,
    difference,
    gradient_of,
    make,
    make_pair,
    mean_loss,
    train_window,
)
from paceline import DistributedDataParallel
from paceline.data import GlobalBatch
from paceline_recipes import GradientNoiseScale

SHARES = [(8, 4, 2, 1), (5, 4, 3, 3), (0, 7, 0, 8), (15, 0, 0, 0), (1, 1, 1, 12), (8, 4, 2, 1)]


def shares_every_step(rank, _num_ranks):
    """Each step has other shares, by windows; also none for some, and all for one."""
    model, shuffle, loader = make_pair(SHARES[0])
    order = shuffle.order(0).tolist()
    worst, seen = 0.0, []
    for place, batches in enumerate(shuffle.steps(loader)):
        assert shuffle.step.samples == SHARES[place]
        seen += [i for _, index in batches for i in index.tolist()]
        train_window(model, batches)
        worst = max(worst, difference(model, order[15 * place : 15 * (place + 1)]))
        if place + 1 < len(SHARES):
            shuffle.change(GlobalBatch(SHARES[place + 1]))
    return worst, seen, digest(p.grad for p in model.parameters())


def own_micro_steps(rank, _num_ranks):
    """Micro-batches of one size, of which ranks run different numbers."""
    model, shuffle, loader = make_pair((3, 3, 3, 2), accumulation=(3, 1, 1, 1))
    order, position, worst = shuffle.order(0).tolist(), 0, 0.0
    for batches in shuffle.steps(loader):
        assert [len(x) for x, _ in batches] == [size for _, size in shuffle.step.parts(rank)]
        train_window(model, batches)
        worst = max(worst, difference(model, order[position : shuffle.step.end]))
        position = shuffle.step.end
    assert position == NUM_SAMPLES
    return worst


def plain_loops(rank, num_ranks):
    """Without a context: weighed by the sampler, by a function of the forward's arguments, by HetSeq's constant."""
    shares = SHARES[0]
    model, shuffle, loader = make_pair(shares)
    rows = shuffle.order(0)[:15].tolist()
    for [(x, index)] in shuffle.steps(loader):
        mean_loss(model(x), index).backward()
        break
    found = {"sampler": difference(model, rows)}

    mine = rows[sum(shares[:rank]) :][: shares[rank]]
    x, index = dataset()[mine]
    by_length = DistributedDataParallel(make(), weight=len)
    by_length(dataset()[: 3 + rank][0])  # a batch that all ranks skip
    mean_loss(by_length(x), index).backward()
    found["function"] = difference(by_length, rows)

    # Rank 0 has a second batch, and trains it alone.
    joined = DistributedDataParallel(make(), weight=len)
    with joined.join():
        for _ in range(1 + (rank == 0)):
            joined.zero_grad()
            mean_loss(joined(x), index).backward()
            if rank == 0:
                found["joined"] = difference(joined, rows[:8])

    constant = DistributedDataParallel(
        make(), weight=lambda _: 128
    )  # the length of a sequence, whatever the batch
    mean_loss(constant(x), index).backward()
    found["HetSeq"] = difference(constant, rows)

    # A mean over nothing is no number; it counts nothing.
    nothing = DistributedDataParallel(make(), weight=len)
    mean_loss(nothing(x[: 0 if rank == 1 else None]), index[: 0 if rank == 1 else None]).backward()
    found["nothing"] = difference(nothing, rows[:8] + rows[12:])

    told = []
    forgotten = DistributedDataParallel(make())
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mean_loss(forgotten(x), index).backward()
        told.append([str(warning.message) for warning in caught])
    found["forgotten"] = difference(forgotten, rows)
    return found, told


def running_statistics(rank, num_ranks):
    """Batch normalisation while rank 0 has nothing: its means after each step, and those of one process."""
    norm = torch.nn.BatchNorm1d(8).double()
    model = DistributedDataParallel(torch.nn.Sequential(norm, make()))
    alone = torch.nn.BatchNorm1d(8).double()
    found = []
    for step, shares in enumerate([(0, 5, 6, 4), (0, 5, 6, 4), (6, 5, 0, 4), (0, 0, 8, 7)]):
        rows = dataset()[15 * step : 15 * (step + 1)][0].split(shares)
        model.zero_grad()
        with model.accumulate([rows[rank]] if len(rows[rank]) else [], weight=len) as window:
            for x in window:
                model(x).square().mean().backward()
        alone(next(part for part in rows if len(part)))
        found.append((norm.running_mean.tolist(), alone.running_mean.tolist()))
    model.zero_grad()
    x, kept = dataset()[60:70][0], norm.running_mean.clone()
    model(x[rank:]).square().mean().backward()  # no window: rank 0's again
    return found, (norm.running_mean - 0.9 * kept - 0.1 * x.mean(0)).abs().max().item()


def other_reductions(rank, num_ranks):
    """What shares mean to Adasum, to a codec with error feedback, to the noise scale."""
    shares = (8, 0, 7, 0)
    found = {}
    # Adasum: ranks without samples are not there; where gradients agree, it is the mean.
    model = DistributedDataParallel(make(), reduction="adasum")
    rows = dataset()[0][0].expand(shares[rank], -1)
    train_window(
        model, [(rows, torch.zeros(len(rows)))] if len(rows) else [], weight=lambda batch: len(batch[0])
    )
    alone = make()
    mean_loss(alone(dataset()[0][0][None]), torch.zeros(1)).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    found["adasum"] = max(((p.grad - q.grad).norm() / q.grad.norm()).item() for p, q in pairs)

    # Orthogonal gradients are added, each as often as its share of the ranks that have any: 16/15 and 14/15.
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False).double(), reduction="adasum")
    rows = torch.eye(2, dtype=torch.float64)[[1 if rank else 0] * shares[rank]]
    with model.accumulate([rows] if len(rows) else [], weight=len) as window:
        for x in window:
            model(x).mean().backward()
    found["orthogonal"] = (model.module.weight.grad * 15).flatten().tolist()

    # Error feedback: what is lost in one step is sent later, in the same units, though shares move.
    model = DistributedDataParallel(make(), compression="onebit")
    rows, num_steps, total = list(range(15)), 80, 0.0
    draw = seeded("shares")
    for _ in range(num_steps):
        cuts = sorted(draw.randint(0, 15) for _ in range(3))
        shares = tuple(b - a for a, b in zip((0, *cuts), (*cuts, 15), strict=True))
        mine = rows[sum(shares[:rank]) :][: shares[rank]]
        model.zero_grad()
        with model.accumulate(
            [dataset()[mine]] if mine else [], weight=lambda batch: len(batch[0])
        ) as window:
            for x, index in window:
                mean_loss(model(x), index).backward()
        total = total + torch.cat([p.grad.flatten() for p in model.parameters()])
    flat = torch.cat([g.flatten() for g in gradient_of(rows)])
    found["onebit"] = ((total / num_steps - flat).norm() / flat.norm()).item()
    return found


def noise_of_changing_shares(rank, num_ranks):
    """Noise of known variance around a known gradient, under shares that are others in every step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2000, 1, bias=False).double()
    noise = GradientNoiseScale(memory_steps=1e9)
    wrapped = DistributedDataParallel(model, reduction=noise)
    draw, source = seeded("noise"), torch.Generator().manual_seed(rank)
    for _ in range(40):
        cuts = sorted(draw.randint(0, 16) for _ in range(num_ranks - 1))
        size = [b - a for a, b in zip((0, *cuts), (*cuts, 16), strict=True)][rank]
        # The gradient of one sample's loss is its row: mean 1, variance 4.
        rows = 1 + 2 * torch.randn(size, 2000, generator=source, dtype=torch.float64)
        wrapped.zero_grad()
        with wrapped.accumulate([rows] if size else [], weight=len) as window:
            for x in window:
                wrapped(x).mean().backward()
    return noise.noise_over_signal * 16


def all_of_it(rank, num_ranks):
    """One launch."""
    return {
        each.__name__: each(rank, num_ranks)
        for each in (
            shares_every_step,
            own_micro_steps,
            plain_loops,
            running_statistics,
            other_reductions,
            noise_of_changing_shares,
        )
    }


@pytest.fixture(scope="module")
def outcomes():
    return pool(4).run(all_of_it, deadline_s=180)


@pytest.mark.processes
def test_shares_that_change_every_step(outcomes):
    """8/4/2/1, nothing for some, everything for one: exact to 1e-12, and every sample once."""
    steps = [outcome["shares_every_step"] for outcome in outcomes]
    assert max(worst for worst, _, _ in steps) < 1e-12
    assert sorted(sample for _, seen, _ in steps for sample in seen) == list(range(NUM_SAMPLES))
    assert len({gradients for _, _, gradients in steps}) == 1


@pytest.mark.processes
def test_micro_steps_of_each_rank(outcomes):
    """As exact, up to the end of the epoch, which is no whole step."""
    assert max(outcome["own_micro_steps"] for outcome in outcomes) < 1e-12


@pytest.mark.processes
def test_plain_loops(outcomes):
    """One line makes them exact, also with a batch that counts nothing; without it ranks of other sizes are told once.

    HetSeq's weight, which does not know the batch, is the mutant: it is as wrong as no weight.
    """
    for rank, outcome in enumerate(outcomes):
        found, told = outcome["plain_loops"]
        assert max(found[way] for way in ("sampler", "function", "nothing")) < 1e-12
        assert found.get("joined", 0.0) < 1e-12
        assert min(found[way] for way in ("HetSeq", "forgotten")) > 0.05
        assert len(told[0]) == (rank > 0)
        assert not told[1]
        if rank:
            assert f"this rank's batch has {SHARES[0][rank]} samples, rank 0's has 8" in told[0][0]


@pytest.mark.processes
def test_running_statistics_of_a_rank_that_trains(outcomes):
    """They are those of the first rank that has samples: rank 0's would stand still while it has none."""
    for outcome in outcomes:
        steps, plain = outcome["running_statistics"]
        assert steps == outcomes[0]["running_statistics"][0]
        for mine, alone in steps:
            assert mine == pytest.approx(alone, abs=1e-12)
        assert plain < 1e-12


@pytest.mark.processes
def test_what_shares_mean_to_other_reductions(outcomes):
    """As the guide says."""
    for outcome in outcomes:
        found = outcome["other_reductions"]
        assert found["adasum"] < 1e-12
        assert found["orthogonal"] == pytest.approx([16, 14])
        assert found["onebit"] < 0.1
        # S / |G|^2 = 4: the variance of one sample over its mean, squared.
        assert outcome["noise_of_changing_shares"] == pytest.approx(4, rel=0.1)
