"""Parses and formats sizes, whole numbers and values of several hosts as people type them (`256KiB`, `1,2`); pure."""

from __future__ import annotations

from paceline.errors import ConfigurationError
from paceline.quantities import factor, show, split

_BYTES = {
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "kib": 1024.0,
    "mib": 1024.0**2,
    "gib": 1024.0**3,
}


def whole(text: str, option: str) -> int:
    """A whole number: `4`."""
    if not text.strip().lstrip("+-").isdecimal():
        raise ConfigurationError(f"{option} {text!r} is not a whole number.")
    return int(text)


def size(text: str, option: str) -> int:
    """Bytes: `256KiB`, `1MB`, `1500B`."""
    number, unit = split(text, option, "a size such as 256KiB or 1MB")
    return round(number * factor(unit.lower(), _BYTES, text, option, "B, kB, KiB, MB or MiB"))


def per_host(text: str, num_hosts: int, option: str) -> list[str]:
    """Split one value for all hosts, or one a host separated by commas; always returns `num_hosts` values."""
    values = [value.strip() for value in text.split(",")]
    if len(values) == 1:
        return values * num_hosts
    if len(values) != num_hosts:
        raise ConfigurationError(
            f"{option} {text} holds {len(values)} values for {num_hosts} host(s). Pass one value for all of them, or "
            f"{num_hosts} separated by commas."
        )
    return values


def show_size(num_bytes: float) -> str:
    """`256 KiB`."""
    return show(num_bytes, (("GiB", 1024.0**3), ("MiB", 1024.0**2), ("KiB", 1024.0), ("B", 1.0)))


def show_percentage(ratio: float) -> str:
    """`0.1 %`."""
    return f"{ratio * 100:g} %"
