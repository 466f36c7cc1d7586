"""The study of bounded loss: what its patterns lose, and that runs are reproducible."""

import numpy as np
import pytest

from paceline.errors import ConfigurationError
from paceline.lab.studies import loss_bound
from paceline.lab.studies.loss_bound import BURST, PATTERNS, QUICK, TAIL, Case, LossOptions, LossStudy
from paceline.lab.studies.tasks import TASKS


@pytest.mark.parametrize("pattern", PATTERNS)
def test_of_every_transfer_exactly_the_bound_is_lost(pattern):
    lose = loss_bound.loss_pattern(Case(0.1, pattern), seed=0)
    lost = [lose(collective, 0, 1, 50) for collective in range(30)]
    assert {each.sum() for each in lost} == {5}
    assert (lost[0] == loss_bound.loss_pattern(Case(0.1, pattern), seed=0)(0, 0, 1, 50)).all()
    if pattern == TAIL:
        assert all(each[45:].all() for each in lost)
        return
    assert np.any(lost, axis=0).mean() > 0.9, "over time everything is hit"
    runs = [int(np.abs(np.diff(np.concatenate([each, each[:1]]).astype(int))).sum()) for each in lost]
    assert (max(runs) == 2) == (pattern == BURST)


def test_less_than_a_chunk_is_lost_now_and_then():
    lose = loss_bound.loss_pattern(Case(0.02), seed=0)
    assert 0.01 < np.mean([lose(number, 1, 0, 10) for number in range(500)]) < 0.03


def test_a_run_is_reproducible_and_loss_without_compensation_shows():
    samples = TASKS[QUICK.model].load(None, QUICK.num_train)
    case = Case(0.9, TAIL, "none")
    one, again, exact = (loss_bound.train(each, 0, QUICK, samples) for each in (case, case, Case(0.0)))
    assert one == again < exact - 5


def test_findings_say_which_bound_is_harmless():
    options = LossOptions(bounds=(0.0, 0.1, 0.2), patterns=(TAIL,), compensations=("none",))
    outcomes = {Case(0.0): [80.0, 81.0], Case(0.1, TAIL, "none"): [80.2], Case(0.2, TAIL, "none"): [70.0]}
    findings = LossStudy().find(outcomes, options)
    assert findings.summaries["harmless_up_to"] == {"tail, none": 0.1}
    assert findings.rows[0][:3] == ("none", "", "80.5 ± 0.7")


def test_options_that_cannot_be_are_refused():
    for wrong in ({"model": "vgg"}, {"bounds": (0.1,)}, {"num_train": 1000}):
        with pytest.raises(ConfigurationError):
            LossOptions(**wrong)
