"""Connections between the agents of a job: signed frames that arrive whole or not at all, and may be lost.

    listener  greeting, 32 random bytes
    sender    frames: length of the body (4 bytes), code (32), body

Rules
1. A connection carries frames one way only, from the end that opened it to the listener. So two agents have two.
2. A frame's code is an HMAC-SHA256 with the job's token over the listener's random bytes, the frame's number and its
   body. Without the token no frame gets through, and a recorded frame fits no other connection or place.
3. A stranger is dropped first: at its first wrong frame, after `PROOF_S` without one, or when `MOST_STRANGERS` wait.
4. No call waits. A frame for an agent that is not reached is dropped. The agent sends it again if it is still needed.
5. The listener uses one interface: the address that it is given.
6. A connection that asks for the state of a rank (`state_call.py`) is handed over to a rank, and the agents use it no
   longer.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import selectors
import socket
from dataclasses import dataclass, field

from paceline.launch.elastic import state_call
from paceline.launch.elastic.codes import (
    CODE_BYTES,
    CONNECT_S,
    GREETING,
    LENGTH,
    NONCE_BYTES,
    code_of,
    frame_of,
)
from paceline.launch.elastic.plan import Address

MOST_BYTES = 1 << 20  # of a body
MOST_FIRST_BYTES = 1 << 16  # of the first one: what a stranger can make us hold
MOST_STRANGERS = 32
PROOF_S = 10.0
_MOST_QUEUED = 64
_HEAD = LENGTH.size + CODE_BYTES
_PART_BYTES = 1 << 16


@dataclass(frozen=True)
class Received:
    """A frame whose sender knows the token."""

    connection: int  # by which `Links.drop` ends it
    body: bytes


@dataclass(frozen=True)
class Refused:
    """The event that no process listens at this address any more, although its host lives."""

    address: Address


@dataclass(frozen=True)
class Closed:
    """The event that the sender of this connection has closed it, or has died."""

    connection: int


@dataclass
class _Incoming:
    """A connection that others have opened."""

    socket: socket.socket
    nonce: bytes
    since_s: float
    number: int = 0  # of the next frame
    data: bytearray = field(default_factory=bytearray)


@dataclass
class _Outgoing:
    """A connection of ours."""

    socket: socket.socket
    address: Address
    since_s: float
    nonce: bytes = b""  # of the listener, once it has greeted
    number: int = 0
    data: bytearray = field(default_factory=bytearray)
    queued: list[bytes] = field(default_factory=list)


class Links:
    """All connections of an agent.

    Args:
        listen: Where; port 0 takes a free one.
        token: The job's.

    Attributes:
        address: Where it listens.

    Raises:
        OSError: The address is taken, or is none of this host.
    """

    def __init__(self, listen: Address, token: str) -> None:
        self._token = token.encode()
        self._selector = selectors.DefaultSelector()
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        self._listener = socket.create_server(listen, family=family, backlog=128)
        self._listener.setblocking(False)
        self.address = Address(*self._listener.getsockname()[:2])
        self._wake, self._woken = socket.socketpair()
        for each in (self._listener, self._woken):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[Address, _Outgoing] = {}
        self._events: list[Received | Refused | Closed] = []

    def wake(self) -> None:
        """Let `turn` return now; to be called by any thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b"w")

    def post(self, address: Address, body: bytes, now_s: float) -> None:
        """Send a frame to who listens there, if it can be reached."""
        link = self._outgoing.get(address) or self._connect(address, now_s)
        if link is not None and len(link.queued) < _MOST_QUEUED:
            link.queued.append(body)
            self._send(link)

    def drop(self, connection: int) -> None:
        """End a connection whose sender says what it may not."""
        if connection in self._incoming:
            self._close(self._incoming.pop(connection).socket)

    def turn(self, timeout_s: float, now_s: float) -> list[Received | Refused | Closed]:
        """Send and receive what is possible; waits for something to happen, at most so long."""
        self._give_up(now_s)
        for key, _ in self._selector.select(0.0 if self._events else timeout_s):
            if key.fileobj is self._listener:
                self._accept(now_s)
            elif key.fileobj is self._woken:
                with contextlib.suppress(OSError):
                    self._woken.recv(4096)
            elif isinstance(key.data, _Incoming):
                self._receive(key.fd, key.data)
            elif isinstance(key.data, _Outgoing):
                self._go_on(key.data)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all."""
        sockets = [link.socket for link in self._incoming.values()]
        for each in sockets + [link.socket for link in self._outgoing.values()]:
            self._close(each)
        for one in (self._listener, self._wake, self._woken):
            one.close()
        self._selector.close()

    def hand_over(self, connection: int, asked: bytes) -> socket.socket | None:
        """Let go of the connection by which `state_call` asked so; None: it is closed."""
        if connection not in self._incoming:
            return None
        given = self._incoming.pop(connection).socket
        self._selector.unregister(given)
        state_call.answer(given, self._token, asked)
        return given

    # ---- incoming

    def _accept(self, now_s: float) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:  # it is gone already; or no descriptor is left
            self._drop_stranger()
            return
        connected.setblocking(False)
        link = _Incoming(connected, secrets.token_bytes(NONCE_BYTES), now_s)
        with contextlib.suppress(OSError):
            connected.send(GREETING + link.nonce)
        self._incoming[connected.fileno()] = link
        self._selector.register(connected, selectors.EVENT_READ, link)
        if sum(not each.number for each in self._incoming.values()) > MOST_STRANGERS:
            self._drop_stranger()

    def _drop_stranger(self) -> None:
        """The oldest of those that have shown nothing."""
        strangers = [(link.since_s, fd) for fd, link in self._incoming.items() if not link.number]
        if strangers:
            self.drop(min(strangers)[1])

    def _receive(self, fd: int, link: _Incoming) -> None:
        try:
            part = link.socket.recv(_PART_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            part = b""
        link.data += part
        if not part or not self._take_frames(fd, link):
            self.drop(fd)
            if link.number:
                self._events.append(Closed(fd))

    def _take_frames(self, fd: int, link: _Incoming) -> bool:
        """Return whether all that has arrived is of an agent of this job."""
        while len(link.data) >= _HEAD:
            (length,) = LENGTH.unpack_from(link.data)
            if length > (MOST_BYTES if link.number else MOST_FIRST_BYTES):
                return False
            if len(link.data) < _HEAD + length:
                return True
            code, body = bytes(link.data[LENGTH.size : _HEAD]), bytes(link.data[_HEAD : _HEAD + length])
            if not hmac.compare_digest(code, code_of(self._token, link.nonce, link.number, body)):
                return False
            del link.data[: _HEAD + length]
            link.number += 1
            self._events.append(Received(fd, body))
        return True

    # ---- outgoing

    def _connect(self, address: Address, now_s: float) -> _Outgoing | None:
        connected = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = connected.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            connected.close()
            if code == errno.ECONNREFUSED:
                self._events.append(Refused(address))
            return None
        link = self._outgoing[address] = _Outgoing(connected, address, now_s)
        self._selector.register(connected, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        return link

    def _go_on(self, link: _Outgoing) -> None:
        """The listener has greeted, takes more, or is gone."""
        try:
            part = link.socket.recv(_PART_BYTES)
        except (BlockingIOError, InterruptedError):
            part = None
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                self._events.append(Refused(link.address))
            part = b""
        if part == b"":
            self._end(link)
            return
        if part and not link.nonce:
            link.data += part
            if len(link.data) >= len(GREETING) + NONCE_BYTES:
                if not link.data.startswith(GREETING):
                    self._end(link)
                    return
                link.nonce = bytes(link.data[len(GREETING) :][:NONCE_BYTES])
                link.data = bytearray()
        self._send(link)

    def _send(self, link: _Outgoing) -> None:
        if not link.nonce:
            self._selector.modify(link.socket, selectors.EVENT_READ, link)
            return
        for body in link.queued:
            link.data += frame_of(self._token, link.nonce, link.number, body)
            link.number += 1
        link.queued.clear()
        try:
            del link.data[: link.socket.send(link.data) if link.data else 0]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._end(link)
            return
        if len(link.data) > MOST_BYTES:  # it has not read for long
            self._end(link)
            return
        waits = selectors.EVENT_WRITE if link.data else 0
        self._selector.modify(link.socket, selectors.EVENT_READ | waits, link)

    def _end(self, link: _Outgoing) -> None:
        if self._outgoing.get(link.address) is link:
            del self._outgoing[link.address]
        self._close(link.socket)

    def forget(self, address: Address) -> None:
        """Drop the connection to a silent address, so that the next frame opens another one."""
        if address in self._outgoing:
            self._end(self._outgoing[address])

    # ---- both

    def _give_up(self, now_s: float) -> None:
        for link in list(self._outgoing.values()):
            if not link.nonce and now_s - link.since_s > CONNECT_S:
                self._end(link)
        for fd, waiting in list(self._incoming.items()):
            if not waiting.number and now_s - waiting.since_s > PROOF_S:
                self.drop(fd)

    def _close(self, connected: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connected)
        connected.close()
