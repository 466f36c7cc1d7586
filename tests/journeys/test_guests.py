"""Elastic trainings whose ranks an engine starts, and what a signal does to these and to `paceline run --min-ranks`."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.terminal import environment, run, started
from paceline.elastic.guest import GuestSetting

# It trains 40 steps, and writes down each step with its samples, once the optimizer has stepped. In step 5, which is
# long, it waits for the test.
TRAIN = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import paceline
from paceline.data import GlobalBatch, GlobalShuffle

here = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(os.getpid())  # rank 0's parameters count
data = TensorDataset(torch.arange(240.0).unsqueeze(1))
shuffle = GlobalShuffle(data, GlobalBatch.of(24, ranks=3))
loader = DataLoader(data, batch_sampler=shuffle)
net = torch.nn.Linear(1, 1)
model = paceline.DistributedDataParallel(net, batch_sampler=shuffle)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)

def save():
    with (here / "saved").open("a") as file:
        file.write(f"{elastic.step}\\n")

elastic = paceline.Elastic(
    model, optimizer, sampler=shuffle, checkpoint=save, deterministic=True, notice=here / f"notice-{os.getpid()}"
)
log = (here / f"log-{os.getpid()}").open("w", buffering=1)
for epoch in range(shuffle.epoch, 4):
    for batches in elastic.steps(loader):
        with model.accumulate(batches) as micro_batches:
            for (x,) in micro_batches:
                model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if micro_batches.repeats:
            log.write("repeats\\n")
            continue
        log.write(f"{elastic.step} {[int(x) for (b,) in batches for x in b]}\\n")
        if elastic.step >= 5 and not (here / "goes on").exists():
            time.sleep(0.1)
if dist.get_rank() == 0:
    log.write(f"parameters {[each.tolist() for each in net.parameters()]}\\n")
"""


def steps_of(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step, over all ranks."""
    found: dict[int, list[int]] = {}
    for file in folder.glob("log-*"):
        for step, samples in re.findall(r"^(\d+) \[(.*)\]$", file.read_text(), re.MULTILINE):
            found.setdefault(int(step), []).extend(int(each) for each in samples.split(", ") if each)
    return found


def living_children(pid: int) -> list[str]:
    """Return the command lines of a process's children. Those that have ended have none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    words = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
    return [each for each in words if each]


def wait_for_step(folder: Path, step: int, num_ranks: int) -> None:
    """Wait until so many ranks have written down that step."""
    while sum(f"\n{step} [" in file.read_text() for file in folder.glob("log-*")) < num_ranks:
        pass


def check_once(folder: Path, num_steps: int) -> None:
    """Check that each of these steps was made once, and each sample trained once an epoch."""
    steps = steps_of(folder)
    assert sorted(steps) == list(range(num_steps))
    for epoch in range(num_steps // 10):
        samples = sorted(each for step in range(10 * epoch, 10 * epoch + 10) for each in steps[step])
        assert samples == list(range(240))


RUN = ["paceline", "run", "--nproc-per-node", "3", "--min-ranks", "2"]
TORCHRUN = ["torchrun", "--nnodes", "1", "--master-port", "0", "--nproc-per-node", "3"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (RUN, signal.SIGTERM, 143),
        (RUN, signal.SIGINT, 130),
        pytest.param([*RUN, "--peers", "local"], signal.SIGTERM, 143, marks=pytest.mark.lab),
        pytest.param(TORCHRUN, signal.SIGTERM, 1, marks=pytest.mark.lab),  # torch's own code for any signal
    ],
)
def test_a_signal_to_the_launcher_saves_and_leaves(
    tmp_path: Path, command: list[str], number: signal.Signals, code: int
) -> None:
    """All ranks leave between two steps: one makes a checkpoint, once. Nothing is computed again."""
    (tmp_path / "train.py").write_text(TRAIN)
    peers = {"PACELINE_PEERS": "local", "PACELINE_JOB": str(tmp_path)} if command is TORCHRUN else {}
    with started([*command, "train.py", str(tmp_path)], tmp_path, peers) as process:
        wait_for_step(tmp_path, 5, 3)
        process.send_signal(number)
        process.wait()
    assert process.returncode == code
    (saved,) = map(int, (tmp_path / "saved").read_text().split())
    logs = "".join(file.read_text() for file in tmp_path.glob("log-*"))
    assert "repeats" not in logs
    assert len(re.findall(rf"^{saved - 1} ", logs, re.MULTILINE)) == 3
    assert not re.findall(rf"^{saved} ", logs, re.MULTILINE)


@pytest.mark.processes
def test_launchers_of_two_hosts_find_each_other(tmp_path: Path) -> None:
    """The same command on each, by `--peers`. A rank dies, and another one starts. A late host exits with 0."""
    (tmp_path / "train.py").write_text(TRAIN)
    for name in ("peers", "record"):
        (tmp_path / name).mkdir()
    command = [
        "paceline",
        "run",
        "--ranks-per-host",
        "1",
        "--peers",
        f"file:{tmp_path / 'peers'}",
        "--nodes",
        "2",
    ]
    command += ["--min-ranks", "1", "--job", "two", "--job-folder", str(tmp_path / "record")]
    script = ["train.py", str(tmp_path)]
    with contextlib.ExitStack() as stack:
        here, there = (
            stack.enter_context(started([*command, "--local-addr", f"127.0.0.{i}", *script], tmp_path))
            for i in (1, 2)
        )
        wait_for_step(tmp_path, 5, 2)
        os.kill(min(int(file.name.removeprefix("log-")) for file in tmp_path.glob("log-*")), signal.SIGKILL)
        while len(list(tmp_path.glob("log-*"))) < 3:
            pass
        (tmp_path / "goes on").touch()
        said = "".join(each.communicate()[1] for each in (here, there))
    assert (here.returncode, there.returncode) == (0, 0), said
    assert "1 ranks go on after step" in said, said
    check_once(tmp_path, 40)
    late = run([*command, "--local-addr", "127.0.0.3", *script], tmp_path)
    assert (late.code, len(list(tmp_path.glob("log-*")))) == (0, 3), late.err
    assert "the job has ended well before" in late.err


@pytest.mark.processes
def test_a_script_without_elastic_says_that_nothing_is_elastic(tmp_path: Path) -> None:
    """Its process is alone, whatever its engine says. It says so although it has destroyed its group."""
    (tmp_path / "plain.py").write_text(
        "import paceline, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "paceline.DistributedDataParallel(torch.nn.Linear(1, 1))\n"
        "print(dist.get_world_size())\n"
        "dist.destroy_process_group()\n"
    )
    numbers = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = run(["python", "plain.py"], tmp_path, {"PACELINE_PEERS": "local", **numbers})
    assert (ended.code, ended.out) == (0, "1\n"), ended.err
    assert ended.err.count("this script made no paceline.Elastic") == 1
    launched = run(["paceline", "run", "--nproc-per-node", "2", "--peers", "local", "plain.py"], tmp_path)
    assert (launched.code, launched.out) == (0, "1\n1\n"), launched.err
    assert launched.err.count("plain.py made no paceline.Elastic") == 1


@pytest.mark.slow
@pytest.mark.processes
def test_a_shell_starts_ranks_of_which_one_dies_and_one_is_told_to_go(tmp_path: Path) -> None:
    """A loss costs a step, a notice none; parameters have the bits of a run that lost no rank. Nothing is left."""
    (tmp_path / "train.py").write_text(TRAIN)
    setting = {"PACELINE_PEERS": "local", "PACELINE_RANKS_PER_HOST": "3", "PACELINE_JOB": str(tmp_path)}
    ranks = []
    for _ in range(3):
        command = [sys.executable, "train.py", str(tmp_path)]
        env = environment(tmp_path, cold=True) | setting
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True))
    try:
        wait_for_step(tmp_path, 5, 3)
        assert not any(living_children(rank.pid) for rank in ranks)  # an engine may end them with the rank
        ranks[0].kill()
        ranks[0].wait()
        later = max(steps_of(tmp_path)) + 3  # without rank 0, however late it was killed
        wait_for_step(tmp_path, later, 2)
        (tmp_path / f"notice-{ranks[1].pid}").touch()
        assert ranks[1].wait() == 143
        (tmp_path / "goes on").touch()
        assert ranks[2].wait() == 0
    finally:
        said = []
        for rank in ranks:
            rank.kill()
            said.append(rank.communicate()[1])
    words = "".join(said)
    assert "2 ranks go on after step" in words, words
    assert "1 ranks go on after step" in words, words
    logs = {rank.pid: (tmp_path / f"log-{rank.pid}").read_text() for rank in ranks}
    assert sum(log.count("repeats") for log in logs.values()) <= 2  # one step, on two ranks
    assert "repeats" not in logs[ranks[1].pid].rpartition(f"\n{later} [")[2]
    check_once(tmp_path, 40)
    assert not (tmp_path / "saved").exists()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:  # the agent ends with its last rank
        while probe.connect_ex(GuestSetting(job=str(tmp_path)).socket_name) != errno.ECONNREFUSED:
            pass
