"""A short soak of unequal shares, with everything that the long one does."""

import pytest

from harness.ranks import pool
from paceline_lab.experiments.unequal.soak import Config, soak


def soak_some_epochs(_rank, _num_ranks):
    return soak(Config(num_steps=90, seed=2), lambda _: None)


@pytest.mark.lab
@pytest.mark.processes
def test_a_short_soak():
    """Shares, stalls, memory, restarts at random: no sample lost, no drift."""
    for found in pool(4).run(soak_some_epochs, deadline_s=180):
        assert found.num_epochs >= 2
        assert min(found.num_changes, found.num_repeats, found.num_restarts) > 0
        assert found.num_bad_epochs == found.num_drifts == 0
        assert found.difference < 1e-12
