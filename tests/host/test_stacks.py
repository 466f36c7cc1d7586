"""Where another process is, read from outside: real processes that sleep, hold the GIL, or are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.host import stacks
from paceline.host.processes import activity_of, family_of, state_of
from paceline.host.stacks import kernel_words, stack_of

pytestmark = pytest.mark.processes

STUCK = """\
import ctypes, sys, time
from pathlib import Path
from paceline.host.stacks import answer_signals
if sys.argv[1] != "-":
    answer_signals(Path(sys.argv[1]))
def stuck():
    print("ready", flush=True)
    {}
stuck()
"""
SLEEPS = "time.sleep(600)"
HOLDS_THE_LOCK = "ctypes.PyDLL(None).sleep(600)"


@pytest.fixture
def stuck(tmp_path):
    """Start a process that is stuck; a function of its last line, and of the folder in which it answers."""
    started = []

    def start(how, folder="-"):
        with (tmp_path / "stderr").open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", STUCK.format(how), str(folder)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _without_py_spy(monkeypatch):
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)


@pytest.mark.parametrize("how", [SLEEPS, HOLDS_THE_LOCK], ids=["sleeps", "holds the GIL"])
@pytest.mark.parametrize("has_py_spy", [True, False])
def test_the_function_that_does_not_return(how, has_py_spy, stuck, tmp_path, monkeypatch):
    if has_py_spy and stacks.py_spy() is None:
        pytest.skip("py-spy is not installed")
    if not has_py_spy:
        _without_py_spy(monkeypatch)
    process = stuck(how, tmp_path)
    until_s = time.monotonic() + 30
    while not kernel_words(process.pid).startswith("sleeps") and time.monotonic() < until_s:
        time.sleep(0.01)
    found = stack_of(process.pid, tmp_path)
    assert found.frames[0].function == "stuck"
    assert found.frames[0].line == 8
    assert found.by == ("py-spy" if has_py_spy else "faulthandler, after a signal")
    assert found.kernel.startswith("sleeps")
    if has_py_spy or how == SLEEPS:  # a signal ends a sleep in C, which is why it comes last
        assert process.poll() is None


def test_a_process_that_answers_no_signal_is_sent_none(stuck, tmp_path, monkeypatch):
    """The signal would end it."""
    _without_py_spy(monkeypatch)
    process = stuck(SLEEPS)
    found = stack_of(process.pid, tmp_path)
    assert found.frames == ()
    assert "py-spy is not installed" in found.by
    assert "it does not answer signals" in found.by
    assert process.poll() is None


def test_a_stopped_process_stays_stopped(stuck, tmp_path):
    process = stuck(SLEEPS, tmp_path)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    found = stack_of(process.pid, tmp_path)
    assert found.kernel == f"is stopped by a signal (kill -CONT {process.pid} continues it)"
    assert state_of(process.pid) == "T"
    process.send_signal(signal.SIGCONT)


def test_a_process_that_is_gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert stack_of(process.pid).frames == ()
    assert kernel_words(process.pid) == ""
    assert activity_of(process.pid).on_core_s == 0


def test_who_computes_is_active_and_who_sleeps_is_not(stuck):
    sleeps, computes = stuck(SLEEPS), stuck("while True: pass")
    before = {process.pid: activity_of(process.pid) for process in (sleeps, computes)}
    until_s = time.monotonic() + 60
    elapsed_s, began_s = 0.0, time.monotonic()
    while time.monotonic() < until_s:
        elapsed_s = time.monotonic() - began_s
        if elapsed_s > 0.3 and activity_of(computes.pid).has_done_something(before[computes.pid], elapsed_s):
            break
    assert activity_of(computes.pid).has_done_something(before[computes.pid], elapsed_s)
    assert not activity_of(sleeps.pid).has_done_something(before[sleeps.pid], elapsed_s)


def test_children_count(stuck):
    process = stuck("import subprocess; subprocess.run(['sleep', '600'])")
    until_s = time.monotonic() + 30
    while len(family_of(process.pid)) < 2 and time.monotonic() < until_s:
        time.sleep(0.01)
    parent, child = family_of(process.pid)
    assert parent == process.pid
    os.kill(child, signal.SIGKILL)


def test_a_frame_of_the_users_own():
    own = stacks.Frame("train", "/home/me/train.py", 3)
    assert own.is_of_user
    assert str(own) == "train (me/train.py:3)"
    for file in (
        "/x/site-packages/torch/a.py",
        "/usr/lib/python3/dist-packages/b.py",
        Path(stacks.__file__).as_posix(),
    ):
        assert not stacks.Frame("f", file, 1).is_of_user
