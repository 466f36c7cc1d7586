"""Ray with three nodes, which are network namespaces: actors that Ray starts again, and a node that is to go."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine_clusters import RAY_DRIVER, RayCluster
from harness.engine_jobs import TrainingFolder, wait_until

pytestmark = [
    pytest.mark.engines,
    pytest.mark.processes,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: make test-engines"
    ),
]


@pytest.fixture
def ray_cluster(hosts: list, tmp_path: Path) -> Iterator[RayCluster]:
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as sessions:
        made = RayCluster(hosts[0], Path(sessions), tmp_path)
        for host in hosts[1:]:
            made.start_node(host)
        yield made
        for host in hosts:
            host.kill_all()


def test_actors_that_ray_starts_again(
    ray_cluster: RayCluster, hosts: list, training: TrainingFolder, tmp_path: Path, undisturbed: str
) -> None:
    for each in ("peers", "record"):
        (tmp_path / each).mkdir()
    setting = {
        "PACELINE_PEERS": f"file:{tmp_path / 'peers'}",
        "PACELINE_NODES": "2:3",
        "PACELINE_MIN_RANKS": "1",
        "PACELINE_TOKEN": "a secret",
        "PACELINE_JOB": "ray",
        "PACELINE_JOB_FOLDER": str(tmp_path / "record"),
        "PACELINE_JOIN_TIMEOUT": "240",
    }
    (tmp_path / "driver.py").write_text(RAY_DRIVER)
    (tmp_path / "ranks").write_text("3")
    driver = [sys.executable, str(tmp_path / "driver.py"), ray_cluster.address, str(tmp_path)]
    run = hosts[0].start([*driver, *training.command], SETTING=json.dumps(setting))
    training.wait_for_ranks(3)
    node1, node2 = hosts[1:3]

    # The process of an actor dies. Ray starts the actor again.
    victim = next(log.name for log in training.logs() if log.name.startswith(node1.name))
    training.kill_in_a_step(victim)
    training.wait_for_ranks(2)
    assert len(training.repeated()) == 1, training.what_happened()
    training.wait_for_ranks(3)

    # A node is lost. Another one takes its place, at another address, and Ray starts the actor there.
    node1.lose_power()
    training.wait_for_ranks(2)
    assert len(training.repeated()) == 2, training.what_happened()
    node1.move_to("10.77.0.40")
    ray_cluster.start_node(node1)
    training.wait_for_ranks(3)

    # A node is to go soon, as a function of the script says. Its rank leaves, and nothing is computed again.
    (tmp_path / f"notice-{node2.address}").touch()
    training.wait_for_ranks(2)
    codes = tmp_path / "codes"
    wait_until(lambda: codes.exists() and json.loads(codes.read_text()) == [143], training.what_happened)
    (tmp_path / f"notice-{node2.address}").unlink()
    training.wait_for_ranks(3)
    training.let_it_end()
    assert run.wait() == 0
    assert json.loads(codes.read_text()) == [143, 0, 0, 0]
    assert len(training.repeated()) == 2, training.what_happened()
    assert not any(log.saved for log in training.logs())
    training.check_once()
    assert training.parameters() == undisturbed
