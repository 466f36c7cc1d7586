"""How many samples and tokens a forward was given: of its first tensor, the first dimension and its whole numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def samples_and_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return both; None: nobody can tell. Local; reads shapes only."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim():
            has_tokens = value.dim() > 1 and not value.is_floating_point() and not value.is_complex()
            return value.size(0), value.numel() if has_tokens else None
    return None, None
