"""What was looked at on this machine, what was found, and what mends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

Level = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class CheckResult:
    """One thing that was looked at.

    Attributes:
        topic: What; a check's own is known to whoever asks it (`looked_at`).
        found: What was found, with numbers.
        level: "bad": a training fails or is slow here. "note": it may be, depending on what it does. "good" otherwise.
        remedy: A command that mends it, or what to do; "" where nothing has to be done.
    """

    topic: str = field(default="", kw_only=True)
    found: str
    level: Level = "good"
    remedy: str = ""


def looked_at(topic: str, check: Callable[[], CheckResult]) -> CheckResult:
    """Return what a check finds. One that cannot look says so; it does not end the others."""
    try:
        return replace(check(), topic=topic)
    except (OSError, ValueError, IndexError, KeyError, ImportError) as error:
        return CheckResult(f"could not be read ({type(error).__name__}: {error})", "note", topic=topic)
