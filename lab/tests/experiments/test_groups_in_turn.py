"""Process groups that take buckets in turn: what the simulator says of them."""

import math

import pytest

from paceline.errors import ConfigurationError
from paceline.planning.replay import Wire, replay
from paceline_lab.experiments.prediction.groups_in_turn import GroupsInTurn, shared_rates
from paceline_plan import Cluster, HostLink, LayerTimes, RecordedWorkload, simulate

MIB, RATE = 2**20, 1e8
WORKLOAD = RecordedWorkload(
    "made up", "made up", tuple(LayerTimes(f"{i}", 5e-6, 1e-5, (MIB,)) for i in range(10))
)


def test_groups_help_only_where_a_connection_cannot_fill_the_link() -> None:
    load = WORKLOAD
    no_latency = [
        Cluster((1,) * 4, (HostLink(RATE),) * 4, flow_bytes_per_s=limit) for limit in (math.inf, RATE / 3)
    ]
    steps = [
        [simulate(load, c, GroupsInTurn((MIB,), "ring", num_groups=n)).wire_s for n in (1, 3)]
        for c in no_latency
    ]
    assert steps[0][0] == steps[0][1]
    times = [
        [simulate(load, c, GroupsInTurn((MIB,), "ring", num_groups=n)).exposed_s for n in (1, 3, 5)]
        for c in no_latency
    ]
    assert times[0][1] == pytest.approx(times[0][0], rel=1e-3)
    assert times[1][0] == pytest.approx(3 * times[0][0], rel=1e-3)
    assert times[1][1] == pytest.approx(
        times[0][0], rel=0.35
    )  # ten buckets in three lanes: the last is alone


def test_links_are_shared_fairly() -> None:
    assert shared_rates([1.0, 1.0]) == [0.5, 0.5]
    assert shared_rates([0.1, 1.0, 1.0]) == pytest.approx([0.1, 0.45, 0.45])
    done = replay(
        [0.0, 0.0],
        [Wire(0.0, 1.0, 1.0), Wire(0.5, 1.0, 1.0)],
        0.0,
        arrive=GroupsInTurn(num_groups=2).arrivals_s,
    )
    assert done.arrivals_s == pytest.approx((1.5, 2.0))


def test_what_cannot_be_is_refused() -> None:
    for arguments in ({"num_groups": 0}, {"num_groups": 2, "priority": True}):
        with pytest.raises(ConfigurationError, match="groups in turn"):
            GroupsInTurn(**arguments)  # type: ignore[arg-type]
    assert GroupsInTurn(num_groups=3).describe().endswith("3 groups in turn")
