"""`paceline run` on several machines started by hand, each a host of an emulated cluster with ranks of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess

import pytest

from harness import terminal

pytestmark = pytest.mark.processes

SAYS = """\
import os, socket, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
words = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
sys.stdout.write(" ".join([*words, socket.gethostname(), str(len(os.environ["PACELINE_TOKEN"]))]) + "\\n")
dist.destroy_process_group()
"""


@pytest.fixture
def job(cluster, tmp_path):
    """Opens two hosts; returns what runs a shell command on one of them, and their addresses."""
    hosts = cluster(hosts=2).hosts
    (tmp_path / "says.py").write_text(SAYS)
    running = contextlib.ExitStack()

    def start(number, command):
        process = subprocess.Popen(
            hosts[number].command(["bash", "-c", command]),
            cwd=tmp_path,
            env=terminal.environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.callback(process.communicate)
        running.callback(process.kill)
        return process

    with running:
        yield start, [host.address for host in hosts]


def ended(process):
    """The code with which a process ended, and what it said."""
    out, _ = process.communicate(timeout=100)
    return process.returncode, out


@pytest.mark.slow
def test_the_first_machine_names_the_command_for_the_next(job):
    """Typed on a machine with another number of ranks, it makes one job; the job's token comes with it."""
    start, addresses = job
    first = start(1, "paceline run --nnodes 2 --nproc-per-node=1 says.py")
    says = [first.stdout.readline(), first.stdout.readline()]
    assert "this is the first machine" in says[0]
    command = says[1].removeprefix("paceline run:").strip()
    assert f"--rdzv-endpoint {addresses[1]}:29400" in command
    other = start(0, command.replace("--nproc-per-node=1", "--nproc-per-node=2"))
    codes, outs = zip(ended(first), ended(other), strict=True)
    assert codes == (0, 0), outs
    assert re.findall(r"^\d \d \d host\d \d+$", outs[0], re.MULTILINE) == ["2 3 1 host1 32"]
    assert sorted(re.findall(r"^\d \d \d host\d \d+$", outs[1], re.MULTILINE)) == [
        "0 3 2 host0 32",
        "1 3 2 host0 32",
    ]


@pytest.mark.slow
def test_machines_meet_by_a_file_and_one_that_does_not_fit_is_named(job, tmp_path):
    """Whoever comes first makes the file, with the job's token; it is gone with the job, also where nothing fits."""
    start, _ = job
    command = f"paceline run --nnodes 2 --rdzv-endpoint file://{tmp_path}/job --nproc-per-node"
    done = [ended(one) for one in (start(1, f"{command} 2 says.py"), start(0, f"{command} 1 says.py"))]
    assert [code for code, _ in done] == [0, 0], done
    assert "2 3 2 host1 32" in done[0][1]
    assert "0 3 1 host0 32" in done[1][1]
    assert not (tmp_path / "job").exists()

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "says.py").write_text(SAYS + "\n# changed\n")
    one, two = start(0, f"{command} 1 says.py"), start(1, f"cd other && {command} 1 says.py")
    for code, out in (ended(one), ended(two)):
        assert code == 1
        assert re.search(
            r"host\d does not fit host\d, where the launch began: the script is says.py \(digest", out
        )
        assert "Traceback" not in out
    assert not (tmp_path / "job").exists()
