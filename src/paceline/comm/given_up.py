"""Calls that may block for ever on a dead rank, and cannot be woken: they run on a thread that can be abandoned.

Gloo waits for the connection of a rank that has died meanwhile, until its timeout or longer. No closed socket wakes it,
as there is none. So code that may have to stop waiting lets it connect on a thread, and goes on when the membership is
over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.errors import PeerLostError

_LOOK_S = 0.01  # between two looks whether it is given up
_are_over: list[Callable[[], bool]] = []  # of `given_up_when`, if this is within it

Made = TypeVar("Made")


@contextlib.contextmanager
def given_up_when(is_over: Callable[[], bool]) -> Iterator[None]:
    """Make a context in which calls of `aside`, and c10d's opening of a Gloo group, end once `is_over()`. Local."""
    c10d: Any = dist.distributed_c10d
    gloo = c10d.ProcessGroupGloo

    class Opening(type):
        """Stands for the class of Gloo's groups, of which c10d makes one."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, gloo)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return aside(lambda: gloo(*args, **kwargs))

    c10d.ProcessGroupGloo = Opening("ProcessGroupGloo", (), {})
    _are_over.append(is_over)
    try:
        yield
    finally:
        _are_over.remove(is_over)
        c10d.ProcessGroupGloo = gloo


def aside(make: Callable[[], Made]) -> Made:
    """Call `make`, which may wait for the connection of a rank that has died, and return its result.

    Within `given_up_when` on a thread; PeerLostError once it is given up. Blocks.
    """
    if not _are_over:
        return make()
    is_over = _are_over[-1]
    made: list[Made] = []
    raised: list[Exception] = []
    is_done = threading.Event()

    def perform() -> None:
        try:
            made.append(make())
        except Exception as error:  # noqa: BLE001 (raised where it is awaited)
            raised.append(error)
        is_done.set()

    threading.Thread(target=perform, name="paceline-open", daemon=True).start()
    while not is_done.wait(_LOOK_S):
        if is_over():
            raise PeerLostError("a rank was lost while a group was opened, or its state handed over")
    if raised:
        raise raised[0]
    return made[0]
