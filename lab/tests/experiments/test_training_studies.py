"""Studies that train: which trainings they ask for next, and the samples that they make."""

import pytest
import torch

from paceline_lab.experiments.accuracy import resnet_batches
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


@pytest.mark.processes
def test_trials_are_run_until_none_is_missing(tmp_path):
    store = store_of(tmp_path, ResnetTrial, ResnetOutcome)
    trials = [ResnetTrial(BASELINE, 1, 0.1, seed) for seed in range(3)]
    complete(store, lambda: [trial for trial in trials if store.get(trial) is None], outcome_of, 1)
    again = store_of(tmp_path, ResnetTrial, ResnetOutcome)
    assert [again.get(trial).test for trial in trials] == [0.0, 1.0, 2.0]


def outcome_of(trial):
    return ResnetOutcome(0.0, float(trial.seed), [], [], 0.0)
