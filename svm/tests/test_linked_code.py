"""Code that compiled code calls becomes part of its callers' code; and what comes out is what numba makes of it."""

import subprocess

import pytest

from harness import warm

pytestmark = [pytest.mark.compiles, pytest.mark.processes]

FUNCTIONS = """
import sys
import numba
from pathlib import Path
from paceline import numba_cache
numba.config.CACHE_DIR = "cache"
OPTIONS = {"error_model": "numpy", "nogil": True, "_nrt": False}

def entry(function):
    made = numba_cache.entry(function, OPTIONS)
    numba_cache.keep(made, numba_cache.stamp_of([Path(__file__)]))
    return made

def inner(function):
    return numba_cache.inner(function, OPTIONS)

@inner
def power(x, n, kind):
    result = 1.0
    if kind is not None:
        result = kind
    for _ in range(n):
        result *= x
    return result

def _both(x, n, kind):
    return power(x, n, kind) + n

both, both_inside = entry(_both), inner(_both)

@entry
def total(values, n, kind):
    x = 0.0
    for t in range(len(values)):
        x += both_inside(values[t], n, kind) + power(values[t], 1, None)
    return x
"""
PROGRAM = """
from functions import *
import gc
import numpy as np
from numba.core import event
class Names(event.Listener):
    def on_start(self, e):
        names.append(e.data["dispatcher"].py_func.__name__)
        assert not gc.isenabled()
    def on_end(self, e): pass
names, values = [], np.array([2.0, 3.0])
with event.install_listener("numba:compile", Names()):
    print(total(values, 2, None), total(values, 2, 10.0), both(2.0, 3, None))
print(*names)
assert gc.isenabled()
gc.disable()
both(1, 1, None)
assert not gc.isenabled()
"""


@pytest.fixture
def run(tmp_path):
    """What the program prints; with numba as it is where `plain`."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(plain=False):
        before = "from paceline import numba_cache; numba_cache._LEAN = numba_cache._LINKED = {}; " * plain
        return subprocess.run(
            [str(warm.folder() / "python"), "-c", before + "import program"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()

    return run


def test_only_what_python_calls_is_kept(run, tmp_path):
    """Compiled once for each kind of arguments in a process; then nothing, as what is kept has all that it calls."""
    found, names = run()
    assert found == "22.0 139.0 11.0"
    assert sorted(names.split()) == ["_both"] * 3 + ["power"] * 3 + ["total"] * 2
    assert sorted({path.name.split("-")[0] for path in tmp_path.glob("cache/*/*.nbi")}) == [
        "functions._both",
        "functions.total",
    ]
    assert run() == [found, ""]


def test_with_another_numba_it_compiles_as_that_does(run):
    found, names = run(plain=True)
    assert found == "22.0 139.0 11.0"
    assert "power" in names.split()
