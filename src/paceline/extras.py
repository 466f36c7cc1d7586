"""Additions to `paceline` by the other packages of this repository, found by entry points; what to install without one.

An entry is named after what it adds:

| group | an entry is |
|---|---|
| `COMMANDS` | a function that adds a command to `paceline`; it is called with the typer app |
| `REDUCTIONS` | a class of reductions, made without arguments where `reduction=` is given its name |
| `LAUNCH_OPTIONS` | an option of `paceline run`: a `paceline.extras.ExtraOption` |
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from paceline.errors import ConfigurationError
from paceline.version import __version__

COMMANDS, REDUCTIONS, LAUNCH_OPTIONS = "paceline.commands", "paceline.reductions", "paceline.launch_options"

# The folder of the package, in a clone, that brings each.
_FOLDERS = {
    (COMMANDS, "bench"): "lab",
    (COMMANDS, "emulate"): "lab",
    (COMMANDS, "plan"): "plan",
    (COMMANDS, "study"): "lab",
    (COMMANDS, "serve"): "servers",
    (COMMANDS, "svm"): "svm",
    (REDUCTIONS, "adasum"): "adasum",
    (REDUCTIONS, "bounded_loss"): "lossy",
    (REDUCTIONS, "noise_scale"): "recipes",
    (REDUCTIONS, "parameter_servers"): "servers",
    (LAUNCH_OPTIONS, "--servers"): "servers",
}


def added(group: str) -> dict[str, EntryPoint]:
    """Return what the installed packages add to a group, by name. Imports none of them."""
    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)}


def raise_if_missing(group: str, name: str, what: str) -> None:
    """Raise ConfigurationError with the line that installs it if a package of this repository would add this name.

    Args:
        group: Where it would be added.
        name: What the user asked for. It is not in `added`.
        what: The same as the user wrote it, which begins the message.
    """
    if folder := _FOLDERS.get((group, name)):
        raise ConfigurationError(
            f"{what} comes with the package paceline-{folder}, which is not installed here. In a clone of Paceline "
            f"{__version__}, install it: `pip install ./{folder}`."
        )


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
