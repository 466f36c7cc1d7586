"""`paceline emulate` as a user types it: real Gloo jobs on real clusters, broken on purpose, and nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from harness import warm
from harness.terminal import alive, paceline, started
from paceline.cli import main
from paceline_lab.emulation import ClusterSpec, EmulatedCluster

pytestmark = pytest.mark.timeout(150)
# Where it, or its laboratory, is the very process that is killed: fresh interpreters. What runs on the hosts is warm.
COLD = """\
import sys, types
from paceline.cli import main
from paceline_lab.emulation import cluster_job
cluster_job.sys = types.SimpleNamespace(executable=sys.argv.pop(1), path=sys.path)
main(sys.argv[1:])
"""
REAL = sys.executable

TRAIN = """\
import os, socket, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from paceline import DistributedDataParallel as DDP

steps, timeout_s = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
rank = dist.get_rank()
model = DDP(torch.nn.Linear(100, 100, bias=False))
for step in range(steps):
    model.zero_grad()
    model(torch.full((1, 100), float(rank + 1))).sum().backward()
    if step == 3:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        words = [*(os.environ[name] for name in names), socket.gethostname(), model.module.weight.grad[0, 0].item()]
        sys.stdout.write(" ".join(map(str, words)) + "\\n")
        sys.stdout.flush()
dist.destroy_process_group()
"""
SLEEPS = """\
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
os.write(1, b"ready\\n")
time.sleep(600)
"""
FAILS = """\
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("the user's own mistake")
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _warm(monkeypatch):
    """What runs on a host of a cluster that a test opens itself starts without importing, too."""
    monkeypatch.setattr(sys, "executable", str(warm.folder() / "python"))


@pytest.fixture
def scripts(tmp_path):
    """A folder with a few small scripts."""
    texts = {"train.py": TRAIN, "sleeps.py": SLEEPS, "fails.py": FAILS, "throttles": "9s host1 cores 25%"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def _groups():
    return {str(path) for path in Path("/sys/fs/cgroup").glob("**/paceline-emulate-*") if path.is_dir()}


def _networks(processes="[0-9]*"):
    """Every network namespace that one of the processes is in; by default, of all that there are."""
    found = set()
    for folder in Path("/proc").glob(str(processes)):
        try:
            found.add((folder / "ns" / "net").readlink().name)
        except OSError:
            continue
    return found


def _eventually(condition):
    """Poll what the kernel does by itself; there is nothing to wait on."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.slow
def test_a_job_on_two_hosts_is_what_it_would_be_on_two_machines(possible, scripts):
    """Ranks, unequal local ranks and host names are honest, the gradient is the mean, the summary counts."""
    hosts, links = ["--hosts", "2", "--ranks-per-host", "3,1"], ["--rate", "500Mbit", "--loss", "0.1%"]
    (scripts / "scenario").write_text("0s host1 rate 400Mbit # at once\n500s all loss 50%\n")
    words = [*hosts, *links, "--scenario", "scenario", "--json", "--", "train.py", "5", "60"]
    done = paceline("emulate", *words, cwd=scripts)
    assert done.code == 0, done.err
    said = sorted(
        line for line in done.err.splitlines() if "rank" in line and "host" in line and "2.5" in line
    )
    assert said == [
        "[host0 rank 0] 0 4 0 3 0 host0 2.5",
        "[host0 rank 1] 1 4 1 3 0 host0 2.5",
        "[host0 rank 2] 2 4 2 3 0 host0 2.5",
        "[host1 rank 3] 3 4 0 1 1 host1 2.5",
    ]
    assert re.search(r"^\[scenario\] \d+\.\d s: host1 rate 400 Mbit/s$", done.err, re.MULTILINE)
    assert "[scenario] 1 of 2 change(s) did not happen: the job had ended" in done.err
    outcome = json.loads(done.out)
    assert outcome["exit_codes"] == [0, 0]
    assert outcome["spec"]["congestion_control"] == "cubic"
    assert outcome["spec"]["loss_ratio"] == [0.001, 0.001]
    gradient_bytes = 5 * 100 * 100 * 4
    assert all(counted["sent_bytes"] > gradient_bytes for counted in outcome["counters"])
    assert "segmentation offload off" in done.err
    assert list((scripts / "tmp").iterdir()) == []


@pytest.mark.lab
@pytest.mark.slow
def test_a_link_that_goes_down_ends_the_job_with_both_ranks_words(possible, scripts, monkeypatch):
    """In mid-run the plug of host 1 is pulled: both ranks raise, and the outcome says which host went first."""
    monkeypatch.chdir(scripts)
    lines = []
    with EmulatedCluster(ClusterSpec.parse(hosts=2, rate="100Mbit")) as cluster:

        def pull_the_plug(host, rank, text):
            lines.append(text)
            if text.startswith("0 2 0 1 0"):
                cluster.hosts[1].set_link(up=False)

        outcome = cluster.run(["train.py", "1000000", "5"], on_line=pull_the_plug, timeout_s=100)
        errors = [line for line in lines if "PeerLostError: rank" in line]
        assert len(errors) == 2, lines
        assert any(
            "rank 0 was waiting" in line and "(process" in line and "on host1" in line for line in errors
        )
        assert outcome.exit_codes == (1, 1)
        assert not outcome.timed_out
        assert f"host{outcome.failed_host} failed first (exit code 1)" in outcome.failure()


@pytest.mark.slow
@pytest.mark.parametrize("also_the_laboratory", [False, True])
def test_nothing_survives_sigkill(possible, scripts, also_the_laboratory):
    """Processes and namespaces go at once; where the laboratory died as well, the next start removes the rest."""
    words = ["emulate", "--hosts", "2", "--cpu", "200%", "--rate", "1Gbit", "--", "sleeps.py"]
    with started([REAL, "-c", COLD, sys.executable, *words], scripts) as process:
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        # Only its own: other tests open clusters meanwhile.
        ours = set().union(*map(_networks, alive(process))) - _networks("self")
        assert len(ours) >= 3  # two hosts and their switch
        name = "paceline_lab.emulation.laboratory"
        laboratory = [pid for pid, command in alive(process).items() if name in command]
        process.kill()
        if also_the_laboratory:
            os.kill(min(laboratory), signal.SIGKILL)
        _eventually(lambda: not alive(process))
        _eventually(lambda: not ours & _networks())
    if also_the_laboratory:
        done = paceline("emulate", "--clean", cwd=scripts)
        assert f".{process.pid}." in done.out
    _eventually(lambda: not any(f".{process.pid}." in group for group in _groups()))
    assert not [path for path in (scripts / "tmp").iterdir() if path.name.startswith("paceline-")]


@pytest.mark.slow
def test_an_interrupt_ends_everything_in_order(possible, scripts):
    words = ["emulate", "--hosts", "2", "--cpu", "200%", "--", "sleeps.py"]
    with started([REAL, "-c", COLD, sys.executable, *words], scripts) as process:
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err.endswith("paceline: SIGINT received; every host and rank was stopped.\n")
        assert not alive(process)
    assert not any(f".{process.pid}." in group for group in _groups())
    assert list((scripts / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job_and_is_named(possible, scripts, monkeypatch):
    """The other host, asleep, is stopped after a grace; here none."""
    monkeypatch.setattr("paceline_lab.emulation.cluster_job.GRACE_S", 0.0)
    monkeypatch.chdir(scripts)
    lines = []
    with EmulatedCluster(ClusterSpec.parse(hosts=2)) as cluster:
        outcome = cluster.run(["fails.py"], on_line=lambda *line: lines.append(line))
    assert outcome.exit_code == 1
    assert outcome.exit_codes == (None, 1)
    assert outcome.failed_host == 1
    assert (1, 1, "the user's own mistake") in lines
    assert "host1 failed first (exit code 1)" in outcome.failure()
    assert "host0 had to be stopped" in outcome.failure()


@pytest.mark.slow
def test_a_job_can_be_given_a_time_limit(possible, scripts, monkeypatch):
    monkeypatch.chdir(scripts)
    with EmulatedCluster(ClusterSpec.parse(hosts=1)) as cluster:
        outcome = cluster.run(["sleeps.py"], on_line=lambda *_: None, timeout_s=0.5)
    assert outcome.timed_out
    assert outcome.exit_code == 124
    assert "the time was up after" in outcome.failure()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hosts", "0", "--", "fails.py"], "--hosts 0 is not possible"),
        (["--loss", "200%", "--", "fails.py"], "--loss 200% is not possible"),
        (["--rate", "100", "--", "fails.py"], "--rate 100 has no unit"),
        (["--cpu", "50%,50%,50%", "--", "fails.py"], "--cpu 50%,50%,50% holds 3 values for 2 host(s)"),
        (["--timeout", "0", "--", "fails.py"], "--timeout 0 is not a time for a job"),
        (["--", "nowhere.py"], "there is no script nowhere.py"),
        (["--", "-m", "no_such_module_here"], "there is no module no_such_module_here"),
        (["--hosts", "2"], "no script to run"),
        (["--", "-m"], "no script to run"),
        (["--congestion-control", "westwood9", "--", "fails.py"], "westwood9 is not loaded here"),
        (["--hosts", "1", "--check"], "--check measures between hosts"),
        (["--ranks-per-host", "2,1,1", "--", "fails.py"], "holds 3 values for 2 host(s)"),
        (["--ranks-per-host", "2,none", "--", "fails.py"], "--ranks-per-host 'none' is not a whole number"),
        (["--scenario", "nowhere", "--", "fails.py"], "--scenario nowhere cannot be read"),
        (["--scenario", "fails.py", "--", "fails.py"], "fails.py, line 1: the time 'import' is not a time"),
        (["--scenario", "throttles", "--", "fails.py"], "Pass --cpu, for example --cpu 200%"),
        (["--scenario", "throttles", "--cpu", "100%", "--check"], "Leave out --scenario, or --check"),
        (["--host", "2", "--", "fails.py"], "No such option: --host"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(words, says, scripts, capsys, monkeypatch):
    def never(*_, **__):
        raise AssertionError("something was started")

    monkeypatch.setattr("paceline_lab.emulation.cluster.subprocess.Popen", never)
    monkeypatch.chdir(scripts)
    with pytest.raises(SystemExit) as left:
        main(["emulate", *words])
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("paceline: ")
    assert err.count("\n") == 1
    assert says in err


def test_without_pyroute2_it_says_what_to_install(scripts, capsys, monkeypatch):
    monkeypatch.setattr("paceline_lab.emulation.cluster.importlib.util.find_spec", lambda _: None)
    monkeypatch.chdir(scripts)
    with pytest.raises(SystemExit) as left:
        main(["emulate", "--", "fails.py"])
    assert left.value.code == 1
    assert "pip install pyroute2" in capsys.readouterr().err


@pytest.mark.processes
def test_help_imports_neither_torch_nor_pyroute2(scripts):
    done = paceline("emulate", "--help", cwd=scripts, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.code == 0
    assert " torch" not in done.err
    assert "pyroute2" not in done.err
    assert "--ranks-per-host" in done.out
