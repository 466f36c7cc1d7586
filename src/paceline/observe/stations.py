"""Ranges in torch's profiler for the stations of a gradient's way, named as the fields of the timings."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

PREFIX = "paceline:"
_UNSEEN = nullcontext()


def station(name: str) -> AbstractContextManager[object]:
    """A range `paceline:<name>` around what is done within; costs a tenth of a microsecond where no profiler runs."""
    return record_function(PREFIX + name) if _profiler_enabled() else _UNSEEN
