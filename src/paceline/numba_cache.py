"""When the code that numba keeps on disk is old: as soon as any file has changed whose contents are compiled in.

numba itself looks at the file of the compiled function only, not at those of the functions that it calls and of the
constants that it uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Stamp = tuple[tuple[str, int, int], ...]


def stamp_of(files: Iterable[Path]) -> Stamp:
    """What changes when one of these files does."""
    return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(set(files)))


def renew_with(function: Any, stamp: Stamp) -> None:
    """Let the stored code of a function made by `numba.njit(cache=True)` be that of this stamp alone. Local."""
    with contextlib.suppress(AttributeError):  # another numba keeps it elsewhere: then as numba does it
        function._cache._cache_file._source_stamp = stamp
