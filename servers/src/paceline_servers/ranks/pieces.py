"""Which bytes of a bucket go to which server, in which messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.reductions import Message, real_numel
from paceline_servers.keys import Key, cut_keys
from paceline_servers.wire import KEY

PIECE_BYTES = 1 << 20  # a server answers a piece while it receives the next


@dataclass(frozen=True)
class Piece:
    """Keys of one bucket that are sent to one server in one message."""

    server: int  # its number
    keys: bytes  # their numbers, packed
    num_keys: int  # how many
    # First byte and the one behind the last, in the bucket, of what follows each other.
    spans: tuple[tuple[int, int], ...]


class Cutting:
    """How a model's parameters are cut into keys, and its buckets into pieces."""

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
        """Of one parameter, by its index."""
        return self._keys_of[parameter]

    def pieces_of(self, message: Message) -> list[Piece]:
        """The messages of a bucket, whose layout changes rarely."""
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
    """Keys for one server that have not left yet."""

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
    """A piece's memory in a bucket on the host."""
    values: Any = flat.detach().view(-1).view(torch.uint8).numpy()
    memory = memoryview(values)
    return [memory[first:last] for first, last in piece.spans]
