"""The moments of a collective on the device, at which a test may let a rank die or abort."""

from __future__ import annotations

from collections.abc import Callable

Moment = Callable[[int, str, str], None]
"""Called with this rank's number, the collective's number and "begin", "within" or "end"."""

_listeners: list[Moment] = []


def listen(listener: Moment) -> Callable[[], None]:
    """Call `listener` at every moment, on the thread that runs the device; returns what ends that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def come(rank: int, step: str, place: str) -> None:
    """Say that the device has come to a place of a collective: behind its contribution is "within"."""
    for listener in [*_listeners]:
        listener(rank, step, place)
