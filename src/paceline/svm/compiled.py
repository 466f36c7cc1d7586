"""numba's options for loops that numpy and torch would do in several passes over memory.

Rules
1. A loop that must be vectorised runs over a slice from 0, in SIMD lanes: `a[t0 + t]` and scalar minima are not.
2. Compiled code is kept on disk beside this file (or in numba's own cache folder): only the first process of a
   machine waits for the compiler.
3. A first fit waits for the compiler, so code is compiled for one form of samples and one kernel at a time: what does
   not apply is passed as None, and numba leaves out what follows `if x is not None`, x an argument.
4. The files of the cache are renewed when the file of the function itself changes, not when one that it calls does:
   after changing a function that another file calls, remove `__pycache__` or set NUMBA_CACHE_DIR.
5. No NaN or infinity reaches these loops (`fastmath` assumes so); the finite number `FAR` takes their place.
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
    """Compile when first called from Python, and keep the code on disk.

    References are not counted, so nothing can be allocated: counting takes two atomic operations a slice, and several
    times as long to compile. numba compiles some functions of its own so; its users' manual does not name the option.
    """
    return cast("_F", cast("Any", numba.njit)(_nrt=False, **_OPTIONS)(function))


def inner(function: _F) -> _F:
    """As `compiled`, for what only compiled code calls: without the code that unpacks Python's arguments."""
    options = {**_OPTIONS, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast("_F", cast("Any", numba.njit)(**options)(function))
