"""Rates over time: exact where the paper gives a formula, and refused where they cannot be."""

import itertools
import math

import pytest

from paceline.errors import ConfigurationError
from paceline_recipes import Curve, rate_factor
from paceline_recipes.learning_rate import DECAYS

REFERENCE, PEAK = 0.1, 0.8


def test_gradual_warmup_is_the_papers():
    """Lr = η + (kη - η) i / W at every step i; kη from W on; equal to the formula to the last bit."""
    curve = Curve(total=50, warmup=10)
    seen = [curve.rate(i, REFERENCE, PEAK) for i in range(50)]
    for i, rate in enumerate(seen):
        assert rate == (REFERENCE + (0.8 - REFERENCE) * (i / 10) if i < 10 else 0.8)
    assert seen[0] == 0.1
    assert seen[5] == pytest.approx(0.45, abs=1e-16)
    assert seen[10] == 0.8


@pytest.mark.parametrize(
    ("kind", "at_start", "before_the_end"), [("constant", REFERENCE, REFERENCE), ("none", PEAK, PEAK)]
)
def test_other_warmups(kind, at_start, before_the_end):
    """Constant is the reference rate, then a jump; none is the peak from the start."""
    curve = Curve(total=50, warmup=10, warmup_kind=kind)
    assert curve.rate(0, REFERENCE, PEAK) == at_start
    assert curve.rate(9.99, REFERENCE, PEAK) == before_the_end
    assert curve.rate(10, REFERENCE, PEAK) == PEAK


def test_a_smaller_batch_than_the_reference_needs_no_warmup():
    """Warming up downwards would start with a rate that is too large."""
    curve = Curve(total=50, warmup=10)
    assert {curve.rate(time, 0.1, 0.05) for time in range(50)} == {0.05}


@pytest.mark.parametrize(
    ("decay", "at_middle", "at_end"),
    [
        ("none", 1.0, 1.0),
        ("linear", 0.5, 0.0),
        ("cosine", 0.5, 0.0),
        ("polynomial", 0.25, 0.0),
        ("sqrt", math.sqrt(10 / 50), math.sqrt(10 / 90)),
        ("step", 1 / 10, 1 / 1000),
        (lambda time, warmup, total: 1 - (time - warmup) / total, 1 - 40 / 90, 1 - 80 / 90),
    ],
)
def test_decays(decay, at_middle, at_end):
    """1 at the end of the warm-up, the formula half way through what is left, and at the end; then no change."""
    curve = Curve(total=90, warmup=10, decay=decay)
    assert curve.rate(10, 0.0, 1.0) == 1.0
    assert curve.rate(50, 0.0, 1.0) == pytest.approx(at_middle, rel=1e-15, abs=1e-16)
    assert curve.rate(90, 0.0, 1.0) == pytest.approx(at_end, rel=1e-15, abs=1e-16)
    assert curve.rate(1000, 0.0, 1.0) == curve.rate(90, 0.0, 1.0)


def test_step_divides_by_ten_at_the_papers_epochs():
    """90 epochs: exactly a tenth from 30, 60 and 80 on, not a moment before."""
    curve = Curve(total=90, warmup=5, decay="step")
    for epoch, rate in ((29.99, 3.2), (30, 0.32), (59.99, 0.32), (60, 0.032), (79.99, 0.032), (80, 0.0032)):
        assert curve.rate(epoch, 0.1, 3.2) == pytest.approx(rate, rel=1e-15)


@pytest.mark.parametrize("decay", DECAYS)
def test_every_decay_never_rises(decay):
    """From the peak on; a new one in the table is tested by being there."""
    curve = Curve(total=100, warmup=7, decay=decay)
    rates = [curve.rate(time / 4, 0.1, 1.0) for time in range(28, 400)]
    assert all(after <= before for before, after in itertools.pairwise(rates))
    assert rates[0] == 1.0


def test_scaling_rules():
    """The factor for a batch k times the reference."""
    assert rate_factor("linear", 8192, 256) == 32
    assert rate_factor("sqrt", 4096, 256) == 4
    assert rate_factor("none", 4096, 256) == 1
    assert rate_factor("linear", 64, 256) == 0.25


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Curve(total=5, warmup=6), "longer than training"),
        (lambda: Curve(total=0), "total=0 is not a length"),
        (lambda: Curve(total=float("nan")), "total=nan is not a length"),
        (lambda: Curve(total=5, warmup=-1), "warmup=-1 is not a length"),
        (lambda: Curve(total=5, warmup_kind="slow"), "Give one of 'gradual', 'constant', 'none'"),
        (
            lambda: Curve(total=5, decay="exponential"),
            "'exponential' is not a curve. Give one of 'none', 'linear'",
        ),
        (lambda: Curve(total=5, decay=3), "3 is not a curve"),
        (lambda: Curve(total=5, decay="sqrt"), "warmup=0"),
        (
            lambda: Curve(total=9, warmup=5, decay="step"),
            "ends after the first step down, at a third of training (9)",
        ),
        (lambda: rate_factor("cubic", 1, 1), "'cubic' is not a rule"),
        (lambda: rate_factor("linear", 0, 256), "batch=0 is not a positive"),
        (lambda: rate_factor("linear", 256, -1), "reference_batch=-1 is not a positive"),
    ],
)
def test_refused(make, words):
    """What cannot be is said before training starts, with what to do instead."""
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert words in str(caught.value)
