"""The latest phases of this process, with their times: noted as each ends, read by the recorder of a step. No torch.

There is one list per process, as phases belong to the process and not to a model. Appending costs a third of a
microsecond.
"""

from __future__ import annotations

from collections import deque

from paceline.observe.run_records import Interval

_MOST = 256  # phases that are kept
_MOST_OF_A_STEP = 64

_noted: deque[tuple[str, float, float]] = deque(maxlen=_MOST)


def note(phase: str, start_s: float, end_s: float) -> None:
    """Note a phase that has ended; see `run_records.PHASES`."""
    _noted.append((phase, start_s, end_s))


def between(start_s: float, end_s: float) -> tuple[Interval, ...]:
    """Return the last 64 phases that ended after `start_s` and began before `end_s`, in the order of their ends."""
    found: list[Interval] = []
    for phase, began_s, ended_s in reversed(_noted.copy()):  # garbage collection in between notes a phase
        if ended_s <= start_s or len(found) == _MOST_OF_A_STEP:
            break
        if began_s < end_s:
            found.append(Interval(phase, began_s, ended_s))
    return tuple(reversed(found))
