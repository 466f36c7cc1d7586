"""What `BoundedLoss` does about losses: ranks of one process, a pattern that says what is lost, closed forms."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from paceline.errors import ConfigurationError
from paceline_lab.doubles.lossy_in_memory import LossyMemory
from paceline_lab.experiments.accuracy.in_process_ranks import RankReductions
from paceline_lossy import BoundedLoss
from paceline_lossy.bounded_loss import _classes

RANKS, PER_CHUNK = 4, 8
SIZES = {"first": (5, 8), "second": (40,)}  # 80 elements: shards of 20, chunks of 8, 8 and 4


def parameters():
    return {name: Parameter(torch.zeros(size)) for name, size in SIZES.items()}


def gradients(seed):
    """Whole numbers, so that sums are exact; times 4, so that means are whole, too."""
    dice = torch.Generator().manual_seed(seed)
    return [
        [4.0 * torch.randint(-50, 50, size, generator=dice) for size in SIZES.values()] for _ in range(RANKS)
    ]


def at_random(ratio, seed):
    def pattern(collective, source, owner, magnitudes):
        return np.random.default_rng((seed, collective, source, owner)).random(len(magnitudes)) < ratio

    return pattern


def ranks_with(pattern, compensation, named=None):
    world = LossyMemory(RANKS, pattern, chunk_bytes=4 * PER_CHUNK)
    return RankReductions(
        named or parameters(),
        RANKS,
        lambda: BoundedLoss(
            0.5, compensation=compensation, connect=lambda group: world.transports[group.rank()]
        ),
    )


def test_a_pattern_sees_the_mean_magnitude_of_each_chunk():
    """Shards of 20 elements, chunks of 8, 8 and 4; signs do not count."""
    seen = {}

    def pattern(collective, source, owner, magnitudes):
        seen[source, owner] = magnitudes.tolist()
        return np.zeros(len(magnitudes), bool)

    given = torch.arange(80.0)
    given[1::2] *= -1
    ranks_with(pattern, "none").reduce([[given[:40], given[40:]]] * RANKS)
    assert seen[0, 1] == seen[3, 1] == [n / RANKS for n in (23.5, 31.5, 37.5)]
    assert len(seen) == RANKS * (RANKS - 1)


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def residuals(ranks):
    """Each rank's, over both parameters."""
    states = [reduction.state_dict()["residual"] for reduction in ranks._reductions]
    return [flat(state[name] for name in SIZES) for state in states]


def mean(of_ranks):
    return sum(flat(tensors) for tensors in of_ranks) / RANKS


def test_feedback_loses_nothing_over_time():
    """After every step: what was reduced so far and what the ranks keep is what they gave so far, exactly."""
    ranks = ranks_with(at_random(0.4, 0), "feedback")
    given = reduced = torch.zeros(80)
    for step in range(6):
        here = gradients(step)
        given = given + mean(here)
        reduced = reduced + flat(ranks.reduce(here))
        kept = sum(residuals(ranks))
        assert kept.abs().sum() > 0
        assert torch.equal(given, reduced + kept)


def test_without_compensation_a_lost_contribution_is_zero():
    ranks = ranks_with(lambda _, source, _owner, sent: np.arange(len(sent)) == (source == 1), "none")
    here = gradients(0)
    lost = [flat(tensors) / RANKS for tensors in here]
    expected = mean(here)
    for shard in range(
        RANKS
    ):  # rank 1 loses the second chunk of each shard but its own, the others the first
        for source in range(RANKS):
            begin = 20 * shard + (8 if source == 1 else 0)
            if source != shard:
                expected[begin : begin + 8] -= lost[source][begin : begin + 8]
    assert torch.equal(flat(ranks.reduce(here)), expected)
    report = ranks._reductions[0].losses
    assert (report.lost, report.sent) == (12, 36)
    assert report.by_rank == report.by_sender == (3, 3, 3, 3)
    assert report.by_bucket == (12,)
    assert report.by_parameter == {"first": 8 / 20, "second": 8 / 20}


def test_the_report_says_of_which_parameter_something_was_lost():
    """Rank 3 loses the second chunk of shard 1: elements 28 to 35, all of the first parameter."""
    ranks = ranks_with(
        lambda _, source, owner, sent: (np.arange(len(sent)) == 1) & (source == 3 and owner == 1), "survivors"
    )
    ranks.reduce(gradients(0))
    for reduction in ranks._reductions:
        assert reduction.losses.by_parameter == {"first": 8 / (3 * 40), "second": 0.0}
        assert reduction.losses.by_rank == (0, 1, 0, 0)
        assert reduction.losses.by_sender == (0, 0, 0, 1)


def test_a_rank_whose_link_is_bad_stands_out_among_the_senders():
    """It loses a half of what it sends: all shards miss as much, by their owners nobody could tell which it is."""
    ranks = ranks_with(lambda _, source, _owner, sent: np.arange(len(sent)) < (source == 2), "survivors")
    ranks.reduce(gradients(0))
    report = ranks._reductions[0].losses
    assert report.by_rank == (1, 1, 0, 1)
    assert report.by_sender == (0, 0, 3, 0)


def test_survivors_estimate_the_mean_and_nothing_else_shrinks_it():
    """Over many patterns: the estimate's mean is the mean (four standard errors), without compensation it is not."""
    here = gradients(3)
    found = {}
    for compensation in ("survivors", "none"):
        each = torch.stack(
            [flat(ranks_with(at_random(0.3, seed), compensation).reduce(here)) for seed in range(60)]
        )
        error = each.mean(0) - mean(here)
        found[compensation] = (error / (each.std(0) / 60**0.5 + 1e-3)).pow(2).mean().sqrt()
    assert found["survivors"] < 1.5
    assert found["none"] > 3


def test_what_was_not_finite_changes_no_residual():
    ranks = ranks_with(at_random(0.4, 0), "feedback")
    ranks.reduce(gradients(0))
    before = residuals(ranks)
    broken = gradients(1)
    for of_rank in broken:
        of_rank[0][0, 0] = float("inf")
    ranks.reduce(broken)
    assert all(torch.equal(one, other) for one, other in zip(residuals(ranks), before, strict=True))


def test_residuals_follow_the_loss_scale():
    ranks = ranks_with(at_random(0.4, 0), "feedback")
    ranks.reduce(gradients(0))
    before = sum(residuals(ranks))
    for reduction in ranks._reductions:
        reduction.loss_scale = lambda: 2.0
        reduction.begin_step(len(ranks._reductions))
    assert torch.equal(sum(residuals(ranks)), 2 * before)


def test_state_goes_into_a_checkpoint_and_only_fits_there():
    named = parameters()
    ranks, again = (ranks_with(at_random(0.4, 0), "feedback", named) for _ in range(2))
    ranks.reduce(gradients(0))
    for old, new in zip(ranks._reductions, again._reductions, strict=True):
        new.load_state_dict(old.state_dict())
    again._reductions[0].losses = None
    assert all(torch.equal(one, other) for one, other in zip(residuals(ranks), residuals(again), strict=True))
    state = ranks._reductions[0].state_dict()
    with pytest.raises(ConfigurationError, match="not of BoundedLoss"):
        BoundedLoss().load_state_dict(state)
    with pytest.raises(ConfigurationError, match="first differ in size"):
        again._reductions[0].load_state_dict({**state, "sizes": {**state["sizes"], "first": 3}})
    with pytest.raises(
        ConfigurationError, match="the state of another kind of reduction, not of BoundedLoss"
    ):
        again._reductions[0].load_state_dict({})
    assert BoundedLoss().state_dict() == {}
    BoundedLoss().load_state_dict({})


def test_a_state_is_of_one_rank_of_as_many():
    """Another's residuals would be added to gradients that lost nothing; `strict=False` begins without any."""
    named = parameters()
    ranks, again = (ranks_with(at_random(0.4, 0), "feedback", named) for _ in range(2))
    ranks.reduce(gradients(0))
    again.reduce(gradients(0))
    first, second = (reduction.state_dict() for reduction in ranks._reductions[:2])
    loading = again._reductions[0]
    for other, told in ((second, "rank 1 of 4"), ({**first, "num_ranks": 3}, "rank 0 of 3")):
        with pytest.raises(ConfigurationError, match=f"rank 0 of 4 was given the state of {told}"):
            loading.load_state_dict(other)
        assert residuals(again)[0].abs().sum() > 0
    loading.load_state_dict(second, strict=False)
    assert loading.state_dict()["residual"] == {}


def test_residuals_do_not_depend_on_the_bound_nor_on_what_carries_them():
    named, world = parameters(), LossyMemory(RANKS, at_random(0.4, 0), chunk_bytes=4 * PER_CHUNK)
    ranks = ranks_with(at_random(0.4, 0), "feedback", named)
    ranks.reduce(gradients(0))
    kept = [reduction.state_dict() for reduction in ranks._reductions]

    def otherwise():
        return BoundedLoss(
            0.1, 0.2, "feedback", lambda group: world.transports[group.rank()], priorities=True
        )

    again = RankReductions(named, RANKS, otherwise)
    for state, reduction in zip(kept, again._reductions, strict=True):
        reduction.load_state_dict(state)
    assert all(torch.equal(one, other) for one, other in zip(residuals(again), residuals(ranks), strict=True))


def test_one_for_each_model():
    ranks = ranks_with(at_random(0.0, 0), "survivors")
    group = ranks._groups[0]
    with pytest.raises(
        ConfigurationError, match=r"already reduces another model's gradients.*Make one for each model"
    ):
        ranks._reductions[0].prepare(parameters(), group)
    ranks.reduce(gradients(0))  # the first model goes on


def test_an_unknown_compensation_is_refused():
    with pytest.raises(ConfigurationError, match="must be one of 'survivors'"):
        BoundedLoss(compensation="zero")


def bounds_of(priorities):
    """The bounds with which sums are launched."""
    world, bounds = LossyMemory(RANKS, at_random(0.0, 0), chunk_bytes=4 * PER_CHUNK), []

    def connect(group):
        transport = world.transports[group.rank()]
        launch = transport.launch

        def recording(vector, bound):
            bounds.append(bound)
            return launch(vector, bound)

        transport.launch = recording
        return transport

    RankReductions(
        parameters(), RANKS, lambda: BoundedLoss(0.5, connect=connect, priorities=priorities)
    ).reduce(gradients(1))
    return bounds


def test_the_first_layers_are_of_the_highest_class():
    """By where a parameter lies among the model's elements; a bucket is of its foremost parameter's class."""
    sizes = {"embedding": 10, "front": 30, "middle": 20, "back": 38, "bias": 2}
    named = {name: Parameter(torch.zeros(size)) for name, size in sizes.items()}
    classes = _classes(named)
    assert [classes[id(named[name])] for name in sizes] == [5, 5, 3, 2, 1]
    assert {bound.priority for bound in bounds_of(priorities=True)} == {5}
    assert {bound.priority for bound in bounds_of(priorities=False)} == {0}
    assert repr(copy.deepcopy(BoundedLoss(0.5, priorities=True))).endswith("'survivors', priorities=True)")
