"""A connection that never waits: outgoing frames queue up, arriving frames are handed out whole."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.errors import ProtocolError
from paceline_servers.wire import HEADER, Frame, header_of

_MOST_VIEWS = 256  # of one system call
_TURN_BYTES = 4 << 20  # then another connection has its turn

Place = Callable[[Frame, int], Sequence[Any]]
"""A function that returns the memory for a frame's body, given the frame without its body and the body's length."""


def fresh_place(_: Frame, num_bytes: int) -> Sequence[Any]:
    """Return new memory for a frame's body."""
    return [np.empty(num_bytes, np.uint8)]


class Connection:
    """A connection that sends and receives frames over a socket, which it owns. `place` gives the memory for bodies."""

    def __init__(self, connected: socket.socket, place: Place = fresh_place) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.bytes_sent = self.bytes_received = 0
        self._place = place
        self._outgoing: deque[memoryview] = deque()
        self._header = bytearray(HEADER.size)
        self._start()

    def _start(self) -> None:
        """Expect a header."""
        self._frame: Frame | None = None
        self._body: tuple[Any, ...] = ()
        self._targets = deque([memoryview(self._header)])

    @property
    def wants_to_send(self) -> bool:
        return bool(self._outgoing)

    def queue(self, frame: Frame) -> None:
        """Queue a frame, which `send` sends. Its body must not change until then."""
        self._outgoing.append(memoryview(frame.header))
        self._outgoing.extend(view for part in frame.body if len(view := memoryview(part).cast("B")))

    def send(self) -> None:
        """Send as much as the socket takes. Raises OSError if the other end is gone."""
        left = _TURN_BYTES
        while self._outgoing and left > 0:
            views = [self._outgoing[i] for i in range(min(len(self._outgoing), _MOST_VIEWS))]
            try:
                sent = self.socket.sendmsg(views)
            except (BlockingIOError, InterruptedError):
                return
            self.bytes_sent += sent
            left -= sent
            _drop(self._outgoing, sent)

    def receive(self) -> list[Frame]:
        """Receive whole frames. Raises OSError if the other end is gone, ProtocolError if it breaks the protocol."""
        frames: list[Frame] = []
        left = _TURN_BYTES
        while left > 0:
            views = [self._targets[i] for i in range(min(len(self._targets), _MOST_VIEWS))]
            try:
                received = self.socket.recvmsg_into(views)[0]
            except (BlockingIOError, InterruptedError):
                break
            if not received:
                if frames:
                    break  # the next call reads the end again
                raise ConnectionResetError("the connection was closed")
            self.bytes_received += received
            left -= received
            _drop(self._targets, received)
            while not self._targets:
                self._advance(frames)
        return frames

    def _advance(self, frames: list[Frame]) -> None:
        """Continue after a whole header or a whole body."""
        if self._frame is None:
            self._frame, num_bytes = header_of(bytes(self._header))
            self._body = tuple(self._place(self._frame, num_bytes)) if num_bytes else ()
            self._targets = deque(memoryview(part).cast("B") for part in self._body)
            if sum(map(len, self._targets)) != num_bytes:
                raise ProtocolError(f"an answer of {num_bytes} bytes does not fit what was asked for")
        if not self._targets:
            whole = self._frame
            frames.append(Frame(whole.kind, whole.number, whole.num_keys, whole.dtype, self._body))
            self._start()

    def close(self) -> None:
        self.socket.close()


def _drop(views: deque[memoryview], num_bytes: int) -> None:
    """Remove the first bytes."""
    while num_bytes:
        first = views[0]
        if num_bytes < len(first):
            views[0] = first[num_bytes:]
            return
        num_bytes -= len(first)
        views.popleft()
