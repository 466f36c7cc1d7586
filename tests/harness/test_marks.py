"""Marks say the truth: each that is declared is used, and pytest's own options keep their promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.terminal import REPOSITORY

MARK = re.compile(r"\bpytest\.mark\.(\w+)")
CLOCK = """
import pytest
tries = []

@pytest.mark.clock
@pytest.mark.parametrize("number", range({tests}))
def test_late(number):
    tries.append(number)
    assert tries.count(number) > 1, f"too late the first time: {{number}}"
"""
UNMARKED = """
import subprocess
import pytest

def test_plain():
    pass

def test_starts():
    subprocess.run(["true"])

@pytest.mark.processes
def test_says_so():
    subprocess.run(["true"])
"""


def test_each_declared_mark_is_used():
    """An undeclared mark is an error of pytest itself (`--strict-markers`)."""
    sources = [
        path
        for folder in (
            "tests",
            "adasum/tests",
            "lab/tests",
            "lossy/tests",
            "plan/tests",
            "recipes/tests",
            "servers/tests",
            "svm/tests",
        )
        for path in REPOSITORY.glob(f"{folder}/**/*.py")
    ]
    used = {name for path in sources if path != Path(__file__) for name in MARK.findall(path.read_text())}
    settings = (REPOSITORY / "pyproject.toml").read_text()
    section = re.search(r"^markers = \[\n(.*?)^\]", settings, re.DOTALL | re.MULTILINE)[1]
    declared = set(re.findall(r'^  "(\w+)', section, re.MULTILINE))
    assert declared
    assert not declared - used


def run_pytest(folder, source, *words):
    """Return pytest's output for one file with the plugins of this repository, and its exit code."""
    (folder / "test_it.py").write_text(source)
    declared = "markers = clock\n  processes\n  slow\n  lab\n  compiles\n"
    (folder / "pytest.ini").write_text(f"[pytest]\n{declared}addopts = --strict-markers\n")
    plugins = ["-p", "harness.start_guard", "-p", "harness.reruns", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", *plugins, *words],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY / "tests"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.processes
def test_a_rerun_is_printed_and_a_fourth_fails_the_run(tmp_path):
    """Each test passes at its second try."""
    code, said = run_pytest(tmp_path, CLOCK.format(tests=3))
    assert code == 0, said
    assert "3 reruns" in said
    assert "too late the first time: 2" in said
    code, said = run_pytest(tmp_path, CLOCK.format(tests=4))
    assert "4 passed" in said
    assert code == 1, said


@pytest.mark.processes
def test_nothing_else_is_run_again(tmp_path):
    """Report a failure at once and one time, and refuse the mark `flaky`."""
    code, said = run_pytest(tmp_path, CLOCK.format(tests=1).replace("@pytest.mark.clock\n", ""))
    assert code == 1, said
    assert said.index("(call)") < said.index("= FAILURES =")
    assert "was run again" not in said
    flaky = CLOCK.format(tests=1).replace("mark.clock", "mark.flaky(reruns=2)")
    code, said = run_pytest(tmp_path, flaky)
    assert code == pytest.ExitCode.USAGE_ERROR, said
    assert "only tests marked `clock`" in said


@pytest.mark.processes
def test_a_quick_test_starts_nothing(tmp_path):
    """Leave out tests that are marked as starting processes, with `--quick`. Fail unmarked ones that do."""
    code, said = run_pytest(tmp_path, UNMARKED, "--quick")
    assert code == 1, said
    assert "1 failed, 1 passed, 1 deselected" in said
    assert "mark it `processes`" in said
    code, said = run_pytest(tmp_path, UNMARKED)
    assert code == 0, said
