"""Compiled loops, which numpy and torch would do in several passes over memory; and what says that they compile.

Rules
1. A loop that must be vectorised runs over a slice from 0, in SIMD lanes: `a[t0 + t]` and scalar minima are not.
2. Compiled code is kept on disk next to this file, or in numba's own cache folder. Only the first process of a machine
   waits for the compiler: at the first fit or prediction that needs the code, or at `paceline svm compile`.
3. Code is compiled for one form of samples and one kernel at a time, so that a first fit waits less. What does not
   apply is passed as None: numba prunes the branch behind `if x is not None`, x an argument.
4. Code on disk is renewed when any file with such loops changes.
5. No NaN or infinity reaches these loops (`fastmath` assumes so); the finite number `FAR` takes their place.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from numba.core import event

from paceline import numba_cache

LANES = 64  # of SIMD: so many numbers the compiler treats alike, some vector registers full
FAR = 1e30
_F = TypeVar("_F", bound=Callable[..., Any])
_LOGGER = logging.getLogger("paceline.svm")
_LONG_S = 2.0  # of compiling, after which it is said
_TELLS_EVERY_S = 5.0  # where all progress is asked for


_OPTIONS: dict[str, Any] = {
    "fastmath": {"nnan", "ninf", "nsz", "arcp", "contract"},
    "error_model": "numpy",
    "nogil": True,
    "_nrt": False,
}
_SOURCES = numba_cache.stamp_of(
    [
        Path(numba_cache.__file__),
        *(
            path
            for path in Path(__file__).parent.glob("*.py")
            if b"from paceline_svm.compiled import" in path.read_bytes()
        ),
    ]
)


def compiled(function: _F) -> _F:
    """Compile when first called from Python, and keep the code on disk.

    References are not counted, so nothing can be allocated. Counting takes two atomic operations per slice, and several
    times as long to compile. The users' manual of numba does not name the option, but numba has functions compiled so.
    """
    made = numba_cache.entry(function, _OPTIONS)
    numba_cache.keep(made, _SOURCES)
    return cast("_F", made)


def inner(function: _F) -> _F:
    """Compile a function that only compiled code calls: it becomes part of its callers' code (`numba_cache.py`)."""
    return cast("_F", numba_cache.inner(function, _OPTIONS))


def hot(function: _F) -> _F:
    """Compile as `inner` does, for the loops of every pair update."""
    return cast("_F", numba_cache.inner(function, _OPTIONS, is_hot=True))


class Compilation(event.Listener):  # type: ignore[misc]
    """Counts the functions that are being compiled, and says once a process that it takes long.

    numba's own lock comes first, so one thread at a time compiles, or waits for a process that does.

    Args:
        shows_all: Whether to write to stderr what is done every few seconds.

    Attributes:
        num_functions: Begun so far.
        seconds: Spent on those that are done, and waiting for other processes.
    """

    _has_said = False  # of this process

    def __init__(self, *, shows_all: bool) -> None:
        self._shows_all, self._depth, self._begun_s, self._told_s = shows_all, 0, 0.0, 0.0
        self._timer: threading.Timer | None = None
        self.num_functions, self.seconds = 0, 0.0

    def on_start(self, event: Any) -> None:
        """Note that numba begins to compile a function, or to wait for another process. Both may be nested."""
        is_wait = event.kind == numba_cache.WAITING
        if self._depth == 0:
            self._begun_s = time.monotonic()
            self._timer = threading.Timer(max(0.0, _LONG_S - self.seconds), self._say, [is_wait])
            self._timer.daemon = True
            self._timer.start()
        self._depth += 1
        self.num_functions += not is_wait
        seconds = self.seconds + time.monotonic() - self._begun_s
        if self._shows_all and seconds - self._told_s >= _TELLS_EVERY_S:
            self._told_s = seconds
            sys.stderr.write(f"{self.words(seconds)}\n")

    def on_end(self, event: Any) -> None:
        """Note that it has ended."""
        self._depth -= 1
        if self._depth == 0:
            if self._timer is not None:
                self._timer.cancel()
            self.seconds += time.monotonic() - self._begun_s

    def words(self, seconds: float) -> str:
        return f"paceline_svm: compiling for this machine, {self.num_functions} functions, {seconds:.1f} s"

    def _say(self, is_wait: bool) -> None:
        """Write one line to stderr, where `logging` is as it was."""
        if not Compilation._has_said and not self._shows_all:
            Compilation._has_said = True
            what = "waiting for another process, which compiles" if is_wait else "compiling"
            _LOGGER.warning(
                "paceline_svm: %s for this machine, once; `paceline svm compile` does so ahead of time", what
            )


@contextlib.contextmanager
def shown(*, always: bool = False) -> Iterator[Compilation]:
    """Say what is compiled in this context, if anything is: one line if it takes seconds.

    Args:
        always: Write to stderr however short it takes; a line now and then, and one at the end.
    """
    listener = Compilation(shows_all=always)
    with (
        event.install_listener("numba:compile", listener),
        event.install_listener(numba_cache.WAITING, listener),
    ):
        yield listener
    if listener.num_functions and always:
        sys.stderr.write(f"{listener.words(listener.seconds)}; kept for the next time\n")
