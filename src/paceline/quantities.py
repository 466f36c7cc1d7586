"""Parses and formats rates, times and percentages as people type them (`1Gbit`, `30us`); pure."""

from __future__ import annotations

import math
import re

from paceline.errors import ConfigurationError

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s].*?)?\s*")
_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def rate(text: str, option: str) -> float:
    """Parse bits per second: `1Gbit`, `100 Mbit/s`. Not `1Gbps`, by which networkers mean bits and `tc` means bytes."""
    number, unit = split(text, option, "a rate such as 1Gbit or 100Mbit")
    if unit.lower().endswith("bps"):
        scale = unit[:-3]
        raise ConfigurationError(
            f"{option} {text} can be read in two ways: bps is bits per second to networkers, and "
            "bytes per second to tc. "
            f"Write {option} {number:g}{scale}bit for bits, {option} {8 * number:g}{scale}bit for bytes."
        )
    key = unit.lower().removesuffix("/s").removesuffix("ps").rstrip("s")
    return number * factor(key, _BITS_PER_S, text, option, "kbit, Mbit or Gbit (bits a second)")


def seconds(text: str, option: str, *, is_bare_possible: bool = False) -> float:
    """Return the seconds of a text such as `1ms`, `250us` or `2s`. With `is_bare_possible` the unit may be missing."""
    if is_bare_possible and re.fullmatch(r"[\d.eE+\-\s]*", text):
        text = f"{text}s"
    number, unit = split(text, option, "a time such as 1ms or 250us")
    return number * factor(unit.lower(), _SECONDS, text, option, "us, ms or s")


def percentage(text: str, option: str) -> float:
    """Parse a ratio: `0.1%` is 0.001."""
    number, unit = split(text, option, "a percentage such as 0.1%")
    if unit != "%":
        raise ConfigurationError(
            f"{option} {text} has no percent sign. Pass a percentage, for example {option} {number:g}%."
        )
    return number / 100


def cores(text: str, option: str) -> float:
    """Parse a number of cores: `0.5` and `50%` are half of one."""
    if not text.strip().endswith("%"):
        text = f"{text}cores"
    number, unit = split(text, option, "a number of cores, such as 0.5 or 50%")
    return number * factor(unit.lower(), {"%": 0.01, "core": 1.0, "cores": 1.0}, text, option, "cores or %")


def show_rate(bits_per_s: float, digits: int = 4) -> str:
    """`1 Gbit/s`."""
    if bits_per_s == math.inf:
        return "no limit"
    units = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))
    return show(bits_per_s, units, digits)


def show_seconds(duration_s: float) -> str:
    """Return a time as text, such as `1 ms`."""
    return show(duration_s, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))


def ms(duration_s: float) -> str:
    """Return a time as text with three digits: `12.3 ms`, `1.23 s`. Below a second it is in milliseconds."""
    return f"{duration_s * 1e3:,.3g} ms" if duration_s < 1 else f"{duration_s:,.3g} s"


def split(text: str, option: str, wanted: str) -> tuple[float, str]:
    """Return the number and the unit of a text, or raise ConfigurationError."""
    found = _NUMBER.fullmatch(text)
    if found is None or not math.isfinite(float(found[1])):
        raise ConfigurationError(f"{option} {text!r} is not {wanted}.")
    if not found[2]:
        raise ConfigurationError(f"{option} {text} has no unit. Pass {wanted}.")
    return float(found[1]), found[2]


def factor(unit: str, known: dict[str, float], text: str, option: str, units: str) -> float:
    """Return the number that a unit stands for."""
    if unit not in known:
        raise ConfigurationError(f"{option} {text} has an unknown unit. Use {units}.")
    return known[unit]


def show(value: float, units: tuple[tuple[str, float], ...], digits: int = 4) -> str:
    """Return a value as text, in the largest unit that is not larger than the value."""
    for unit, size in units:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.{digits}g} {unit}"
    return f"{value / units[-1][1]:.3g} {units[-1][0]}"
