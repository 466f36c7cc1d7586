"""Ray with three nodes, which are network namespaces: actors that Ray starts again, and a node that is to go."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine_jobs import TrainingFolder, wait_until

pytestmark = [
    pytest.mark.engines,
    pytest.mark.processes,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: make test-engines"
    ),
]

# Each rank is an actor. Ray starts an actor whose process was lost again, and calls `train` again. An actor whose node
# goes soon returns 143, and another one takes its place.
DRIVER = """
import json, os, pathlib, runpy, sys
import ray

address, folder, script = sys.argv[1:]
ray.init(address=address, log_to_driver=False)

@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")
class Rank:
    def train(self, number, setting):
        node = ray.util.get_node_ip_address()
        os.environ.update(setting, PACELINE_LOCAL_ADDR=node, LOCAL_RANK=str(number))
        sys.argv = [script, folder]
        notice = pathlib.Path(folder, f"notice-{node}").exists
        try:
            runpy.run_path(script, init_globals={"notice": notice}, run_name="__main__")
        except SystemExit as left:
            return left.code
        return 0

actors = {}
def begin(number):
    actor = Rank.remote()
    actors[number] = actor
    return actor.train.remote(number, json.loads(os.environ["SETTING"]))

waits = {begin(number): number for number in range(3)}
codes = []
while waits:
    (ended,), _ = ray.wait(list(waits), num_returns=1)
    number = waits.pop(ended)
    codes.append(ray.get(ended))
    pathlib.Path(folder, "codes").write_text(json.dumps(codes))
    if codes[-1] == 143:
        waits[begin(number)] = number
"""


class RayCluster:
    """A cluster of Ray: a head, and three nodes with a core each. Of two, not any could go on alone."""

    def __init__(self, hosts: list, sessions: Path) -> None:
        self.hosts, self._sessions = hosts, sessions
        self.address = f"{hosts[0].address}:6379"
        self._common = ["--disable-usage-stats", "--block", "--object-store-memory=80000000"]

    def start(self, index: int) -> None:
        host = self.hosts[index]
        head = [
            "--head",
            "--port=6379",
            "--num-cpus=0",
            "--include-dashboard=false",
            f"--temp-dir={self._sessions}",
        ]
        which = head if index == 0 else [f"--address={self.address}", "--num-cpus=1"]
        # Ray gives a node 30 s to start, which no option changes. On a busy machine it may need more, so try again.
        again = ["sh", "-c", 'until "$@"; do sleep 1; done', "sh"]
        ray = [*again, sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
        setting = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_worker_niceness": "0"}  # 15 by default
        host.start([*ray, f"--node-ip-address={host.address}", *self._common, *which], **setting)


@pytest.fixture
def ray_cluster(hosts: list, tmp_path: Path) -> Iterator[RayCluster]:
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as sessions:
        made = RayCluster(hosts, Path(sessions))
        made.start(0)
        out = tmp_path / f"out-{hosts[0].name}"
        wait_until(lambda: "Ray runtime started" in out.read_text(), out.read_text)
        for index in (1, 2, 3):
            made.start(index)
        yield made
        for host in hosts:
            host.kill_all()


def test_actors_that_ray_starts_again(
    ray_cluster: RayCluster, training: TrainingFolder, tmp_path: Path, undisturbed: str
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
    (tmp_path / "driver.py").write_text(DRIVER)
    driver = [sys.executable, str(tmp_path / "driver.py"), ray_cluster.address, *reversed(training.command)]
    run = ray_cluster.hosts[0].start(driver, SETTING=json.dumps(setting))
    training.wait_for_ranks(3)
    node1, node2 = ray_cluster.hosts[1:3]

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
    ray_cluster.start(1)
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
