"""Threads that compute pieces of work: as many as torch may use (`torch.set_num_threads`, OMP_NUM_THREADS).

Work is cut into the same pieces for any number of threads, and pieces do not share what they write. So the number of
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
_Pool = tuple[ThreadPoolExecutor, int]
_pool: contextvars.ContextVar[_Pool | None] = contextvars.ContextVar("thread_pool", default=None)


@contextlib.contextmanager
def thread_pool(num: int | None = None) -> Iterator[int]:
    """Let `for_each` use several threads in this context; BLAS libraries use one thread each meanwhile.

    Args:
        num: How many; None for as many as torch may use.
    """
    num = num or torch.get_num_threads()
    if _pool.get() is not None:
        yield 1
        return
    with _libraries().limit(limits=1, user_api="blas"):
        if num == 1:  # BLAS would still use several, whose products may differ in the last bit
            yield 1
            return
        with ThreadPoolExecutor(num - 1) as pool:
            token = _pool.set((pool, num))
            try:
                yield num
            finally:
                _pool.reset(token)


def for_each(work: Callable[[_T], Any], pieces: Sequence[_T]) -> None:
    """Perform all pieces of work; within a `thread_pool`, several at a time. An exception is raised when all end."""
    found = _pool.get()
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
    """Return the number of threads that `for_each` uses here."""
    found = _pool.get()
    return 1 if found is None else found[1]


@functools.cache
def _libraries() -> ThreadpoolController:
    """Return the loaded BLAS and OpenMP libraries. Looking for them takes milliseconds."""
    return ThreadpoolController()
