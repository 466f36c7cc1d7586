"""What the kernel says of a process, while it lives and afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.host.processes import GONE, VitalSigns

# Its main thread waits for input; another thread computes until it has used some ticks, and says so.
COMPUTES_ASIDE = """
import sys, threading, time
def compute():
    while time.thread_time() < 0.3:
        pass
    print("computed", flush=True)
threading.Thread(target=compute).start()
sys.stdin.read()
"""


@pytest.mark.processes
def test_a_main_thread_that_hangs_does_nothing_whatever_others_do() -> None:
    """A rank whose main thread hung had counted as busy: the thread that was to wake it tried again and again."""
    with subprocess.Popen(
        [sys.executable, "-c", COMPUTES_ASIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        signs = VitalSigns(process.pid)
        assert process.stdout.readline() == b"computed\n"
        before = signs.look()
        assert not before.is_ending
        with open(f"/proc/{process.pid}/stat") as whole:  # noqa: PTH123
            used = sum(map(int, whole.read().rsplit(")", 1)[1].split()[11:13]))
        assert used - before.cpu_ticks >= 20
        process.stdin.close()
        process.wait()
        assert (signs.look().state, signs.look().is_ending) == (GONE, True)
        signs.close()
