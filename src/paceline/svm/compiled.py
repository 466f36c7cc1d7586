"""numba's options for loops that numpy and torch would do in several passes over memory.

Rules
1. A loop that must be vectorised runs over a slice from 0, in SIMD lanes: `a[t0 + t]` and scalar minima are not.
2. Compiled code is kept on disk beside this file (or in numba's own cache folder): only the first process of a
   machine waits for the compiler.
3. No NaN or infinity reaches these loops (`fastmath` assumes so); the finite number `FAR` takes their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

LANES = 64  # of SIMD: so many numbers the compiler treats alike, some vector registers full
FAR = 1e30
_F = TypeVar("_F", bound=Callable[..., Any])


_OPTIONS: dict[str, Any] = {
    "fastmath": {"nnan", "ninf", "nsz", "arcp", "contract"},
    "error_model": "numpy",
    "nogil": True,
    "cache": True,
}


def compiled(function: _F) -> _F:
    """Compile when first called, and keep the code on disk."""
    return cast("_F", numba.njit(**_OPTIONS)(function))


def inlined(function: _F) -> _F:
    """As `compiled`, inside whatever calls it: to pass a dozen arrays takes as long as a short loop over them."""
    return cast("_F", numba.njit(forceinline=True, **_OPTIONS)(function))


def borrowing(function: _F) -> _F:
    """As `compiled`, without counting references: for short loops over slices; nothing can be allocated.

    Counting takes two atomic operations a slice. numba compiles some functions of its own so; its users' manual does
    not name the option.
    """
    return cast("_F", cast("Any", numba.njit)(_nrt=False, **_OPTIONS)(function))
