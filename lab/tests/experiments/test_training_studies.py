"""Studies that train: which trainings they ask for next, and the samples that they make."""

import pytest
import torch

from paceline.reductions.adasum import combine
from paceline_lab.experiments.accuracy import adasum_steps, resnet_batches
from paceline_lab.experiments.accuracy.adasum_steps import ADASUM, MEAN, StepsOutcome, StepsTrial
from paceline_lab.experiments.accuracy.resnet_batches import (
    BASELINE,
    GRADUAL,
    GRID,
    ResnetOutcome,
    ResnetTrial,
)
from paceline_lab.experiments.accuracy.store import TrialStore, complete
from paceline_lab.experiments.unequal.time_to_loss_models import (
    DIGITS,
    END,
    IGNORED,
    WORDS,
    Translation,
    translations,
    words_of,
)


def test_numbers_are_put_into_words():
    assert " ".join(words_of(70_013)) == "seventy thousand thirteen"
    assert " ".join(words_of(99_999)) == "ninety nine thousand nine hundred ninety nine"
    torch.manual_seed(0)
    inputs, targets = translations(20).tensors
    for row, answer in zip(inputs.tolist(), targets.tolist(), strict=True):
        digits, so_far = row[:DIGITS], row[DIGITS:]
        words = [WORDS[each] for each in answer if each not in (IGNORED, END)]
        assert words == words_of(int("".join(map(str, digits))))
        assert so_far[0] == END
        assert so_far[1 : 1 + len(words)] == answer[: len(words)]


def test_the_decoder_does_not_look_ahead():
    """What stands behind a word changes nothing before it; a digit changes all."""
    torch.manual_seed(0)
    model = Translation()
    (inputs, _) = translations(1).tensors
    other = inputs.clone()
    other[0, DIGITS + 3] = len(WORDS) - 1 - other[0, DIGITS + 3]
    before, after = model(inputs), model(other)
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3:], after[3:])


def store_of(folder, trial, outcome):
    return TrialStore(folder / "trials.jsonl", trial, outcome)


def test_a_rate_at_an_edge_is_not_the_best(tmp_path):
    """The grid grows on the better side, then the best rate gets its seeds."""
    store = store_of(tmp_path, StepsTrial, StepsOutcome)
    plan = adasum_steps.Plan(store, (16,), 2)
    cell = ("adam", MEAN, 16)

    def add(power, seed, steps):
        store.add(StepsTrial(*cell[:2], power, seed, 16), StepsOutcome([2.5], steps, 0.0))

    def wanted():
        return [(one.power, one.seed) for one in plan.missing() if (one.optimizer, one.side) == cell[:2]]

    assert wanted() == [(-1, 100), (0, 100), (1, 100)]
    for power, steps in ((-1, 90.0), (0, 80.0), (1, 70.0)):
        add(power, 100, steps)
    assert wanted() == [(2, 100)]
    add(2, 100, None)
    assert wanted() == [(1, 0), (1, 1)]
    assert plan.spread(cell) is None
    add(1, 0, 60.0)
    assert plan.spread(cell).values == (60.0,)
    assert {side for _, side, _ in plan.cells()} == {MEAN, ADASUM}


def test_the_reference_rate_is_the_smallest_of_the_good_ones(tmp_path):
    store = store_of(tmp_path, ResnetTrial, ResnetOutcome)
    plan = resnet_batches.Plan(store, whole=False)
    assert {trial.rate for trial in plan.missing()} == set(GRID)
    for rate, accuracy in zip(GRID, (0.85, 0.856, 0.86, 0.855, 0.8), strict=True):
        for seed in range(2):
            store.add(ResnetTrial(BASELINE, 1, rate, seed), ResnetOutcome(accuracy, 0.8, [], [], 0.0))
    assert plan.reference_rate() == GRID[1]
    assert ResnetTrial(GRADUAL, 32, GRID[1], 0) in plan.missing()
    assert ResnetTrial(BASELINE, 1, GRID[1], 0) not in plan.missing()


def test_many_problems_are_combined_as_one_is():
    gradients = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = adasum_steps.adasum_of(gradients)
    for at in range(3):
        (alone,) = combine([[of_rank[at]] for of_rank in gradients])
        torch.testing.assert_close(together[at], alone)


def test_both_sides_come_to_an_optimum_that_all_ranks_share():
    """In a hundred steps with a fit rate nearly all of the excess is gone."""
    for side in (MEAN, ADASUM):
        assert min(adasum_steps.least_squares(0, side, 0.0, 0.5, 100)) < 1e-3


@pytest.mark.processes
def test_trials_are_run_until_none_is_missing(tmp_path):
    store = store_of(tmp_path, ResnetTrial, ResnetOutcome)
    trials = [ResnetTrial(BASELINE, 1, 0.1, seed) for seed in range(3)]
    complete(store, lambda: [trial for trial in trials if store.get(trial) is None], outcome_of, 1)
    again = store_of(tmp_path, ResnetTrial, ResnetOutcome)
    assert [again.get(trial).test for trial in trials] == [0.0, 1.0, 2.0]


def outcome_of(trial):
    return ResnetOutcome(0.0, float(trial.seed), [], [], 0.0)
