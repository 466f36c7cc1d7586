"""Cuts parameters into keys, and gives every key to a server, so that servers have the same bytes at every moment.

Keys are cut and handed out in the order in which backward produces gradients, each to the server that has the fewest
bytes so far. So after any number of keys two servers differ by one key at most: over the whole model, and, which is
what hides traffic behind backward, over whatever has been produced until some moment.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigurationError

# keys begin at multiples: whatever vectors a processor adds in, it adds them as in one tensor
ALIGNED_ELEMENTS = 64
# of equal size, at least, where the model is large enough: what makes servers equal to 1/64
KEYS_PER_SERVER = 64


@dataclass(frozen=True)
class Key:
    """Elements of one parameter that live on one server."""

    number: int  # in the order in which keys were cut
    parameter: int  # which, in registration order
    start: int  # first element
    stop: int  # behind the last element
    server: int  # who keeps it


def largest_key_bytes(total_bytes: int, num_servers: int, width: int) -> int:
    """Return how many bytes a key has at most, for elements of `width` bytes."""
    elements = total_bytes // (num_servers * KEYS_PER_SERVER * width)
    return max(1, elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS * width


def cut_keys(sizes: Sequence[int], widths: Sequence[int], num_servers: int) -> list[Key]:
    """Cut parameters, by their elements in registration order and bytes of each, into keys, as backward produces them.

    No server has more bytes than another by more than the largest key, among the first n keys, for every n. Raises
    ConfigurationError if there is no server, or some would have nothing.
    """
    if num_servers < 1:
        raise ConfigurationError(
            f"{num_servers} parameter servers cannot keep a model: start at least one, with paceline run --servers 1."
        )
    total = sum(size * width for size, width in zip(sizes, widths, strict=True))
    loads = [(0, server) for server in range(num_servers)]
    keys: list[Key] = []
    for parameter in reversed(range(len(sizes))):
        size, width = sizes[parameter], widths[parameter]
        most = largest_key_bytes(total, num_servers, width) // width
        for start in range(0, size, most):
            stop = min(start + most, size)
            load, server = loads[0]
            heapq.heapreplace(loads, (load + (stop - start) * width, server))
            keys.append(Key(len(keys), parameter, start, stop, server))
    if len(keys) < num_servers:
        raise ConfigurationError(
            f"{num_servers} parameter servers are too many for a model of {total} bytes: it is cut into {len(keys)} "
            f"keys, so that some servers would keep nothing. Start at most {max(len(keys), 1)}."
        )
    return keys
