"""A first fit that does not wait for the compiler: plain Python finds the same optimum; compiled code takes over."""

import importlib
import itertools
import subprocess

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from harness import warm
from paceline.numba_cache import Waits, waiting
from paceline_svm import SVC, SVR, OneClassSVM, estimator, small_problems
from paceline_svm.gaussian import gaussian_rows, scratch_for
from paceline_svm.kernels import Kernel
from paceline_svm.placement import LARGEST
from paceline_svm.sample_forms import DenseSamples
from paceline_svm.sub_problem import SubProblem

ENTRIES = {
    "small_problems": ["solve_some"],
    "sub_problem": ["solve", "_mirror"],
    "kernels": ["gaussian_rows", "copy_rows"],
    "gradients": ["add_rows"],
    "working_set": ["violations"],
}
generator = np.random.default_rng(0)
X = generator.normal(size=(LARGEST + 100, 4))
X[np.abs(X) < 0.1] = 0.0
y = (X[:, 0] + X[:, 1] ** 2 + 0.3 * generator.normal(size=len(X)) > 0.5).astype(int)
three, wide = y + (X[:, 2] > 1), np.hstack([X] * 13)
FITS = {
    "two classes": (SVC(), X[:300], y[:300]),
    "three classes, all values at once": (SVC(C=10), X[:200], three[:200]),
    "three classes, rows that other pairs have": (SVC(rows="alone"), X[:2100], three[:2100]),
    "no room for rows": (SVC(cache_size=1e-3), X[:200], y[:200]),
    "working sets in single precision": (SVC(), X, y),
    "working sets in double precision": (SVC(tol=9e-5), X, y),
    "wide": (SVC(), wide, y),
    "linear": (SVC(kernel="linear"), X[:200], y[:200]),
    "polynomial": (SVC(kernel="poly"), X[:200], y[:200]),
    "sigmoid": (SVC(kernel="sigmoid", coef0=-1.0), X[:200], y[:200]),
    "Gram matrix": (SVC(kernel="precomputed"), X[:200] @ X[:200].T, y[:200]),
    "sparse": (SVC(), sp.csr_matrix(X[:200]), y[:200]),
    "regression": (SVR(), X[:200], X[:200, 0]),
    "one class": (OneClassSVM(nu=0.1), X[:200], None),
}


def plainly(monkeypatch, is_there):
    """Let plain functions stand in for all that have them, until `is_there()` says otherwise."""
    for module, names in ENTRIES.items():
        found = importlib.import_module(f"paceline_svm.{module}")
        for name in names:
            monkeypatch.setattr(found, name, getattr(found, name).stand_in(is_there))


def found(model, rows):
    values = model.predict if isinstance(model, SVR) else model.decision_function
    return values(rows[:200]), model.objective_, np.sum(model.n_iter_)


@pytest.mark.parametrize("kind", FITS)
def test_plain_python_finds_the_same_optimum(kind, monkeypatch):
    """Compiled code fuses multiplications with additions, so pair updates may part where two pairs are nearly alike."""
    model, rows, targets = FITS[kind]
    with waiting():
        values, objective, num_steps = found(model.fit(rows, targets), rows)
    plainly(monkeypatch, lambda: False)
    plain_values, plain_objective, num_plain_steps = found(model.fit(rows, targets), rows)
    assert np.max(model.gap_) <= model.tol
    assert plain_objective == pytest.approx(objective, rel=1e-6)
    assert plain_values == pytest.approx(values, abs=3 * model.tol)
    assert num_plain_steps == pytest.approx(num_steps, rel=0.2)


@pytest.mark.parametrize("kind", ["three classes, all values at once", "working sets in single precision"])
def test_compiled_code_takes_over_in_mid_fit(kind, monkeypatch):
    """After ten pieces of work."""
    model, rows, targets = FITS[kind]
    with waiting():
        values, objective, _ = found(model.fit(rows, targets), rows)
    looks = itertools.count()
    plainly(monkeypatch, lambda: next(looks) >= 10)
    again = found(model.fit(rows, targets), rows)
    assert next(looks) > 10, "it was looked whether the code is there"
    assert again[0] == pytest.approx(values, abs=3 * model.tol)
    assert again[1] == pytest.approx(objective, rel=1e-6)


def test_a_working_set_that_compiled_code_takes_over_begins_again(monkeypatch):
    """Bits, and what it took, are those of compiled code alone."""
    signs = 2.0 * y[:200] - 1.0
    table = np.stack([-signs, 0.0 * signs, np.minimum(signs, 0.0), np.maximum(signs, 0.0)])[:, None]
    problem = DenseSamples.of(X[:200], np.arange(200)), 0, table, 1e-3, 10_000
    expected, *costs = SubProblem(Kernel("rbf", 0.3, 0.0, 3.0)).solve(*problem)
    looks = itertools.count()
    plainly(monkeypatch, lambda: next(looks) >= 10)
    again, *costs_again = SubProblem(Kernel("rbf", 0.3, 0.0, 3.0)).solve(*problem)
    assert next(looks) == 11
    assert again.tobytes() == expected.tobytes()
    assert costs_again == costs


def test_what_other_threads_solved_is_not_taken_back(monkeypatch):
    """While one problem is solved, something is written to the next, as another thread does; then the code is there."""
    compiled, seen = small_problems.solve_some, []

    def solve_some(*arguments):
        problems, which, outcomes = arguments[2], arguments[3], arguments[7]
        other = problems.beta[:, problems.first[which[1]] : problems.first[which[1] + 1]], outcomes[which[1]]

        def write():
            for array in other:
                array[:] = 7.0
            return True

        compiled.stand_in(write)(*arguments[:3], which[:1], *arguments[4:])
        seen.extend(array.tolist() for array in other)
        for array in other:
            array[:] = 0.0
        return compiled(*arguments)

    monkeypatch.setattr(small_problems, "solve_some", solve_some)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # all problems in one call
    SVC().fit(X[:90], three[:90])
    assert set(np.concatenate([np.ravel(numbers) for numbers in seen])) == {7.0}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_kernel_values_of_any_size_agree(dtype):
    """From 1 to what is rounded to the smallest normal number, and 0 of the distance."""
    squares = np.r_[0.0, 10.0 ** np.arange(-9, 9)].astype(dtype)
    dots = np.outer(np.sqrt(squares), np.sqrt(squares)).astype(dtype) * np.linspace(-1, 1.01, 19).astype(
        dtype
    )
    num, slots = len(squares), np.arange(len(squares))
    slots[3] = -1
    results = []
    for function in (gaussian_rows, gaussian_rows.stand_in(lambda: False)):
        out, total = np.zeros((num, num + 2), dtype), np.zeros(num + 2)
        scratch, spare = scratch_for(num, dtype), np.empty(num, dtype)
        function(dots.copy(), (squares, squares), 0.7, scratch, spare, out, slots, 1, squares * 1.0, total)
        results.append((out, total))
    digits = 20 * float(np.finfo(dtype).eps)  # an exponent of 100 is off by 100 epsilons
    for compiled, plain in zip(*results, strict=True):
        assert plain == pytest.approx(compiled, rel=10 * digits, abs=digits)


def test_ranks_wait_also_where_each_fits_alone(monkeypatch):
    """Their models are the same to the last bit."""
    monkeypatch.setattr(Waits, "always", 0)
    blocks = []
    for peers in (False, True):
        monkeypatch.setattr(estimator, "has_peers", lambda peers=peers: peers)
        SVC(rows="alone", verbose=lambda _: blocks.append(Waits.block > 0)).fit(X[:300], y[:300])
    assert set(blocks[:1]) == {True}
    assert set(blocks[-1:]) == {False}


def test_blocks_of_threads_that_overlap_end_as_they_began():
    before, blocks = Waits.always, (waiting(), waiting())
    for block in blocks:
        block.__enter__()
    for block in blocks:  # the first one ends within the second
        block.__exit__(None, None, None)
    assert Waits.always == before


FUNCTIONS = """
import functools, os, signal, sys, threading, time
import numba
from pathlib import Path
from numba.core import event
from paceline import numba_cache
from paceline.numba_cache import Waits, without_waiting, waiting
numba.config.CACHE_DIR = "cache"
os.sched_getaffinity = lambda _: {0} if sys.argv[1] == "one core" else {0, 1}

if sys.argv[1] == "killed": signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # then nobody can wait for a child's status

looks = []
def plain(is_there):
    looks.append(is_there)
    return None if sys.argv[1] == "none" else lambda x: ("plain", x + 1)
def _first(x): return x + 1
def _second(x): return x + 1
def kept(function):
    made = numba.njit(cache=True, _nrt=False)(function)
    numba_cache.keep(made, numba_cache.stamp_of([Path(__file__)]), None, plain)
    return made
first, second = kept(_first), kept(_second)
compile = first._compiler.compile
def late(*types):
    if os.getpid() != me:
        Path("begun").touch()
        while not Path("go").exists(): time.sleep(0.01)
        if sys.argv[1] == "killed": os._exit(1)
    return compile(*types)
me, first._compiler.compile = os.getpid(), late
class Waiting(event.Listener):
    def on_start(self, _): print("waits")
    def on_end(self, _): pass
"""
PROGRAM = """
from functions import *
with waiting() if sys.argv[1] == "waiting" else without_waiting(really=sys.argv[1] != "ranks"):
    print(first(1), first(2), second(1))
while sys.argv[1] in ("forked", "killed") and not Path("begun").exists(): time.sleep(0.01)
if sys.argv[1] == "killed":
    print(looks[0]())
    Path("go").touch()
    while threading.active_count() > 1: time.sleep(0.01)  # one waits for the fork
    time.sleep(0.02)
    print(looks[0]())  # what stands in must not go on in vain
threading.Timer(0.3, Path("go").touch).start()
with event.install_listener(numba_cache.WAITING, Waiting()), without_waiting(): print(first(3), second(3))
print(first(4), *(sum(f.stats.cache_misses.values()) for f in (first, second)), Waits.num_not)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("forked", "('plain', 2) ('plain', 3) ('plain', 2)\nwaits\n4 4\n5 0 1 1\n"),
        ("killed", "('plain', 2) ('plain', 3) ('plain', 2)\nFalse\nTrue\n4 4\n5 1 1 1\n"),
        ("none", "2 3 2\n4 4\n5 1 1 0\n"),
        ("one core", "2 3 2\n4 4\n5 1 1 0\n"),
        ("ranks", "2 3 2\n4 4\n5 1 1 0\n"),
        ("waiting", "2 3 2\n4 4\n5 1 1 0\n"),
    ],
)
def test_only_the_first_block_does_without(how, said, tmp_path):
    """The next waits for the fork, or compiles if it has failed; where there can be none, the first does.

    Of two functions one is compiled by a fork: there is one fork at a time.
    """
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [str(warm.folder() / "python"), "program.py", how]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (said, "")
