"""How the learning rate follows the size of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.errors import ConfigurationError

SCALING_RULES: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "none": lambda _: 1.0,
}


def rate_factor(scaling: str, batch: int, reference_batch: int) -> float:
    """What the reference rate is multiplied by for a batch of `batch` samples.

    Args:
        scaling: "linear": by the ratio of the batches, for SGD with and without momentum. "sqrt": by its square
            root, which Adam and its kin follow more closely. "none": not at all.
        batch: Samples of one step, over all ranks.
        reference_batch: Samples of one step for which the reference rate is right.

    Raises:
        ConfigurationError: There is no such rule, or a batch is not positive.

    Source:
        Goyal et al. 2017, section 2.1 (linear); Krizhevsky 2014, section 5, derives the square root.
    """
    if scaling not in SCALING_RULES:
        raise ConfigurationError(
            f"scaling={scaling!r} is not a rule for the rate. Give one of {', '.join(map(repr, SCALING_RULES))}."
        )
    for name, size in (("batch", batch), ("reference_batch", reference_batch)):
        if not 0 < size < math.inf:
            raise ConfigurationError(
                f"{name}={size} is not a positive number of samples. Give the samples of one step over all ranks."
            )
    return SCALING_RULES[scaling](batch / reference_batch)
