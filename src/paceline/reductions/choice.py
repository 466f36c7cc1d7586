"""Which reduction a caller means by `reduction=` and `compression=`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from paceline import compression as compressors
from paceline.compression import Compressor
from paceline.errors import ConfigurationError
from paceline.reductions.mean import Mean
from paceline.reductions.reduction import Reduction


def _make(home: str, name: str) -> Reduction:
    """Import what few use only when it is asked for."""
    made: Reduction = getattr(importlib.import_module(f"paceline.reductions.{home}"), name)()
    return made


def _compress_by(compressor: Compressor) -> Reduction:
    from paceline.reductions.compressed import Compressed  # noqa: PLC0415  only those who compress pay for it

    return Compressed(compressor)


BY_NAME: dict[str, Callable[[], Reduction]] = {
    "mean": Mean,
    "adasum": functools.partial(_make, "adasum", "Adasum"),
}


COMPRESSIONS: dict[str, Callable[[], Reduction]] = {
    **{name: lambda kind=kind: _compress_by(kind()) for name, kind in compressors.BY_NAME.items()},  # type: ignore[misc]
    "powersgd": functools.partial(_make, "powersgd", "PowerSGD"),
}
"""Every codec with its default settings: compressors, and reductions that compress."""

_UNDERSTOOD: dict[str, Callable[[], Reduction]] = {
    **COMPRESSIONS,
    "auto": functools.partial(_make, "auto", "Auto"),
}
"""By `compression=`: a codec, or what chooses one."""


def choose_reduction(
    reduction: Reduction | str | None, compression: Compressor | Reduction | str | None = None
) -> Reduction:
    """Return the reduction that the two arguments mean; the mean if both are None.

    Raises:
        ConfigurationError: There is none of that name, it is something else altogether, or both say how gradients are
            combined.
    """
    if compression is None:
        return _find(reduction, "reduction", BY_NAME) if reduction is not None else Mean()
    if reduction not in (None, "mean"):
        raise ConfigurationError(
            f"reduction={reduction!r} and compression={compression!r}: compression takes the mean of what the ranks "
            "say shorter, so each says how gradients are combined. Leave out either."
        )
    if isinstance(compression, Compressor):
        return _compress_by(compression)
    return _find(compression, "compression", _UNDERSTOOD)


def _find(given: object, argument: str, table: dict[str, Callable[[], Reduction]]) -> Reduction:
    if isinstance(given, Reduction):
        return given
    if isinstance(given, str) and given in table:
        return table[given]()
    what = "a paceline.reductions.Reduction"
    if argument == "compression":
        what = "a paceline.compression.Compressor, or " + what
    raise ConfigurationError(
        f"{argument}={given!r} is not a {argument}. Give one of {', '.join(map(repr, table))} or {what}."
    )
