"""The recipe follows the batch that is really trained: over ranks, accumulation, shares and restarts."""

import copy
import json
import math

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from harness.ranks import pool
from paceline.data import GlobalBatch
from paceline.errors import ConfigurationError
from paceline_recipes import Curve, LargeMinibatch

EPOCH = 1024


def sgd(*rates):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def twice_a_tenth(time, _warmup, _total):
    """Divide by ten at 4 and at 8, as a user's own decay would."""
    return 1 / 10 ** ((time >= 4) + (time >= 8))


def make(batch, curve=None, rates=(0.1,), **kwargs):
    kwargs = {"reference_batch": 64, "epoch_samples": EPOCH, **kwargs}
    curve = curve or Curve(total=9, warmup=2, decay=twice_a_tenth)
    return LargeMinibatch(sgd(*rates), batch=batch, curve=curve, **kwargs)


def rates_of(recipe, num_steps):
    """The first group's rate of each step."""
    seen = []
    for _ in range(num_steps):
        seen.append(recipe.optimizer.param_groups[0]["lr"])
        recipe.optimizer.step()
        recipe.step()
    return seen


def test_rates_of_a_whole_training():
    """Epochs of 1,024 samples, batch 128 of reference 64: 8 steps an epoch; equal to the paper's formula bit by bit."""
    recipe = make(GlobalBatch((32, 32), accumulation=2))
    assert isinstance(recipe, LRScheduler)
    seen = rates_of(recipe, 9 * 8)
    for i, rate in enumerate(seen):
        gradual = 0.1 + (0.2 - 0.1) * (i / 16)
        assert rate == (gradual if i < 16 else 0.2 * (1 if i < 32 else 1 / 10 if i < 64 else 1 / 100))
    assert recipe.samples == 9 * EPOCH


@pytest.mark.parametrize(
    ("batch", "scaling", "factor"),
    [
        (GlobalBatch((64,)), "linear", 1),
        (GlobalBatch((64,) * 16), "linear", 16),
        (GlobalBatch((64,) * 16), "sqrt", 4),
        (GlobalBatch((64,) * 16), "none", 1),
        (GlobalBatch((48, 16), accumulation=3), "linear", 3),
        (GlobalBatch((8,)), "linear", 1 / 8),
    ],
)
def test_the_factor_is_the_batchs(batch, scaling, factor):
    """Ranks x local batch x micro-steps, unequal ones included; each group has its own reference rate."""
    recipe = make(batch, curve=Curve(total=9), scaling=scaling, rates=(0.1, 0.3))
    assert recipe.factor == factor
    assert [group["lr"] for group in recipe.optimizer.param_groups] == [0.1 * factor, 0.3 * factor]


def test_a_change_of_the_batch_does_not_move_the_decay():
    """Doubled in the third epoch: the rate doubles at once, steps are half as many, milestones stay at their epochs."""
    recipe = make(GlobalBatch((64, 64)))
    rates_of(recipe, 20)  # 2.5 epochs
    assert recipe.optimizer.param_groups[0]["lr"] == 0.2
    recipe.update(GlobalBatch((64,) * 4))
    assert recipe.optimizer.param_groups[0]["lr"] == 0.4
    assert recipe.get_last_lr() == [0.4]
    seen = rates_of(recipe, 26)  # 6.5 epochs of 4 steps
    expected = [0.4] * 6 + [0.4 / 10] * 16 + [0.4 / 100] * 4
    assert seen == pytest.approx(expected, rel=1e-15)
    assert recipe.time == 9
    assert [(change.samples, change.factor) for change in recipe.changes] == [(0, 2.0), (2560, 4.0)]
    recipe.update(accumulation=3)
    assert recipe.batch.size == 768


def test_a_change_within_the_warmup_keeps_its_place():
    """The rate moves to the same point of the new straight line."""
    recipe = make(GlobalBatch((64, 64)))
    rates_of(recipe, 8)  # half of the warm-up
    assert recipe.optimizer.param_groups[0]["lr"] == pytest.approx(0.15)
    recipe.update(GlobalBatch((64,) * 8))
    assert recipe.optimizer.param_groups[0]["lr"] == pytest.approx((0.1 + 0.8) / 2)


def test_steps_are_counted_by_the_first_batch():
    """Without a size of the data set, the curve is in steps; a larger batch then needs fewer."""
    recipe = make(GlobalBatch((64,)), curve=Curve(total=20, decay="linear"), epoch_samples=None)
    rates_of(recipe, 10)
    larger = make(GlobalBatch((64, 64)), curve=Curve(total=20, decay="linear"), epoch_samples=None)
    larger.load_state_dict(recipe.state_dict())
    recipe.update(GlobalBatch((64, 64)))
    for goes_on in (recipe, larger):
        assert rates_of(goes_on, 5)[-1] == pytest.approx(0.2 * 2 / 20)
        assert goes_on.optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize("stop", [0, 5, 30])
def test_restarted_with_another_number_of_ranks(stop):
    """The checkpoint's place in the curve, this world's batch; a restart in the same world goes on bit by bit."""
    first = make(GlobalBatch((64, 64)))
    whole = rates_of(make(GlobalBatch((64, 64))), 40)
    rates_of(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    optimizer_state = copy.deepcopy(first.optimizer.state_dict())

    same = make(GlobalBatch((64, 64)))
    same.optimizer.load_state_dict(optimizer_state)
    same.load_state_dict(state)
    assert rates_of(same, 40 - stop) == whole[stop:]
    assert len(same.changes) == 1

    larger = make(GlobalBatch((64,) * 4))
    larger.optimizer.load_state_dict(optimizer_state)
    larger.load_state_dict(state)
    assert larger.samples == stop * 128
    assert larger.optimizer.param_groups[0]["lr"] == larger.curve.rate(stop / 8, 0.1, 0.4)
    assert [change.samples for change in larger.changes] == [0, stop * 128]
    assert "4 ranks x 64" in larger.changes[-1].batch


def test_a_fixed_world_refuses_any_other_and_changes_nothing():
    """Both sizes are named; after the refusal the recipe is as it was."""
    state = make(GlobalBatch((64, 64))).state_dict()
    fixed = make(GlobalBatch((64,) * 4), fixed_world=True)
    before = fixed.state_dict()
    with pytest.raises(
        ConfigurationError, match=r"2 ranks x 64 = 128 samples and would become 4 ranks x 64 = 256"
    ):
        fixed.load_state_dict(state)
    with pytest.raises(ConfigurationError, match="fixed world"):
        fixed.update(accumulation=2)
    assert fixed.state_dict() == before
    fixed.update(GlobalBatch((64,) * 4))  # the same one is no change
    fixed.load_state_dict(before)


def over_ranks(rank, num_ranks):
    """Unequal local batches are learnt from the ranks; an update, too; the world may shrink between two steps."""
    recipe = make(48 if rank == 0 else 16, accumulation=2)
    assert recipe.batch == GlobalBatch((48, 16), accumulation=2)
    assert recipe.factor == 2
    assert recipe.batch.shares == (0.75, 0.25)
    rates_of(recipe, 1)
    recipe.update(batch=64 - 32 * rank, accumulation=2 + 2 * rank)
    assert recipe.batch == GlobalBatch((64, 32), accumulation=(2, 4))
    recipe.update(batch=64, accumulation=2)
    assert recipe.batch == GlobalBatch((64, 64), accumulation=2)
    alone = dist.new_group([rank], use_local_synchronization=True)
    recipe._process_group = alone  # as if this rank were all that is left
    rates_of(recipe, 1)
    assert recipe.batch == GlobalBatch((64,), accumulation=2)
    return str(recipe)


@pytest.mark.processes
def test_the_batch_is_learnt_from_the_ranks():
    """Every rank reports the same."""
    reports = pool(2).run(over_ranks)
    assert reports[0] == reports[1]
    assert "change" in reports[0]


def refused_over_ranks(rank, _num_ranks, case):
    differs = {
        "rate": {"rates": (0.1 + rank,)},
        "a problem": {"scaling": ("linear", "log")[rank]},
        "a fraction": {"batch": (32, 32.5)[rank]},
        "curve": {"curve": Curve(total=9 + rank)},
        "no samples": {"batch": 0},
        "negative": {"batch": -8},
    }[case]
    with pytest.raises(ConfigurationError) as caught:
        make(**{"batch": 32, **differs})
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rate", "rank 1 follows another recipe than rank 0"),
        ("curve", "rank 1 follows another recipe than rank 0"),
        ("a problem", "rank 1 could not make its recipe|'log' is not a rule"),
        ("a fraction", "rank 1 could not make its recipe|batch=32.5 is not a number of samples"),
        ("no samples", "local=(0, 0) trains nothing"),
        ("negative", "rank 0 would train -8 samples"),
    ],
)
def test_ranks_that_differ_are_all_told(case, words):
    """Before any rate is set, on every rank."""
    messages = pool(2).run(refused_over_ranks, case)
    assert all(any(word in message for word in words.split("|")) for message in messages)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"batch": 0}, "local=(0,) trains nothing"),
        ({"batch": -3}, "rank 0 would train -3 samples"),
        ({"batch": 8, "accumulation": 0}, "accumulation=0 micro-steps make no step"),
        ({"batch": 8, "accumulation": 1.5}, "accumulation=1.5 is not a number of micro-steps"),
        ({"batch": True}, "batch=True is not a number of samples"),
        ({"batch": 8, "accumulation": True}, "accumulation=True is not a number of micro-steps"),
        ({"batch": 8, "reference_batch": 0}, "reference_batch=0 is not a positive"),
        ({"batch": 8, "reference_batch": math.nan}, "reference_batch=nan is not a positive"),
        ({"batch": 8, "epoch_samples": 0}, "epoch_samples=0"),
        ({"batch": 8, "epoch_samples": float("nan")}, "epoch_samples=nan"),
        ({"batch": 8, "scaling": "log"}, "'log' is not a rule"),
        ({"batch": 8, "rates": (0.0,)}, "parameter group 0 has lr=0.0"),
        ({"batch": 8, "rates": (0.1, -1e-3)}, "parameter group 1"),
        ({"batch": GlobalBatch((8,)), "accumulation": 2}, "was given with a GlobalBatch"),
    ],
)
def test_refused(kwargs, words):
    """Before training starts."""
    if kwargs.get("rates") == (0.1, -1e-3):
        optimizer = sgd(0.1, 0.2)
        optimizer.param_groups[1]["lr"] = -1e-3  # torch's constructor refuses it
        with pytest.raises(ConfigurationError) as caught:
            LargeMinibatch(optimizer, 64, 8, Curve(total=5))
    else:
        with pytest.raises(ConfigurationError) as caught:
            make(**kwargs)
    assert words in str(caught.value)


def test_a_checkpoint_of_another_training_is_refused():
    """Another data set, other groups; and one rank's batch where the whole is needed."""
    recipe = make(GlobalBatch((64,)))
    with pytest.raises(ConfigurationError, match="epoch_samples=1000, this recipe's 1024"):
        recipe.load_state_dict(make(GlobalBatch((64,)), epoch_samples=1000).state_dict())
    with pytest.raises(ConfigurationError, match="rates of 2 parameter groups"):
        recipe.load_state_dict(make(GlobalBatch((64,)), rates=(0.1, 0.2)).state_dict())
    with pytest.raises(ConfigurationError, match="made with a GlobalBatch"):
        recipe.update(batch=32)


def test_the_report_says_what_was_derived():
    """Numbers that a reader would check by hand; also as plain numbers for JSON."""
    recipe = make(GlobalBatch((32, 32), accumulation=4), rates=(0.1, 0.3))
    rates_of(recipe, 2)
    recipe.update(accumulation=8)
    words = str(recipe)
    for fact in (
        "2 ranks x 32 x 8 micro-steps = 512 samples",
        "64 samples",
        "8 (linear scaling)",
        "0.1, 0.3 (a group each)",
        "0.8, 2.4 (a group each)",
        "gradual, 2 epochs, 4 steps of this batch",
        "9 epochs, 18 steps of this batch",
        "2 steps, 512 samples",
        "after 512 samples: 2 ranks x 32 x 8 micro-steps = 512 samples, factor 8",
    ):
        assert fact in words
    facts = json.loads(json.dumps(recipe.as_dict()))
    assert facts["factor"] == 8
    assert facts["batch"]["samples"] == 512
    assert "none: the batch is not larger" in str(make(GlobalBatch((64,))))


def test_adam_is_told_of_the_square_root():
    """With the linear rule only."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    for scaling, is_noted in (("linear", True), ("sqrt", False)):
        adam = torch.optim.AdamW([parameter], lr=1e-3)
        recipe = LargeMinibatch(adam, 64, GlobalBatch((64, 64)), Curve(total=5), scaling=scaling)
        assert ("AdamW follows the square root" in recipe.report()) is is_noted


def test_a_short_last_step_is_counted_as_it_was():
    """Samples over all ranks, as at the end of an epoch."""
    recipe = make(GlobalBatch((64,)))
    recipe.optimizer.step()
    recipe.step(samples=20)
    assert recipe.samples == 20
