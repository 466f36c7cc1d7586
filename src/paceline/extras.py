"""What the other packages of this repository add to `paceline`, found by entry points; what to install without one.

An entry is named after what it adds:

| group | an entry is |
|---|---|
| `COMMANDS` | a function that adds a command to `paceline`; it is called with the typer app |
| `REDUCTIONS` | a class of reductions, made without arguments where `reduction=` is given its name |
| `LAUNCH_OPTIONS` | an option of `paceline run`: a `paceline.launch.extra_options.ExtraOption` |
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

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
    (REDUCTIONS, "bounded_loss"): "lossy",
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
