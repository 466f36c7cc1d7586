"""What numba compiles, one process of a host compiles, whoever else needs it meanwhile; and nobody waits for ever."""

import contextlib
import os
import signal
import subprocess

import pytest

from harness import warm

pytestmark = [pytest.mark.compiles, pytest.mark.processes]

FUNCTIONS = """
import sys, threading, time
import numba
from pathlib import Path
from numba.core import event
from paceline import numba_cache
numba.config.CACHE_DIR = "cache"

def kept(function):
    made = numba.njit(cache=True, _nrt=False)(function)
    numba_cache.keep(made, numba_cache.stamp_of([Path(__file__)]))
    return made

@kept
def inner(n, x):
    for i in range(n):
        x += i
    return x

@kept
def outer(n, x):
    for i in range(n):
        x += inner(i, x) + inner(i, 1.0)
    return x

@kept
def fails(n):
    return n.nothing
"""
CALLS_ALL = """
from functions import *
both = (outer, inner) if sys.argv[1] == "outer" else (inner, outer)
print("here", flush=True)
input()
threads = [threading.Thread(target=f, args=(3, x)) for f in both for x in (1.0, 1)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sum(count for f in both for count in f.stats.cache_misses.values()))
"""
STAYS = """
from functions import *
class Stay(event.Listener):
    def on_start(self, _):
        print("compiling", flush=True)
        time.sleep(600)
    def on_end(self, _): pass
if sys.argv[1] == "failed":
    try: fails(3)
    except numba.TypingError: Stay().on_start(None)
with event.install_listener("numba:compile", Stay()): inner(3, 1.0)
"""
WAITS = """
from functions import *
def sleep(seconds):
    if not was_told: print("waits", flush=True)
    was_told.append(True)
    real(seconds)
was_told, real, time.sleep, numba_cache._AT_MOST_S = [], time.sleep, sleep, float(sys.argv[2])
try: print(fails(3) if sys.argv[1] == "failed" else inner(3, 1.0))
except numba.TypingError: print("failed")
print("again", inner(3, 1), numba_cache._CompileLock._waits)
"""
STORES = """
from functions import *
from numba.core.caching import IndexDataCacheFile as File
def late(function, seconds):
    return lambda *words: (time.sleep(seconds), function(*words))
File._save_index = late(File._save_index, 0.5)
File._save_data = late(File._save_data, 0.5 if sys.argv[1] == "1.0" else 0)
print("here", flush=True)
input()
print(inner(3, eval(sys.argv[1])), flush=True)
"""
LOADS = """
from functions import *
print(inner(3, 1.0), inner(3, 1), sum(inner.stats.cache_misses.values()), flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a program in a folder with the functions and an empty cache; all end here."""
    programs = {"calls": CALLS_ALL, "stays": STAYS, "waits": WAITS, "stores": STORES, "loads": LOADS}
    for name, text in {"functions": FUNCTIONS, **programs}.items():
        (tmp_path / f"{name}.py").write_text(text)
    with contextlib.ExitStack() as running:

        def start(name, *words):
            process = subprocess.Popen(
                [str(warm.folder() / "python"), f"{name}.py", *words],
                cwd=tmp_path,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            running.enter_context(process)
            running.callback(process.kill)
            return process

        yield start


def test_processes_and_their_threads_compile_everything_once(start):
    """Some begin with the function that others need; four threads of each process want something else, or the same."""
    processes = [start("calls", first) for first in ("outer", "inner", "outer", "inner")]
    assert [process.stdout.readline() for process in processes] == ["here\n"] * 4
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert sum(int(process.stdout.readline()) for process in processes) == 4  # two functions, two types each


@pytest.mark.parametrize("how", ["killed", "stopped", "failed"])
def test_who_does_not_finish_is_not_waited_for(how, start):
    """Killed: its lock is gone. Stopped: once only. A function that does not compile holds no lock afterwards."""
    stays = start("stays", how)
    assert stays.stdout.readline() == "compiling\n"
    waits = start("waits", how, "0.1" if how == "stopped" else "600")
    if how != "failed":
        assert waits.stdout.readline() == "waits\n"
    if how == "killed":
        stays.send_signal(signal.SIGKILL)
    assert waits.stdout.readline() == ("failed\n" if how == "failed" else "4.0\n")
    assert waits.stdout.readline() == f"again 4 {how != 'stopped'}\n"


def test_two_processes_store_for_different_types(start):
    """Each in a file of its own, though numba picks the next free one by what it has read before."""
    processes = [start("stores", value) for value in ("1.0", "1")]
    assert [process.stdout.readline() for process in processes] == ["here\n"] * 2
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.stdout.readline() for process in processes] == ["4.0\n", "4\n"]
    for process in processes:
        process.wait()
    assert start("loads").stdout.readline() == "4.0 4 0\n"


def test_without_a_lock_it_compiles(start, tmp_path):
    """Here because a folder is in the place of the file that is locked."""
    assert start("calls", "outer").communicate("go\n") == ("here\n4\n", None)
    (cache,) = (tmp_path / "cache").iterdir()
    locks = list(cache.glob("*.lock"))
    assert len(locks) == 2
    for path in cache.iterdir():
        path.unlink()
    for path in locks:
        path.mkdir()
    assert start("calls", "outer").communicate("go\n") == ("here\n4\n", None)


FITS = """
import sys
import numpy as np
from paceline_svm import SVC
from paceline_svm.compiled import shown
X = np.random.default_rng(0).normal(size=(300, 4))
y = (X[:, 0] + X[:, 1] ** 2 > 0.5).astype(int)
with shown() as found:
    for _ in range(2):
        model = SVC(C=10.0).fit(X, y)
        print((model.dual_coef_.tobytes() + model.decision_function(X).tobytes()).hex())
print(found.num_functions > 0)
"""


@pytest.mark.lab
def test_the_first_fit_has_the_bits_of_every_later_one(tmp_path):
    """With nothing on disk, once compiled, and loaded by another process."""
    (tmp_path / "fits.py").write_text(FITS)
    command = [
        str((warm.folder() / "real").readlink()),
        "fits.py",
    ]  # fresh: numba reads variables once
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    said = [
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    cold, warmed = (one.stdout.splitlines() for one in said)
    assert (cold[2], warmed[2]) == ("True", "False")
    assert len({*cold[:2], *warmed[:2]}) == 1
    assert len(said[0].stderr.splitlines()) <= 1  # that it compiles
    assert said[1].stderr == ""
