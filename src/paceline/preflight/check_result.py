"""The result of a check on this machine: its topic, the finding and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

Level = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        topic: Name of the check; filled in by `looked_at`.
        found: The finding, with numbers.
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
