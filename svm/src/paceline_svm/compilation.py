"""What numba compiles while somebody waits, shown on the terminal.

Code is compiled for one form of samples and one kernel, when a fit or a prediction first needs it, and kept on disk: a
process waits only for what no process before it, of the same user on the same machine, has needed. The first fit of a
process alone does without meanwhile where it can (`plain.py`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from numba.core import event

from paceline import numba_cache

_BACK = "\r"
_TELLS_EVERY_S = 5.0  # where lines cannot be written over


class Compilation(event.Listener):  # type: ignore[misc]
    """Counts the functions that are being compiled, and says so.

    Args:
        show: Told how many functions were begun, and for how many seconds it has gone on.

    Attributes:
        num_functions: Begun so far.
        seconds: Spent on those that are done.
    """

    def __init__(self, show: Callable[[int, float], Any]) -> None:
        self._show, self._depth, self._begun_s = show, 0, 0.0
        self.num_functions, self.seconds = 0, 0.0

    def on_start(self, event: Any) -> None:
        """A function is compiled, perhaps for another that is."""
        if self._depth == 0:
            self._begun_s = time.monotonic()
        self._depth += 1
        self.num_functions += 1
        self._show(self.num_functions, self.seconds + time.monotonic() - self._begun_s)

    def on_end(self, event: Any) -> None:
        """It is done."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.monotonic() - self._begun_s


class _Waits(event.Listener):  # type: ignore[misc]
    """Says that another process is waited for."""

    def __init__(self, say: Callable[[str], Any]) -> None:
        self._say = say

    def on_start(self, event: Any) -> None:
        """The wait begins."""
        self._say("waiting for another process, which compiles for this machine")

    def on_end(self, event: Any) -> None:
        """It is over."""


@contextlib.contextmanager
def shown(*, always: bool = False) -> Iterator[Compilation]:
    """Show on stderr what is compiled in this context, if anything is.

    Args:
        always: Also where stderr is no terminal; a line now and then, and one at the end.
    """
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    told_s, num_before = 0.0, numba_cache.Waits.num_not

    def say(words: str) -> None:
        if is_terminal or always:
            sys.stderr.write(f"paceline_svm: {words}\n")

    def show(num_functions: int, seconds: float) -> None:
        nonlocal told_s
        if is_terminal:
            sys.stderr.write(f"{_BACK}{_words(num_functions, seconds)}")
            sys.stderr.flush()
        elif always and seconds - told_s >= _TELLS_EVERY_S:
            told_s = seconds
            sys.stderr.write(_words(num_functions, seconds) + "\n")

    listener = Compilation(show)
    with (
        event.install_listener("numba:compile", listener),
        event.install_listener(numba_cache.WAITING, _Waits(say)),
    ):
        yield listener
    if numba_cache.Waits.num_not > num_before:
        say("done without compiled code, which another process compiles for the next time")
    if listener.num_functions and (is_terminal or always):
        start = _BACK if is_terminal else ""
        sys.stderr.write(
            f"{start}{_words(listener.num_functions, listener.seconds)}; kept for the next time\n"
        )


def _words(num_functions: int, seconds: float) -> str:
    return f"paceline_svm: compiling for this machine, {num_functions} functions, {seconds:.1f} s"
