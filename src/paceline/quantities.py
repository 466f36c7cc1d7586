"""Parses and formats rates, sizes, times and percentages as people type them (`1Gbit`, `256KiB`); pure."""

from __future__ import annotations

import math
import re

from paceline.errors import ConfigurationError

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s].*?)?\s*")
_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BYTES = {
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "kib": 1024.0,
    "mib": 1024.0**2,
    "gib": 1024.0**3,
}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def whole(text: str, option: str) -> int:
    """A whole number: `4`."""
    if not text.strip().lstrip("+-").isdecimal():
        raise ConfigurationError(f"{option} {text!r} is not a whole number.")
    return int(text)


def rate(text: str, option: str) -> float:
    """Bits per second: `1Gbit`, `100 Mbit/s`. Not `1Gbps`, by which networkers mean bits and `tc` means bytes."""
    number, unit = _split(text, option, "a rate such as 1Gbit or 100Mbit")
    if unit.lower().endswith("bps"):
        scale = unit[:-3]
        raise ConfigurationError(
            f"{option} {text} can be read in two ways: bps is bits a second to networkers, and bytes a second to tc. "
            f"Write {option} {number:g}{scale}bit for bits, {option} {8 * number:g}{scale}bit for bytes."
        )
    key = unit.lower().removesuffix("/s").removesuffix("ps").rstrip("s")
    return number * _factor(key, _BITS_PER_S, text, option, "kbit, Mbit or Gbit (bits a second)")


def size(text: str, option: str) -> int:
    """Bytes: `256KiB`, `1MB`, `1500B`."""
    number, unit = _split(text, option, "a size such as 256KiB or 1MB")
    return round(number * _factor(unit.lower(), _BYTES, text, option, "B, kB, KiB, MB or MiB"))


def seconds(text: str, option: str) -> float:
    """Seconds: `1ms`, `250us`, `2s`."""
    number, unit = _split(text, option, "a time such as 1ms or 250us")
    return number * _factor(unit.lower(), _SECONDS, text, option, "us, ms or s")


def percentage(text: str, option: str) -> float:
    """A ratio: `0.1%` is 0.001."""
    number, unit = _split(text, option, "a percentage such as 0.1%")
    if unit != "%":
        raise ConfigurationError(
            f"{option} {text} has no percent sign. Pass a percentage, for example {option} {number:g}%."
        )
    return number / 100


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


def show_rate(bits_per_s: float, digits: int = 4) -> str:
    """`1 Gbit/s`."""
    if bits_per_s == math.inf:
        return "no limit"
    units = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))
    return _show(bits_per_s, units, digits)


def show_size(num_bytes: float) -> str:
    """`256 KiB`."""
    return _show(num_bytes, (("GiB", 1024.0**3), ("MiB", 1024.0**2), ("KiB", 1024.0), ("B", 1.0)))


def show_seconds(duration_s: float) -> str:
    """`1 ms`."""
    return _show(duration_s, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))


def ms(duration_s: float) -> str:
    """Three digits of a time, in milliseconds below a second: `12.3 ms`, `1.23 s`."""
    return f"{duration_s * 1e3:,.3g} ms" if duration_s < 1 else f"{duration_s:,.3g} s"


def show_percentage(ratio: float) -> str:
    """`0.1 %`."""
    return f"{ratio * 100:g} %"


def _split(text: str, option: str, wanted: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text)
    if found is None or not math.isfinite(float(found[1])):
        raise ConfigurationError(f"{option} {text!r} is not {wanted}.")
    if not found[2]:
        raise ConfigurationError(f"{option} {text} has no unit. Pass {wanted}.")
    return float(found[1]), found[2]


def _factor(unit: str, known: dict[str, float], text: str, option: str, units: str) -> float:
    if unit not in known:
        raise ConfigurationError(f"{option} {text} has an unknown unit. Use {units}.")
    return known[unit]


def _show(value: float, units: tuple[tuple[str, float], ...], digits: int = 4) -> str:
    for unit, factor in units:
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.{digits}g} {unit}"
    return f"{value / units[-1][1]:.3g} {units[-1][0]}"
