"""Options of `paceline run` that other packages add: entry points of the group `extras.LAUNCH_OPTIONS`.

The entry point has the option's name, such as `--servers`, and names an `ExtraOption`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from paceline.extras import LAUNCH_OPTIONS, added


class Running(Protocol):
    """Processes that run next to the ranks of a launch."""

    def who_died(self) -> str | None:
        """Return in words which of them ended before the launch; None if none did."""


class Companion(Protocol):
    """The processes that an option's value asks for."""

    def running(self, address: str | None, note: Callable[[str], None]) -> AbstractContextManager[Running]:
        """Return a context within which the processes run.

        Args:
            address: The address of this machine that the other machines use; None: not known.
            note: Called with a line that the user should see.
        """


class ExtraOption(Protocol):
    """An option that takes a value.

    Attributes:
        metavar: What stands for the value in `paceline run --help`.
        words: What the help says of it.
        why_not_elastic: Why it excludes `--min-ranks`.
    """

    metavar: str
    words: str
    why_not_elastic: str

    def parse(self, text: str) -> Companion:
        """Return what the value asks for. Raises ConfigurationError if it is not possible. Starts nothing."""


def extra_options() -> dict[str, ExtraOption]:
    """Return the options that the installed packages add, by name."""
    found: dict[str, ExtraOption] = {name: entry.load()() for name, entry in added(LAUNCH_OPTIONS).items()}
    return found


def attribute_of(option: str) -> str:
    """Return the name under which argparse keeps an option's value."""
    return option.lstrip("-").replace("-", "_")
