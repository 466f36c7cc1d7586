"""Nothing outlives a launch: whatever its processes did to their environment and sessions, whoever is killed."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.terminal import DEADLINE_S, started
from paceline.launch import watchdog

pytestmark = pytest.mark.processes

HIDES = """\
import ctypes, os, subprocess, sys, time
fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
start, end = int(fields[47]), int(fields[48])
ctypes.memset(start, 0, end - start)  # what setproctitle makes of the environment
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeps, env={"OWN": "1"}, start_new_session=True)
daemon = subprocess.run(
    ["sh", "-c", "setsid sleep 600 > /dev/null 2>&1 & echo $!"],
    env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE, text=True,
).stdout
os.write(1, f"{os.getpid()} {child.pid} {daemon}".encode())
time.sleep(600)
"""


def _process_is_there(pid):
    process = watchdog._process(pid)
    return process is not None and not process.is_over


def _eventually(holds):
    """Ask again until a deadline: after SIGKILL the watchdog works on its own, and nobody is told when it is done."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds() and time.monotonic() < deadline_s:
        select.select([], [], [], 0.05)
    assert holds()


def _watchdog_of(launcher):
    (found,) = (
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if f".{launcher}." in _command(folder) and "watchdog.py" in _command(folder)
    )
    return found


def _command(folder):
    with contextlib.suppress(OSError):
        return (folder / "cmdline").read_text()
    return ""


def _num_waits(pid):
    return int(
        re.search(
            r"^voluntary_ctxt_switches:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )[1]
    )


@pytest.mark.parametrize("received", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_ranks_that_hide_from_a_search_of_environments_end_with_their_launcher(received, tmp_path):
    """A rank whose environment is overwritten, its child with another one, its daemon: all are of the launch."""
    (tmp_path / "hides.py").write_text(HIDES)
    with started(["paceline", "run", "hides.py"], tmp_path, cold=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 3
        try:
            number = _watchdog_of(process.pid)
            waits = _num_waits(number)
            _eventually(lambda: _num_waits(number) > waits + 1)  # it has looked once more
            process.send_signal(received)
            process.wait(timeout=DEADLINE_S)
            _eventually(lambda: not any(map(_process_is_there, pids)))
            _eventually(lambda: not list((tmp_path / "tmp").iterdir()))
        finally:
            for pid in filter(_process_is_there, pids):
                os.kill(pid, signal.SIGKILL)


SLEEPS = """\
import os, time
os.write(1, b"ready\\n")
time.sleep(600)
"""


def test_a_launch_whose_watchdog_was_killed_clears_up_by_itself(tmp_path):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with started(["paceline", "run", "sleeps.py"], tmp_path, cold=True) as process:
        assert process.stdout.readline() == "ready\n"
        os.kill(_watchdog_of(process.pid), signal.SIGKILL)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=DEADLINE_S) == 128 + signal.SIGTERM
        assert list((tmp_path / "tmp").iterdir()) == []


def test_a_watchdog_outlives_the_signals_of_a_scheduler(tmp_path, monkeypatch):
    """Schedulers send SIGTERM to every process of a job; what is left to do is the watchdog's then."""
    monkeypatch.setattr(watchdog.tempfile, "gettempdir", lambda: str(tmp_path))
    launcher = watchdog.Watchdog("id")
    with launcher:
        waits = _num_waits(launcher._process.pid)
        _eventually(lambda: _num_waits(launcher._process.pid) > waits + 1)  # it is up
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            launcher._process.send_signal(number)
    assert launcher._process.returncode == 0


def test_a_zombie_owns_nothing(tmp_path, monkeypatch):
    """In a container nobody may ever wait for a killed launcher."""
    monkeypatch.setattr(watchdog.tempfile, "gettempdir", lambda: str(tmp_path))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as owner:
        folder = tmp_path / f"paceline-run-{watchdog._identity(owner.pid)}.someid"
        folder.mkdir()
        watchdog.remove_orphans()
        assert folder.is_dir()
        owner.stdin.close()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        watchdog.remove_orphans()
        assert not folder.exists()


def test_what_the_launcher_started_before_is_not_of_the_launch():
    """Nor are its watchdogs; a later child is, with a session and an environment of its own."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = [subprocess.Popen(sleeps)]
    try:
        own = os.getpid(), watchdog._start(os.getpid())
        kin = watchdog.LaunchProcesses("id", own, watchdog._children(os.getpid()))
        processes.append(subprocess.Popen(sleeps, env={}, start_new_session=True))
        kin.look()
        assert watchdog.LaunchProcesses.from_words(kin.words).living() == kin.living() == [processes[1].pid]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_folders_lie_where_whoever_makes_the_host_wants_them(tmp_path, monkeypatch):
    monkeypatch.setenv(watchdog.PLACE, str(tmp_path))
    with watchdog.Watchdog("launch") as dog:
        assert dog.folder.parent == tmp_path
        assert dog.folder.is_dir()
    assert list(tmp_path.iterdir()) == []
