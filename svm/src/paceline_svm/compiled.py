"""numba's options for loops that numpy and torch would do in several passes over memory.

Rules
1. A loop that must be vectorised runs over a slice from 0, in SIMD lanes: `a[t0 + t]` and scalar minima are not.
2. Compiled code is kept on disk beside this file (or in numba's own cache folder): only the first process of a
   machine waits for the compiler.
3. A first fit waits for the compiler, so code is compiled for one form of samples and one kernel at a time: what does
   not apply is passed as None, and numba leaves out what follows `if x is not None`, x an argument.
4. Code on disk is renewed when any file with such loops changes.
5. No NaN or infinity reaches these loops (`fastmath` assumes so); the finite number `FAR` takes their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numpy.typing import NDArray

from paceline import linked_code
from paceline.numba_cache import keep, stamp_of

LANES = 64  # of SIMD: so many numbers the compiler treats alike, some vector registers full
FAR = 1e30
_F = TypeVar("_F", bound=Callable[..., Any])


_OPTIONS: dict[str, Any] = {
    "fastmath": {"nnan", "ninf", "nsz", "arcp", "contract"},
    "error_model": "numpy",
    "nogil": True,
    "_nrt": False,
}
_SOURCES = stamp_of(
    [
        Path(linked_code.__file__),
        *(
            path
            for path in Path(__file__).parent.glob("*.py")
            if b"paceline_svm.compiled" in path.read_bytes()
        ),
    ]
)


def compiled(
    function: _F,
    meanwhile: Callable[[Any], Any] | None = None,
    changes: Callable[..., list[NDArray[Any]]] | None = None,
) -> _F:
    """Compile when first called from Python, and keep the code on disk; `plain.py` may stand in until it is there.

    References are not counted, so nothing can be allocated: counting takes two atomic operations a slice, and several
    times as long to compile. numba compiles some functions of its own so; its users' manual does not name the option.

    Args:
        function: To compile.
        meanwhile: As in `numba_cache.keep`.
        changes: As in `plain.stand_in`.
    """
    made = linked_code.entry(function, _OPTIONS)
    made.stand_in = functools.partial(_stand_in, made, changes)
    keep(made, _SOURCES, meanwhile, made.stand_in)
    return cast("_F", made)


def _stand_in(made: Any, changes: Any, is_there: Callable[[], bool]) -> Callable[..., Any] | None:
    from paceline_svm.plain import stand_in  # noqa: PLC0415  it knows all that is compiled

    return stand_in(made, changes, is_there)


def inner(function: _F) -> _F:
    """As `compiled`, for what only compiled code calls: it becomes part of its callers' code (`linked_code.py`)."""
    return cast("_F", linked_code.inner(function, _OPTIONS))


def hot(function: _F) -> _F:
    """As `inner`, for the loops of every pair update."""
    return cast("_F", linked_code.inner(function, _OPTIONS, is_hot=True))
