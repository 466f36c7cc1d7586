"""Two halves of a suite: `--quick` runs the tests that start nothing, `--not-quick` the others.

With `--quick` a test that starts a process or a compiler fails: it needs a mark of `NOT_QUICK`. Whether a test is quick
does not depend on the machine. So a test that asks whether a program is installed needs the mark `processes`, too: on
another machine it would start that program.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOT_QUICK = ("processes", "compiles", "slow", "lab", "clock")
_REPOSITORY = str(Path(__file__).parents[2])
_AUDITED = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_quick: list[dict[str, str]] = []  # of the quick test that is being run: what it starts, and where
_older_threads: set[int] = set()  # what they start is not of this test


def note(mark: str, what: str) -> None:
    """Note that the running test has started something that this mark stands for."""
    if _quick and mark not in _quick[-1] and threading.get_ident() not in _older_threads:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_REPOSITORY)]
        where = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-6:])
        _quick[-1][mark] = f"{what} ({where})"


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _quick and event in _AUDITED:
        note("processes", f"{event} {arguments[0] if arguments else ''}".strip())


def _noted(mark: str, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **named: Any) -> Any:
        note(mark, what)
        return function(*args, **named)

    return noting


@functools.cache
def _watch_processes() -> None:
    sys.addaudithook(_audit)
    process: Any = multiprocessing.process.BaseProcess  # with a fork server there is no event
    process.start = _noted("processes", "multiprocessing", process.start)
    shutil.which = _noted("processes", "a search for programs", shutil.which)


@functools.cache
def _watch_numba() -> None:
    try:  # also where no test has imported it so far: which test is the first differs from run to run
        from numba.core.dispatcher import Dispatcher
    except ImportError:
        return
    # Also where a compiled function is loaded: on a fresh clone the same test compiles it.
    Dispatcher.compile = _noted("compiles", "numba", Dispatcher.compile)  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick` and `--not-quick`."""
    parser.addoption("--quick", action="store_true", help="run only tests that start nothing")
    parser.addoption("--not-quick", action="store_true", help="run only the others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the half that `--quick` or `--not-quick` asks for."""
    if config.option.quick or config.option.not_quick:
        kept = [item for item in items if _is_quick(item) == config.option.quick]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def _is_quick(item: pytest.Item) -> bool:
    return not any(map(item.get_closest_marker, NOT_QUICK))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Watch a quick test and its fixtures."""
    if not item.config.option.quick:
        return (yield)
    _watch_processes()
    _watch_numba()
    _older_threads.update({thread.ident or 0 for thread in threading.enumerate()} - {threading.get_ident()})
    _quick.append({})
    try:
        return (yield)
    finally:
        _quick.pop()
        _older_threads.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Fail a quick test that has started something."""
    result = yield
    if _quick and _quick[-1]:
        mark, what = next(iter(_quick[-1].items()))
        pytest.fail(f"a test without a mark starts {what}: mark it `{mark}`", pytrace=False)
    return result
