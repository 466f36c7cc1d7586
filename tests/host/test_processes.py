"""What the kernel says of a process, while it lives and afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.host.processes import GONE, VitalSigns, activity_of, family_of, start_time_of, state_of
from paceline.host.stacks import _handles
from paceline.host.thread_times import CoreNeighbours
from paceline.launch.watchdog import LaunchProcesses

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


@pytest.mark.processes
def test_a_name_that_the_kernel_has_cut_within_a_letter_stops_nothing(tmp_path: Path) -> None:
    """Any process of the host may have it: recordings ended, and a watchdog left its launch's processes behind."""
    program = (
        tmp_path / "\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9"
    )  # two bytes each; the kernel keeps 15 of the 16
    shutil.copy("/bin/cat", program)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as process:
        name = Path(f"/proc/{process.pid}/comm")
        while not name.read_bytes().startswith("\u00e9".encode()):
            pass  # the kernel names it a moment after Popen has returned
        with pytest.raises(UnicodeDecodeError):
            name.read_text(encoding="utf-8")
        assert state_of(process.pid) in {"R", "S"}
        assert process.pid in family_of(os.getpid())
        assert not activity_of(process.pid).on_disk
        assert not _handles(process.pid, 10)
        CoreNeighbours().look()
        launch = LaunchProcesses("none", (1, ""), {})
        launch._known[process.pid] = start_time_of(process.pid)
        assert launch.living() == [process.pid]
        assert process.stdin is not None
        process.stdin.close()
