"""The study of early delivery: its percentiles and ratios, and its sides in virtual time."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigurationError
from paceline_lab.experiments.datagrams import early_delivery
from paceline_lab.packet_network.leaf_spine import LeafSpine
from paceline_lab.packet_network.sides import Datagrams, Traffic, measure

pytestmark = pytest.mark.compiles


def _steps(*ms, lost=0.0):
    return [{"ms": value, "lost": lost} for value in ms]


def test_ratios_are_taken_within_a_round_and_percentiles_are_nearest_ranks():
    samples = {
        "Gloo": [{"ms": 10.0}, {"ms": 40.0}, {"ms": 30.0}],
        "bound 0": _steps(10.0, 20.0, 30.0),
        "bound 1 %": _steps(10.0, 10.0, 15.0, lost=0.01),
        "bound 1 %, early": _steps(5.0, 5.0, 15.0, lost=0.02),
    }
    found = early_delivery.summarise(samples)
    assert found["Gloo"] == {"p50_ms": 30.0, "p95_ms": 40.0, "p99_ms": 40.0, "of_bound_0": 1.0}
    assert found["bound 1 %, early"]["of_default"] == 0.5
    assert found["bound 1 %, early"]["lost_percent"] == 2.0
    hundred = early_delivery.summarise({"bound 0": _steps(*map(float, range(1, 101)))})["bound 0"]
    assert (hundred["p50_ms"], hundred["p95_ms"], hundred["p99_ms"]) == (50.5, 95.0, 99.0)


def test_early_spends_the_bound_where_nothing_is_lost():
    traffic = Traffic([[0, 1]], 16_000, False, repeats=1)
    late, early = (
        measure(Datagrams(0.4, is_early=is_early), LeafSpine(2), traffic, 1) for is_early in (False, True)
    )
    assert late.lost_ratio == 0.0
    assert 0.0 < early.lost_ratio <= 0.4
    assert early.job_ms[0] <= late.job_ms[0]


def test_a_push_is_only_simulated():
    with pytest.raises(ConfigurationError, match="--simulated"):
        early_delivery.main(push=True)
