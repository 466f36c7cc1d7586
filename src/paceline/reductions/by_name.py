"""The names that `reduction=` and `compression=` take, and the reduction that each stands for."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from paceline import compression as compressors
from paceline.compression import Compressor
from paceline.errors import ConfigurationError
from paceline.extras import REDUCTIONS, added, raise_if_missing
from paceline.reductions.reduction import Mean, Reduction


def _make(module: str, name: str) -> Reduction:
    """Import a class that few use only when it is asked for, and make one with its default settings."""
    made: Reduction = getattr(importlib.import_module(f"paceline.reductions.{module}"), name)()
    return made


def _compress_by(compressor: Compressor) -> Reduction:
    from paceline.reductions.compressed import Compressed  # noqa: PLC0415  only those who compress pay for it

    return Compressed(compressor)


BY_NAME: dict[str, Callable[[], Reduction]] = {"mean": Mean}
"""What `reduction=` takes besides the names that other packages add."""

COMPRESSIONS: dict[str, Callable[[], Reduction]] = {
    **{name: lambda kind=kind: _compress_by(kind()) for name, kind in compressors.BY_NAME.items()},  # type: ignore[misc]
    "powersgd": functools.partial(_make, "powersgd", "PowerSGD"),
}
"""What `compression=` takes besides "auto": a compressor or PowerSGD, with its default settings."""

_COMPRESSIONS_AND_AUTO: dict[str, Callable[[], Reduction]] = {
    **COMPRESSIONS,
    "auto": functools.partial(_make, "auto", "Auto"),
}


def choose_reduction(
    reduction: Reduction | str | None, compression: Compressor | Reduction | str | None = None
) -> Reduction:
    """Return the reduction that `DistributedDataParallel`'s two arguments stand for; the mean if both are None.

    Raises ConfigurationError for an unknown name or type, and for both if `reduction` is not the mean.
    """
    if compression is None or compression == "none":
        return _find(reduction, "reduction", BY_NAME) if reduction is not None else Mean()
    if reduction not in (None, "mean"):
        raise ConfigurationError(
            f"reduction={reduction!r} and compression={compression!r}: both decide how gradients are combined, "
            "and compression takes the mean of compressed gradients. Leave out one of them."
        )
    if isinstance(compression, Compressor):
        return _compress_by(compression)
    return _find(compression, "compression", _COMPRESSIONS_AND_AUTO)


def _find(given: object, argument: str, table: dict[str, Callable[[], Reduction]]) -> Reduction:
    if isinstance(given, Reduction):
        return given
    if isinstance(given, str) and given in table:
        return table[given]()
    others = added(REDUCTIONS) if argument == "reduction" else {}
    if isinstance(given, str) and given in others:
        made: Reduction = others[given].load()()
        return made
    if isinstance(given, str) and argument == "reduction":
        raise_if_missing(REDUCTIONS, given, f"reduction={given!r}")
    if isinstance(given, type) and issubclass(given, Compressor | Reduction):
        raise ConfigurationError(
            f"{argument}={given.__name__} is a class. Make one of it: {given.__name__}()."
        )
    what, known = "a paceline.reductions.Reduction", [*table, *others]
    if argument == "compression":
        what = "a paceline.compression.Compressor, or " + what
        known.append("none")
    raise ConfigurationError(
        f"{argument}={given!r} is not a {argument}. Give one of {', '.join(map(repr, known))} or {what}."
    )
