"""The option `--quick`: it leaves out tests with a mark of `NOT_QUICK`, and fails a test that starts a process."""

from __future__ import annotations

import functools
import multiprocessing.process
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOT_QUICK = ("processes", "compiles", "slow", "lab", "clock")
_REPOSITORY = str(Path(__file__).parents[2])
_AUDITED = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_quick: list[dict[str, str]] = []  # of the quick test that is being run: what it starts, and where


def note(mark: str, what: str) -> None:
    """Note that the running test has started something that this mark stands for."""
    if _quick and mark not in _quick[-1]:
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


@functools.cache
def _watch_numba() -> None:
    from numba.core.dispatcher import Dispatcher

    # Also where a compiled function is loaded: on a fresh clone the same test compiles it.
    Dispatcher.compile = _noted("compiles", "numba", Dispatcher.compile)  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick`."""
    parser.addoption("--quick", action="store_true", help="run only pure logic; fail what starts anything")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests with a mark of `NOT_QUICK`, with `--quick`."""
    if config.option.quick:
        quick = [item for item in items if not any(map(item.get_closest_marker, NOT_QUICK))]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(quick)])
        items[:] = quick


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Watch a quick test and its fixtures."""
    if not item.config.option.quick:
        return (yield)
    _watch_processes()
    if "numba.core.dispatcher" in sys.modules:
        _watch_numba()
    _quick.append({})
    try:
        return (yield)
    finally:
        _quick.pop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Fail a quick test that has started something."""
    result = yield
    if _quick and _quick[-1]:
        mark, what = next(iter(_quick[-1].items()))
        pytest.fail(f"a quick test starts {what}: mark it `{mark}`", pytrace=False)
    return result
