"""How the tests of this folder are run: by ranks, as the device stays torch's accelerator where it is loaded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from device.late import build, start
from device.ranks import ranks
from harness.ranks import _load

_missing = build.missing()

device = [
    pytest.mark.processes,
    pytest.mark.compiles,
    pytest.mark.timeout(600),  # a minute of a processor for the build, if it is the first of a run
    pytest.mark.skipif(_missing is not None, reason=_missing or ""),
]
"""Starts ranks that build the device, or load what was built; skipped where that is impossible."""


def on_rank_0(test: Callable[..., None]) -> Callable[..., None]:
    """Perform a test's function in the process of a rank, alone; its arguments are pickled."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        source = inspect.getfile(test)
        ranks().run(_perform, source, test.__module__, test.__name__, arguments)

    return run


def _perform(
    rank: int, _num_ranks: int, source: str, module: str, name: str, arguments: dict[str, Any]
) -> None:
    start()  # before the first backward of the process, when autograd counts the devices
    if rank == 0:
        getattr(_load(source, module), name).__wrapped__(**arguments)
