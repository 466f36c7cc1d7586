"""Slurm with two nodes, which are network namespaces: srun, a rank that dies, an array whose task is queued again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine_clusters import Slurm
from harness.engine_jobs import TrainingFolder, wait_until
from harness.terminal import REPOSITORY

pytestmark = [
    pytest.mark.engines,
    pytest.mark.processes,
    pytest.mark.timeout(3600),
]


@pytest.fixture
def slurm(hosts: list, tmp_path: Path) -> Iterator[Slurm]:
    if shutil.which("slurmctld", path="/usr/sbin:/sbin:/usr/local/sbin") is None:
        pytest.skip("Slurm is not installed: make test-engines")
    controller, *nodes = hosts[:3]
    made = Slurm(controller, nodes, tmp_path / "slurm")
    for node in nodes:
        made.start_node(node)
    made.wait_for_nodes(2)
    yield made
    made.say("scancel", "--user=root")


def settings(tmp_path: Path, name: str) -> dict[str, str]:
    record = tmp_path / "record"
    record.mkdir()
    return {
        "PACELINE_PEERS": "slurm",
        "PACELINE_TOKEN": "a secret",
        "PACELINE_JOB_FOLDER": str(record),
        "PACELINE_JOIN_TIMEOUT": "240",
        "PACELINE_NODES": name,
    }


def test_a_rank_of_a_step_dies(
    slurm: Slurm, hosts: list, training: TrainingFolder, tmp_path: Path, undisturbed: str
) -> None:
    """The step goes on without it, because it is not told to end all tasks. It ends with the lost rank's code."""
    setting = settings(tmp_path, "2") | {"PACELINE_RANKS_PER_HOST": "2", "PACELINE_MIN_RANKS": "2"}
    options = ["--nodes=2", "--ntasks-per-node=2", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    name = 'ENGINE_HOST="$SLURMD_NODENAME" LOCAL_RANK="$SLURM_LOCALID" exec python "$@"'
    run = slurm.start(["srun", *options, "sh", "-c", name, "sh", *training.command], **setting)
    training.wait_for_ranks(4)
    training.kill_in_a_step("host1-0")
    training.wait_for_ranks(3)
    training.let_it_end()
    assert run.wait() == 137
    assert len(training.repeated()) == 1, training.what_happened()
    assert [log.has_ended for log in training.logs()].count(True) == 3
    training.check_once()
    assert training.parameters() == undisturbed
    for host in hosts[1:3]:
        wait_until(
            lambda host=host: (
                not any("train.py" in each or "paceline" in each for each in host.processes().values())
            ),
            lambda host=host: str(host.processes()),
        )


def test_an_array_whose_task_is_queued_again(
    slurm: Slurm, training: TrainingFolder, tmp_path: Path, undisturbed: str
) -> None:
    """The recipe: Slurm preempts a node, and later one reaches its time limit. Nothing is computed again for it."""
    recipe = (REPOSITORY / "examples" / "clusters" / "elastic.sbatch").read_text()
    for line in ("#SBATCH --gpus-per-node=8\n", "#SBATCH --cpus-per-task=64\n"):
        assert line in recipe
        recipe = recipe.replace(line, "")
    changes = {
        "--array=0-3": "--array=0-1",
        "PACELINE_NODES=2:4": "PACELINE_NODES=1:2",
        "--nproc-per-node 8": "--nproc-per-node 1",
        "train.py": " ".join(training.command),
    }
    for old, new in changes.items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    (tmp_path / "elastic.sbatch").write_text(recipe)
    setting = settings(tmp_path, "1:2")
    said = slurm.say("sbatch", "--parsable", str(tmp_path / "elastic.sbatch"), ENGINE_HOST="", **setting)
    job = said.strip()
    assert job.isdecimal(), said
    training.wait_for_ranks(2)

    slurm.say("scontrol", "requeue", f"{job}_1")  # as a preemption does: SIGTERM, then back into the queue
    training.wait_for_ranks(1)
    wait_until(lambda: slurm.job(f"{job}_1")["JobState"] == "PENDING", lambda: str(slurm.job(f"{job}_1")))
    slurm.run_now(f"{job}_1")
    training.wait_for_ranks(2)
    assert slurm.job(f"{job}_1")["Restarts"] == "1"

    # The time limit is near: Slurm tells the script.
    minutes = int(slurm.job(f"{job}_0")["RunTime"].split(":")[1]) + 2
    slurm.say("scontrol", "update", f"JobId={job}_0", f"TimeLimit={minutes}")
    training.wait_for_ranks(1)
    wait_until(lambda: slurm.job(f"{job}_0")["JobState"] == "PENDING", lambda: str(slurm.job(f"{job}_0")))
    assert slurm.job(f"{job}_0")["Restarts"] == "1"
    training.let_it_end()
    wait_until(lambda: slurm.job(f"{job}_1")["JobState"] == "COMPLETED", lambda: str(slurm.job(f"{job}_1")))
    assert not training.repeated(), training.what_happened()
    assert not any(log.saved for log in training.logs())
    training.check_once()
    assert training.parameters() == undisturbed

    # The task that is queued again finds that all is done.
    slurm.say("scontrol", "update", f"JobId={job}_0", "StartTime=now", "TimeLimit=200")
    wait_until(lambda: slurm.job(f"{job}_0")["JobState"] == "COMPLETED", lambda: str(slurm.job(f"{job}_0")))
    training.check_once()
