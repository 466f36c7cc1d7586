"""How much memory a computation takes at most, as torch's own allocator counts it on a CPU.

Every allocation and release is an event of torch's profiler; their running sum has a largest value. What libraries
allocate by themselves, as NNPACK does for its workspaces, is not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile

_ALLOCATION = "[memory]"


def peak_bytes(compute: Callable[[], Any]) -> int:
    """The most that was allocated at once during `compute()`, above what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        compute()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == _ALLOCATION]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((int(event.nbytes()) for event in events), initial=0))
