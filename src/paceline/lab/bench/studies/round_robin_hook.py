"""Several process groups that take buckets in turn, as a communication hook; and a cap on each TCP connection.

Torch had a process group for this until 2024 (section 3.3 and figure 12 of the paper). The hook is the smallest
stand-in: collective number t goes to group t mod k. All ranks call it in the same order: buckets leave in order.
"""

# No postponed annotations here: torch compares those of a hook, and a string is not the type.
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SO_MAX_PACING_RATE = 47  # Linux; not in Python's socket module
_NO_CAP = 2**64 - 1


class RoundRobin:
    """The hook's state.

    Args:
        groups: Over the same ranks, in the same order on all of them.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self.groups = list(groups)
        self._num_launched = 0

    def next(self) -> dist.ProcessGroup:
        """Return the group whose turn it is."""
        group = self.groups[self._num_launched % len(self.groups)]
        self._num_launched += 1
        return group


def in_turn(state: RoundRobin, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over ranks, by the next group."""
    group = state.next()
    flat = bucket.buffer().div_(group.size())
    work: Any = dist.all_reduce(flat, group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


# The call starts all it ever starts, so our wrapper may launch the next bucket before this one is done.
in_turn.starts_all_at_once = True  # type: ignore[attr-defined]


def cap_flows(bytes_per_s: float | None) -> int:
    """Let the kernel pace every TCP connection of this process, to other addresses than its own, at a rate.

    Args:
        bytes_per_s: For each connection; None lifts the cap.

    Returns:
        How many connections there are.
    """
    rate = struct.pack("=Q", _NO_CAP if bytes_per_s is None else int(bytes_per_s))
    num_flows = 0
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                    continue
                if connection.getpeername()[0] != connection.getsockname()[0]:
                    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
                    num_flows += 1
    return num_flows
