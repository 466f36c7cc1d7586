"""What may be broken on purpose in the fake NCCL of this process: a test that does not notice tests nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

FAULTS = {
    "input wait": "a collective does not wait for the stream that wrote its input",
    "output wait": "a work's wait does not make the current stream wait",
    "stash": "nobody keeps a collective's tensors until it is done",
    "order": "of two collectives, this rank performs the second one first",
    "failure": "a collective fails on this rank when the device comes to it",
    "flush": "a group that is shut down drops what the device has not come to; c10d does not say that it completes it",
    "host wait": "a work's wait makes the host wait",
    "post": "an operation that is aborted posts nothing to its peers, which then wait until they abort themselves",
}
"""By name, what is broken."""

_broken: set[str] = set()


@contextlib.contextmanager
def broken(fault: str) -> Iterator[None]:
    """Break it, in this process, for a while."""
    if fault not in FAULTS:
        raise ValueError(f"there is no fault {fault!r}: {', '.join(FAULTS)}")
    _broken.add(fault)
    try:
        yield
    finally:
        _broken.discard(fault)


def is_broken(fault: str) -> bool:
    """Whether it is broken now."""
    return fault in _broken
