"""torchrun per node on three hosts: a rank dies, the host that began is lost and moves, another one is told to go."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from harness.engine_jobs import TrainingFolder

pytestmark = [pytest.mark.engines, pytest.mark.processes, pytest.mark.timeout(3600)]


def test_torchrun_per_node(training: TrainingFolder, hosts: list, undisturbed: str, tmp_path: Path) -> None:
    three_hosts = hosts[:3]
    for each in ("peers", "record"):
        (tmp_path / each).mkdir()
    setting = {
        "PACELINE_PEERS": f"file:{tmp_path / 'peers'}",
        "PACELINE_NODES": "2:3",
        "PACELINE_MIN_RANKS": "2",
        "PACELINE_TOKEN": "a secret",
        "PACELINE_JOB": "torchrun",
        "PACELINE_JOB_FOLDER": str(tmp_path / "record"),
        "PACELINE_JOIN_TIMEOUT": "240",
    }
    command = ["torchrun", "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "9", *training.command]
    runs = [host.start(command, **setting) for host in three_hosts]
    training.wait_for_ranks(6)

    # A rank dies. torchrun ends the other one of its host by SIGTERM, and starts both again.
    training.kill_in_a_step("host1-1")
    training.wait_for_ranks(4)
    (lost,) = training.repeated()
    training.wait_for_ranks(6)

    # The host on which a job without Paceline would depend is lost, and its successor has another address.
    three_hosts[0].lose_power()
    training.wait_for_ranks(4)
    assert len(training.repeated()) == 2, training.what_happened()
    three_hosts[0].move_to("10.77.0.40")
    runs[0] = three_hosts[0].start(command, **setting)
    training.wait_for_ranks(6)

    # A host is told to go: nothing is computed again, and its ranks make no checkpoint, as enough stay.
    runs[2].send_signal(signal.SIGTERM)
    training.wait_for_ranks(4)
    runs[2].wait()
    three_hosts[2].wait_until_empty()
    training.let_it_end()
    assert [runs[0].wait(), runs[1].wait()] == [0, 0]
    assert len(training.repeated()) == 2, training.what_happened()
    assert lost in training.repeated()
    assert not any(log.saved for log in training.logs())
    training.check_once()
    assert training.parameters() == undisturbed
    for host in three_hosts:
        host.wait_until_empty()

    # A host that its engine starts after the end has nothing to train.
    late = three_hosts[2].start(command, **setting)
    assert late.wait() == 0
    training.check_once()
