"""Time to a loss with parameter servers: whose clock counts, and who pays for gradients that were lost."""

import pytest

from paceline_lab.experiments.reduction.servers_to_loss import (
    BOUNDED,
    EXACT,
    SERVERS,
    _together,
    _Trained,
    summarise,
)


def test_a_step_takes_from_the_last_beginning_to_the_last_end():
    """And what the first rank to begin has waited for the others is not of the side."""
    early = _Trained([0.0, 10.0], [3.0, 11.0], [2.0, 1.0], [0.0, 0.1])
    late = _Trained([1.0, 10.5], [2.5, 12.0], [4.0, 2.0], [0.0, 0.1])
    found = _together([(early, "same"), (late, "other")])
    assert found == {"steps_s": [2.0, 1.5], "loss": [3.0, 1.5], "lost": [0.0, 0.1], "ranks_equal": False}


def test_a_side_that_learns_less_in_a_step_pays_with_more_steps():
    """The slower learner sets the target; steps half as long that are twice as many gain nothing."""

    def trained(steps_s, losses):
        return {"steps_s": steps_s, "loss": losses, "lost": [0.0] * len(losses)}

    falling = [8.0 - step for step in range(8)]
    once = {
        SERVERS: trained([2.0] * 16, falling + [0.5] * 8),
        EXACT: trained([1.0] * 16, falling + [0.5] * 8),
        BOUNDED: trained([1.0] * 16, [loss for loss in falling for _ in range(2)]),
    }
    found = summarise([once, once])
    assert found["steps"][BOUNDED] == 14
    assert found["steps"][EXACT] < found["steps"][BOUNDED]
    assert found["to_tcp_servers"][EXACT] == pytest.approx(0.5)
    assert found["to_exact"][BOUNDED] == pytest.approx(14 / found["steps"][EXACT])
