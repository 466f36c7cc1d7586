"""The four remarks of Goyal et al. 2017, section 3, exactly, in float64; and the wrong variants are seen to be wrong.

Remark 4, on shuffling, is tests/data/test_global_shuffle.py; the warm-up is tests/optim/test_curves.py.
"""

import copy

import pytest
import torch
from torch import nn

from harness.models import generator
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.errors import ConfigurationError
from paceline_recipes import Curve, LargeMinibatch, MomentumCorrection

EXACT = 1e-12
FEATURES = 5


def linear():
    model = nn.Linear(FEATURES, 1).double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator(i), dtype=torch.float64))
    return model


def samples(num_samples, seed=0):
    source = generator(seed)
    return (
        torch.randn(num_samples, FEATURES, generator=source, dtype=torch.float64),
        torch.randn(num_samples, 1, generator=source, dtype=torch.float64),
    )


def mse(model, x, y):
    return (model(x) - y).square().mean()


def values(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ---- remark 1: scaling the loss is not scaling the rate


def values_after(rate, decay, loss_factor, momentum, num_steps=4):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=decay, momentum=momentum)
    for step in range(num_steps):
        optimizer.zero_grad()
        (loss_factor * mse(model, *samples(8, seed=step))).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("k", "decay"), [(1, 0.0), (1, 0.1), (4, 0.0), (4, 0.1)])
def test_remark_1_scaling_the_loss_is_not_scaling_the_rate(k, decay, momentum):
    """They differ if, and only if, there is weight decay and k is not 1."""
    by_rate = values_after(0.01 * k, decay, 1, momentum)
    by_loss = values_after(0.01, decay, k, momentum)
    difference = (by_rate - by_loss).abs().max().item()
    if decay and k != 1:
        assert difference > 1e-3
    else:
        assert difference < EXACT


def test_remark_1_the_recipe_scales_the_rate():
    """One step of k n samples: w - kη (λ w + mean gradient). Wrong: to normalise by n and keep η."""
    k, rate, decay = 4, 0.01, 0.1
    model, (x, y) = linear(), samples(8 * k)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=decay)
    LargeMinibatch(optimizer, reference_batch=8, batch=GlobalBatch((8,) * k), curve=Curve(total=9))
    before = values(model)
    mse(model, x, y).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step()
    right = before - k * rate * (decay * before + gradient)
    cancelled = before - rate * (decay * before + k * gradient)
    assert (values(model) - right).abs().max() < EXACT
    assert (values(model) - cancelled).abs().max() > 1e-3


# ---- remark 2: momentum when the rate changes


class AbsorbedSgd(torch.optim.Optimizer):
    """The form that needs correction: v <- m v + η g; w <- w - v."""

    def __init__(self, parameters, lr, momentum):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                v = state.setdefault("momentum_buffer", torch.zeros_like(p))
                v.mul_(group["momentum"]).add_(p.grad, alpha=group["lr"])
                p.sub_(v)


RATES = (0.01, 0.01, 0.05, 0.05, 0.02, 0.002, 0.002)  # as a warm-up's jump by 5, and decays


def along(make, correct=None, save_at=None):
    """The weights after a step at each of the rates."""
    model = linear()
    optimizer = make(model.parameters())
    if correct:
        correct(optimizer)
    for step, rate in enumerate(RATES):
        if step == save_at:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make(model.parameters())
            optimizer.load_state_dict(state)
            correct(optimizer)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        mse(model, *samples(8, seed=step)).backward()
        optimizer.step()
    return values(model)


def absorbed(parameters):
    return AbsorbedSgd(parameters, lr=RATES[0], momentum=0.9)


def textbook_by_hand():
    """U <- m u + g; w <- w - η u."""
    model = linear()
    u = [torch.zeros_like(p) for p in model.parameters()]
    for step, rate in enumerate(RATES):
        gradients = torch.autograd.grad(mse(model, *samples(8, seed=step)), list(model.parameters()))
        with torch.no_grad():
            for p, g, velocity in zip(model.parameters(), gradients, u, strict=True):
                velocity.mul_(0.9).add_(g)
                p.sub_(rate * velocity)
    return values(model)


def corrected_the_wrong_way_round(optimizer):
    before = {"rate": RATES[0]}

    def hook(chosen, _args, _kwargs):
        rate = chosen.param_groups[0]["lr"]
        for state in chosen.state.values():
            state["momentum_buffer"].mul_(before["rate"] / rate)
        before["rate"] = rate

    optimizer.register_step_pre_hook(hook)


def test_remark_2_the_corrected_absorbed_form_is_the_textbooks():
    """Through a jump of the rate by 5 and two decays, also when it is saved and restored at the jump."""
    right = textbook_by_hand()
    assert (along(absorbed, MomentumCorrection) - right).abs().max() < 1e-14
    assert (along(absorbed, MomentumCorrection, save_at=2) - right).abs().max() < 1e-14
    assert (along(absorbed) - right).abs().max() > 1e-2
    assert (along(absorbed, corrected_the_wrong_way_round) - right).abs().max() > 1e-2


def test_remark_2_torchs_optimizers_need_no_correction():
    """Its SGD is the textbook form; correcting it would be wrong, so it is refused."""
    right = textbook_by_hand()

    def torchs(parameters):
        return torch.optim.SGD(parameters, lr=RATES[0], momentum=0.9)

    assert (along(torchs) - right).abs().max() < 1e-14
    with pytest.raises(ConfigurationError, match="SGD is torch's, whose velocity holds no rate"):
        MomentumCorrection(torchs(linear().parameters()))


def test_remark_2_can_be_taken_back_and_other_names_are_found():
    """Removed, nothing is corrected any more; a velocity of another name is left alone."""
    right, wrong = textbook_by_hand(), along(absorbed)
    assert torch.equal(along(absorbed, lambda optimizer: MomentumCorrection(optimizer).remove()), wrong)
    assert torch.equal(along(absorbed, lambda optimizer: MomentumCorrection(optimizer, "speed")), wrong)
    assert not torch.allclose(right, wrong)


# ---- remark 3: normalise by all samples of all ranks

SHARDS = GlobalBatch((5, 2), accumulation=2)
WRONG = {
    "plain mean": 1 / 2,
    "sums over its own samples": None,
    "of the micro-step only": 1.0,
}
"""What a rank might multiply the mean loss of its samples by, in a step of two micro-steps."""


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def gradient_of_one_process(num_samples):
    model = linear()
    mse(model, *samples(num_samples)).backward()
    return gradient(model)


def shards_of(rank):
    """This rank's micro-batches of the one step."""
    x, y = samples(SHARDS.size)
    begins = [m * SHARDS.micro_size + sum(SHARDS.local[:rank]) for m in range(SHARDS.accumulation)]
    return [(x[b : b + SHARDS.local[rank]], y[b : b + SHARDS.local[rank]]) for b in begins]


def weighed(rank, _num_ranks):
    model = DistributedDataParallel(linear())
    with model.accumulate(shards_of(rank), weight=lambda shard: len(shard[0])) as micro_batches:
        for x, y in micro_batches:
            mse(model, x, y).backward()
    return gradient(model), micro_batches.total_weight


def wrongly_weighed(rank, _num_ranks, factor):
    model = DistributedDataParallel(linear())
    with model.no_sync():
        for x, y in shards_of(rank):
            ((len(x) if factor is None else factor) * mse(model, x, y)).backward()
    model.sync_gradients()
    return gradient(model)


@pytest.mark.processes
def test_remark_3_every_sample_counts_the_same():
    """5 and 2 samples a rank, twice: the gradient of one process on all 14, which is also what the recipe counts."""
    right = gradient_of_one_process(SHARDS.size)
    for found, total in pool(2).run(weighed):
        assert (found - right).abs().max() < EXACT
        assert total == SHARDS.size


@pytest.mark.processes
@pytest.mark.parametrize("factor", WRONG.values(), ids=WRONG)
def test_remark_3_other_factors_are_wrong(factor):
    """Each in its own way, by more than a hundredth."""
    right = gradient_of_one_process(SHARDS.size)
    for found in pool(2).run(wrongly_weighed, factor):
        assert (found - right).abs().max() > 1e-2


def epoch_over_ranks(rank, _num_ranks):
    """The mean over an uneven epoch of the batches' gradients, each as often as it has samples."""
    model, (x, y) = DistributedDataParallel(linear()), samples(23)
    total = torch.zeros(FEATURES + 1, dtype=torch.float64)
    for indices in GlobalShuffle(23, GlobalBatch((4, 2)), rank):
        model.zero_grad()
        with model.accumulate([indices], weight=len) as micro_batches:
            for batch in micro_batches:
                mse(model, x[batch], y[batch]).backward()
        total += micro_batches.total_weight * gradient(model)
    return total / 23


@pytest.mark.processes
def test_remark_3_at_the_end_of_an_epoch():
    """23 samples in batches of 4 + 2: the last five count as much as any others."""
    right = gradient_of_one_process(23)
    for found in pool(2).run(epoch_over_ranks):
        assert (found - right).abs().max() < EXACT
