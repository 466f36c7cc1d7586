"""Cuts parameters into keys, gives every key to a server, and cuts buckets into messages.

Keys are cut in the order in which backward produces gradients. Each goes to the server that has the fewest bytes so
far. So after any number of keys two servers differ by one key at most. That holds for the whole model and for the part
that backward has produced at any moment, which hides traffic behind backward.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import ConfigurationError
from paceline.reductions import Message, real_numel
from paceline_servers.wire import KEY

# Keys begin at multiples of this, so a processor's vectors add up the same elements as in one tensor.
ALIGNED_ELEMENTS = 64
# The least number of equal keys per server in a large model, which makes servers equal to 1/64.
KEYS_PER_SERVER = 64


@dataclass(frozen=True)
class Key:
    """Elements of one parameter that live on one server."""

    number: int  # in the order in which keys were cut
    parameter: int  # its index, in registration order
    start: int  # first element
    stop: int  # behind the last element
    server: int  # the number of the server that keeps it


def largest_key_bytes(total_bytes: int, num_servers: int, width: int) -> int:
    """Return the largest number of bytes in a key, for elements of `width` bytes."""
    elements = total_bytes // (num_servers * KEYS_PER_SERVER * width)
    return max(1, elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS * width


def cut_keys(sizes: Sequence[int], widths: Sequence[int], num_servers: int) -> list[Key]:
    """Cut parameters into keys, in the order in which backward produces them.

    `sizes` are the parameters' numbers of elements in registration order, `widths` the bytes per element. Among the
    first n keys, for every n, two servers differ by at most the largest key. Raises ConfigurationError if there is no
    server, or a server would get nothing.
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


PIECE_BYTES = 1 << 20  # a server answers a piece while it receives the next


@dataclass(frozen=True)
class Piece:
    """Keys of one bucket that are sent to one server in one message."""

    server: int  # the number of the server
    keys: bytes  # the numbers of the keys, packed
    num_keys: int
    # Contiguous parts of the bucket: the first byte of each, and the one behind its last.
    spans: tuple[tuple[int, int], ...]


class Cutting:
    """The keys of a model's parameters, and the pieces of its buckets."""

    def __init__(self, parameters: Sequence[Parameter], num_servers: int) -> None:
        widths = [
            parameter.dtype.itemsize // (2 if parameter.is_complex() else 1) for parameter in parameters
        ]
        # In the order in which backward produces them
        self.keys = cut_keys([real_numel(parameter) for parameter in parameters], widths, num_servers)
        self.index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._keys_of: list[list[Key]] = [[] for _ in parameters]
        for key in self.keys:
            self._keys_of[key.parameter].append(key)
        self._pieces: dict[int, tuple[Sequence[Parameter], list[Piece]]] = {}
        self._num_servers = num_servers

    def keys_of(self, parameter: int) -> Sequence[Key]:
        """Return the keys of one parameter, by its index."""
        return self._keys_of[parameter]

    def pieces_of(self, message: Message) -> list[Piece]:
        """Return the pieces of a bucket. They are cached, because the layout changes rarely."""
        known = self._pieces.get(message.index)
        if known is None or known[0] is not message.parameters:
            known = message.parameters, list(self._cut(message))
            self._pieces[message.index] = known
        return known[1]

    def _cut(self, message: Message) -> Iterator[Piece]:
        collected = [_Collected(server) for server in range(self._num_servers)]
        width = message.flat.element_size()
        begin = message.flat.data_ptr()
        for gradient, parameter in zip(message.gradients, message.parameters, strict=True):
            offset = gradient.data_ptr() - begin
            for key in self._keys_of[self.index_of[id(parameter)]]:
                server = collected[key.server]
                server.add(key.number, offset + key.start * width, offset + key.stop * width)
                if server.num_bytes >= PIECE_BYTES:
                    yield server.take()
        yield from (server.take() for server in collected if server.num_bytes)


class _Collected:
    """The keys for one server that have not left yet."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._clear()

    def _clear(self) -> None:
        self._keys: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self.num_bytes = 0

    def add(self, key: int, start: int, stop: int) -> None:
        self._keys.append(key)
        if self._spans and self._spans[-1][1] == start:
            start = self._spans.pop()[0]
        self._spans.append((start, stop))
        self.num_bytes = sum(last - first for first, last in self._spans)

    def take(self) -> Piece:
        packed = b"".join(map(KEY.pack, self._keys))
        piece = Piece(self._server, packed, len(self._keys), tuple(self._spans))
        self._clear()
        return piece


def spans_of(flat: Tensor, piece: Piece) -> list[memoryview]:
    """Return a piece's memory in a bucket on the host."""
    values: Any = flat.detach().view(-1).view(torch.uint8).numpy()
    memory = memoryview(values)
    return [memory[first:last] for first, last in piece.spans]
