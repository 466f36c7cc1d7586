"""The gradient noise scale: unbiased where the truth is known, the same on all ranks, and it changes no gradient."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from harness.models import Mlp, SparseNet, digest, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.data import GlobalBatch
from paceline.errors import ConfigurationError, PeerAbortedError
from paceline.reductions import HookReduction, Mean, NarrowMean, PowerSGD, Reduction
from paceline_recipes import GradientNoiseScale
from paceline_recipes.noise_scale import _squared_norm

SIGNAL, SPREAD, SIZE = 0.5, 2.0, 800  # directions are as good as steps for the estimate, and cheaper
TRUE_NOISE_SCALE = SIZE * SPREAD**2 / (SIZE * SIGNAL**2)  # trace of the covariance over |G|²: 16 samples


class Flat(nn.Module):
    """A loss whose gradient of a sample is the sample: mean(w · x)."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, x, breaks=False):
        products = x @ self.w
        if breaks:
            products.register_hook(lambda _: 1 / 0)
        return products.mean()


def noisy(num_samples, *parts):
    """Samples with mean SIGNAL and standard deviation SPREAD in every one of SIZE directions."""
    source = generator(*parts)
    return SIGNAL + SPREAD * torch.randn(num_samples, SIZE, generator=source, dtype=torch.float64)


def measure(rank, _num_ranks, local, kind, num_steps):
    batch = GlobalBatch(tuple(local))
    inner = {
        "mean": lambda: "mean",
        "narrow": lambda: NarrowMean(torch.bfloat16),
        "hook": lambda: HookReduction(None, allreduce_hook, overlaps=True),
    }[kind]()
    shares = None if len(set(local)) == 1 else batch.shares
    noise = GradientNoiseScale(inner, shares, memory_steps=1e9)  # the plain average
    model = DistributedDataParallel(Flat(), reduction=noise)
    for step in range(num_steps):
        model.zero_grad()
        with model.accumulate([noisy(local[rank], step, rank)], weight=len) as micro_batches:
            for x in micro_batches:
                model(x).backward()
    assert noise.num_steps == num_steps
    return noise.noise_over_signal * batch.size, json.dumps(noise.state_dict()), noise.in_words(batch.size)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("local", "kind"),
    [((4, 4), "mean"), ((4, 4), "narrow"), ((4, 4), "hook"), ((9, 3), "mean"), ((1, 15), "mean")],
)
def test_it_finds_the_noise_that_is_there(local, kind):
    """Within 10 %, with equal and unequal ranks, whatever reduces; every rank says the same, bit by bit."""
    found = pool(2).run(measure, local, kind, 24)
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(TRUE_NOISE_SCALE, rel=0.1)
    assert "noise scale" in found[0][2]


def estimates(parts, whole, q, num_ranks, batch):
    """Ours, and the source's equation A.2 for equal ranks."""
    ours = ((whole - parts) / (1 - q), (parts - q * whole) / (1 - q) * batch)
    big, small = batch, batch / num_ranks
    local = parts * num_ranks  # the mean of the ranks' own squared norms
    theirs = ((big * whole - small * local) / (big - small), (local - whole) / (1 / small - 1 / big))
    return ours, theirs


def test_equal_ranks_are_the_sources_equation():
    """|G|² and S, to rounding; in the class as in the formula."""
    noise = GradientNoiseScale(memory_steps=1)
    noise._concentration = 1 / 4
    ours, theirs = estimates(0.4, 0.5, 1 / 4, 4, 128)
    assert ours == pytest.approx(theirs, rel=1e-14)
    noise.add(torch.tensor(0.4, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64))
    assert noise.noise_over_signal == pytest.approx(theirs[1] / theirs[0] / 128, rel=1e-14)


@pytest.mark.parametrize("local", [(4, 4, 4, 4), (1, 2, 5, 8)])
def test_the_estimators_are_unbiased_and_the_obvious_ones_are_not(local):
    """In the mean over 20,000 synthetic steps, within five standard errors of the truth.

    Wrong: |mean gradient|² for the signal; the ranks' spread without its factor; equal weights for unequal ranks.
    """
    batch, source = GlobalBatch(local), generator(7)
    num_steps, q = 20_000, sum(share**2 for share in GlobalBatch(local).shares)
    parts, mean = torch.zeros(num_steps, dtype=torch.float64), torch.zeros(num_steps, 8, dtype=torch.float64)
    for size, share in zip(local, batch.shares, strict=True):
        of_rank = (
            SIGNAL + torch.randn(num_steps, 8, generator=source, dtype=torch.float64) * SPREAD / size**0.5
        )
        parts += (share * of_rank).square().sum(1)
        mean += share * of_rank
    whole = mean.square().sum(1)
    true_signal, true_noise = 8 * SIGNAL**2, 8 * SPREAD**2 / batch.size

    def is_right(samples, truth):
        return (samples.mean() - truth).abs() < 5 * samples.std() / num_steps**0.5

    assert is_right((whole - parts) / (1 - q), true_signal)
    assert is_right((parts - q * whole) / (1 - q), true_noise)
    assert not is_right(whole, true_signal)
    assert not is_right(parts - q * whole, true_noise)
    if len(set(local)) > 1:
        assert not is_right((parts - whole / 4) / (1 - 1 / 4), true_noise)


MEASURED = {"mean": Mean, "narrow": lambda: NarrowMean(torch.float16), "powersgd": PowerSGD}


def same_gradients(rank, _num_ranks, name):
    digests = []
    for reduction in (MEASURED[name](), GradientNoiseScale(MEASURED[name]())):
        torch.manual_seed(0)
        model = DistributedDataParallel(Mlp(), reduction=reduction)
        for step in range(3):
            model.zero_grad()
            squares(model(torch.randn(4, 8, generator=generator(rank, step)))).backward()
        digests.append(digest(p.grad for p in model.parameters()))
    assert digests[0] == digests[1]
    words = model.reduction.in_words(8)
    assert "3 steps there is no estimate yet" in words
    restored = GradientNoiseScale(MEASURED[name]())
    restored.prepare(dict(model.module.named_parameters()), model.process_group)
    restored.load_state_dict(json.loads(json.dumps(model.reduction.state_dict())))
    assert restored.noise_over_signal == model.reduction.noise_over_signal
    with pytest.raises(ConfigurationError, match="lacks inner, noise, num_steps, signal"):
        restored.load_state_dict({})
    return digests


@pytest.mark.processes
@pytest.mark.parametrize("name", MEASURED)
def test_gradients_are_the_same_bit_by_bit(name):
    """Measured or not; the estimate survives a checkpoint."""
    found = pool(2).run(same_gradients, name)
    assert found[0] == found[1]


def aborted(rank, _num_ranks):
    """A backward that raises on one rank is not a step, and does not spoil the next one's measurement."""
    noise = GradientNoiseScale(memory_steps=1)
    model = DistributedDataParallel(Flat(), reduction=noise)
    for step in range(3):
        model.zero_grad()
        try:
            model(noisy(4, step, rank), breaks=step == 1 and rank == 0).backward()
        except (PeerAbortedError, ZeroDivisionError):
            assert step == 1
    means = [noisy(4, 2, other).mean(0) for other in range(2)]
    parts = sum((mean / 2).square().sum() for mean in means)
    whole = ((means[0] + means[1]) / 2).square().sum()
    expected = ((parts - whole / 2) / (whole - parts)).item()
    return noise.num_steps, noise.noise_over_signal, expected


@pytest.mark.processes
def test_only_steps_that_ended_well_count():
    """Three backwards, of which one was aborted; the last one's values by hand."""
    for num_steps, found, expected in pool(2).run(aborted):
        assert num_steps == 2
        assert found == pytest.approx(expected, rel=1e-12)


def seldom(rank, _num_ranks):
    """One step in three; and none whose last bucket bypasses reductions, as sparse gradients do."""
    noise = GradientNoiseScale(every=3)
    model = DistributedDataParallel(Flat(), reduction=noise)
    for step in range(7):
        model(noisy(4, step, rank)).backward()
    sparse = DistributedDataParallel(SparseNet(), bucket_cap_mb=0, reduction=GradientNoiseScale())
    squares(sparse(torch.randint(0, 20, (4, 5), generator=generator(rank)))).backward()
    return noise.num_steps, sparse.reduction.num_steps


@pytest.mark.processes
def test_steps_that_are_not_measured():
    """Are not counted, and do not fail."""
    assert pool(2).run(seldom) == [(3, 0)] * 2


def test_in_words():
    """A batch above, below and far below the useful size; nothing before there is an estimate."""
    noise = GradientNoiseScale(memory_steps=1)
    noise._concentration = 1 / 2
    assert noise.noise_over_signal != noise.noise_over_signal  # NaN
    for parts, whole, words in (
        (0.6, 1.0, "noise scale 250 samples: your batch of 1,000 is 4.0 times the useful size"),
        (0.9, 1.0, "noise scale 4,000 samples: a batch 4.0 times larger would still be useful"),
        (1.1, 1.0, "the noise drowns the gradient: a batch of 1,000 is far below the useful size"),
        (0.5, 1.0, "your batch of 1,000 is many times the useful size"),
    ):
        for _ in range(10):
            noise.add(torch.tensor(parts, dtype=torch.float64), torch.tensor(whole, dtype=torch.float64))
        assert words in noise.in_words(1000)


def test_a_squared_norm_of_many_elements():
    """To six digits, where one sum in single precision has three; of 16 bits without overflow, of any length."""
    for size in (0, 5, 16_384, 3_000_001):
        x = torch.randn(size, generator=generator(size)) + 1
        assert _squared_norm(x).item() == pytest.approx(x.double().square().sum().item(), rel=1e-6)
    halves = torch.full((20_000,), 200.0, dtype=torch.float16)
    assert _squared_norm(halves).item() == pytest.approx(20_000 * 200.0**2)


def alone(_rank, _num_ranks):
    noise = GradientNoiseScale()
    with pytest.warns(UserWarning, match="there is one rank"):
        model = DistributedDataParallel(Flat(), reduction=noise)
    return steps_measured(model, noise, 2)


def left_alone(rank, _num_ranks):
    noise, given = GradientNoiseScale(), GradientNoiseScale(shares=(0.25, 0.75))
    model, weighed = (DistributedDataParallel(Flat(), reduction=each) for each in (noise, given))
    counts = [steps_measured(model, noise, 2)]
    group, both = dist.new_group([0]), dist.new_group([0, 1])
    if rank == 0:
        model.membership.rebuild(group)
        counts.append(steps_measured(model, noise, 3))
        with pytest.raises(ConfigurationError, match="shares of 2 ranks, but the group has 1"):
            weighed.membership.rebuild(group)
    model.membership.rebuild(both, same_step=False)
    return [*counts, steps_measured(model, noise, 1)]


def steps_measured(model, noise, count):
    for _ in range(count):
        model.zero_grad()
        model(torch.ones(2, SIZE, dtype=torch.float64)).backward()
    return noise.num_steps


@pytest.mark.processes
def test_a_rank_that_is_alone_measures_nothing():
    """From the beginning, with a warning; or for a while, because others were lost: it measures again with them."""
    assert pool(1).run(alone) == [0]
    assert pool(2).run(left_alone) == [[2, 2, 3], [2, 3]]


def twice(_rank, _num_ranks):
    noise = GradientNoiseScale()
    model = DistributedDataParallel(Flat(), reduction=noise)
    with pytest.raises(ConfigurationError, match="measures another model already"):
        DistributedDataParallel(Flat(), reduction=noise)
    module = model.module
    del model
    DistributedDataParallel(module, reduction=noise)
    return True


@pytest.mark.processes
def test_two_models_are_not_mixed():
    """The same one may be wrapped again."""
    assert all(pool(2).run(twice))


@pytest.mark.processes
def test_refused():
    """Shares and memory that cannot be."""
    for make, words in (
        (lambda: GradientNoiseScale(memory_steps=0), "memory_steps=0"),
        (lambda: GradientNoiseScale(every=0), "every=0 measures no step"),
        (lambda: GradientNoiseScale(shares=(0.5, 0.6)), "are not fractions of a batch"),
        (lambda: GradientNoiseScale(shares=(1.5, -0.5)), "are not fractions of a batch"),
        (lambda: GradientNoiseScale("adasum"), "its result is not the ranks' mean"),
        (lambda: GradientNoiseScale("median"), "'median' is not a reduction"),
    ):
        with pytest.raises(ConfigurationError, match=words.replace("(", r"\(")):
            make()
    assert repr(GradientNoiseScale()) == "GradientNoiseScale(Mean, memory_steps=50, every=1)"


def test_everything_that_a_reduction_is_asked_goes_to_the_inner_one():
    """A new question in the interface must be answered here, too; `is_linear` is required."""
    asked = {
        name for name, value in vars(Reduction).items() if callable(value) or isinstance(value, property)
    }
    asked |= {"carries_status"}
    assert {name for name in asked if not name.startswith("_")} <= set(vars(GradientNoiseScale))


def test_an_overflow_leaves_no_trace():
    """The step is skipped; one NaN in an average would stay for ever."""
    scale = GradientNoiseScale()
    for parts, whole in ((2.0, 1.5), (math.inf, 1.0), (math.inf, math.inf), (math.nan, math.nan), (2.0, 1.5)):
        scale.add(torch.tensor(parts).double(), torch.tensor(whole).double())
    assert math.isfinite(scale.state_dict()["signal"])
    assert math.isfinite(scale.state_dict()["noise"])
