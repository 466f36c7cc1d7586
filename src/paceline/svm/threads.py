"""How many threads of this process compute? As many as torch may use: `torch.set_num_threads`, OMP_NUM_THREADS.

Work is cut into the same pieces for any number of threads, and pieces do not share what they write, so the number of
threads does not change a bit of the result.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from threadpoolctl import ThreadpoolController

_T = TypeVar("_T")
_crew: contextvars.ContextVar[tuple[ThreadPoolExecutor, int] | None] = contextvars.ContextVar(
    "crew", default=None
)


@contextlib.contextmanager
def crew(num: int | None = None) -> Iterator[int]:
    """Let `each` use several threads in this context; libraries for matrices use one in each of them.

    Args:
        num: How many; None for as many as torch may use.
    """
    num = num or torch.get_num_threads()
    if num == 1 or _crew.get() is not None:
        yield 1
        return
    with ThreadPoolExecutor(num - 1) as pool, _libraries().limit(limits=1, user_api="blas"):
        token = _crew.set((pool, num))
        try:
            yield num
        finally:
            _crew.reset(token)


def each(work: Callable[[_T], Any], pieces: Sequence[_T]) -> None:
    """Do all pieces of work; in a `crew`, several at a time. An exception of one is raised once all have ended."""
    found = _crew.get()
    if found is None or len(pieces) < 2:
        for piece in pieces:
            work(piece)
        return
    pool, num = found
    numbers = itertools.count()

    def share() -> None:
        while (at := next(numbers)) < len(pieces):
            work(pieces[at])

    others = [pool.submit(share) for _ in range(1, min(num, len(pieces)))]
    try:
        share()
    finally:
        for other in others:
            if not other.cancel():  # a thread that never got a processor is not waited for
                other.result()


def num_threads() -> int:
    """How many `each` uses here."""
    found = _crew.get()
    return 1 if found is None else found[1]


@functools.cache
def _libraries() -> ThreadpoolController:
    """Those that are loaded; to look for them takes milliseconds."""
    return ThreadpoolController()
