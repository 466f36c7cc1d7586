"""Which reduction a caller means by `reduction=` and `compression=`."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import ConfigurationError
from paceline.reductions.adasum import Adasum
from paceline.reductions.mean import Mean
from paceline.reductions.reduction import Reduction

BY_NAME: dict[str, Callable[[], Reduction]] = {"mean": Mean, "adasum": Adasum}


def choose_reduction(reduction: Reduction | str | None) -> Reduction:
    """Return the reduction of that name, or the one given; the mean for None.

    Raises:
        ConfigurationError: There is none of that name, or it is something else altogether.
    """
    if isinstance(reduction, Reduction):
        return reduction
    make = BY_NAME.get(reduction if isinstance(reduction, str) else "mean")
    if make is None or not isinstance(reduction, str | None):
        raise ConfigurationError(
            f"reduction={reduction!r} is not a reduction. Give one of {', '.join(map(repr, BY_NAME))} or a "
            "paceline.reductions.Reduction."
        )
    return make()
