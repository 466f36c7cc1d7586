"""How loops are compiled that numpy and torch would do in several passes over memory.

Rules
1. A loop that must be vectorised runs over a slice from 0, in lanes: `a[t0 + t]` and scalar minima are not.
2. Compiled code is kept on disk beside this file (or in numba's own cache folder): only the first process of a
   machine waits for the compiler.
3. No NaN or infinity reaches these loops; "cannot" is the finite number `FAR`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

LANES = 64
FAR = 1e30
_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile when first called, and keep the code on disk."""
    fast = {"nnan", "ninf", "nsz", "arcp", "contract"}
    return cast("_F", numba.njit(fastmath=fast, error_model="numpy", nogil=True, cache=True)(function))
