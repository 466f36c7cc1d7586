"""Connections between the agents of a job: signed frames that arrive whole or not at all, and may be lost.

    listener  greeting, 32 random bytes
    sender    frames: length of the body (4 bytes), code (32), body

To get the state of a rank that trains on the listener's host, a process calls (`call_for_state`):

    listener  greeting, random bytes
    caller    one frame: `_ASKS`, or `_SHADOWS` and the place of a rank on its host; random bytes of its own
    listener  a code over these; for a shadow also a length and JSON (`givers.py`)
              what follows is what the rank sends (`elastic/replay.py`), not encrypted

Rules
1. A connection carries frames one way only, from the end that opened it to the listener. So two agents have two.
2. A frame's code is an HMAC-SHA256 with the job's token over the listener's random bytes, the frame's number and its
   body. Without the token no frame gets through, and a recorded frame fits no other connection or place.
3. A stranger is dropped first: at its first wrong frame, after `PROOF_S` without one, or when `MOST_STRANGERS` wait.
4. No call waits. A frame for an agent that is not reached is dropped. The agent sends it again if it is still needed.
5. The listener uses one interface: the address that it is given.
6. A connection that asks for the state of a rank is handed over to a rank, and the agents use it no longer. Both ends
   know the job's token before that rank hears of it. No rank listens.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from paceline.launch.elastic.plan import Address

GREETING = b"paceline agents 5\n"
NONCE_BYTES = CODE_BYTES = 32
MOST_BYTES = 1 << 20  # of a body
MOST_FIRST_BYTES = 1 << 16  # of the first one: what a stranger can make us hold
MOST_STRANGERS = 32
PROOF_S = 10.0
CONNECT_S = 1.0  # then the connection is tried anew: TCP itself would wait ever longer after a cut
_MOST_QUEUED = 64
_LENGTH, _NUMBER = struct.Struct("!I"), struct.Struct("!Q")
_HEAD = _LENGTH.size + CODE_BYTES
_PART_BYTES = 1 << 16
_ASKS, _SHADOWS, _GIVES = b"state ", b"share ", b"given"
_CUT_MS = 10_000  # that what a giver has sent may be unconfirmed
_SLOW_MS = 60_000  # the same to a shadow, which may read nothing while it writes
_LOST_MS = 5_000  # that what a receiver has sent may be
# Seconds, and how often: who only reads hears nothing of a cut.
_SILENCE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))


def frame_of(key: bytes, nonce: bytes, number: int, body: bytes) -> bytes:
    """Return a frame as it is sent."""
    return _LENGTH.pack(len(body)) + _code_of(key, nonce, number, body) + body


def _code_of(key: bytes, nonce: bytes, number: int, body: bytes) -> bytes:
    return hmac.new(key, nonce + _NUMBER.pack(number) + body, hashlib.sha256).digest()


def call_for_state(address: Address, token: str, place: int | None = None) -> socket.socket:
    """Ask the agent that listens there; returns the connection over which a rank's state comes.

    A shadow asks for that of the rank at a `place` on its host, and calls `hear_about` next.

    Blocks, for some `CONNECT_S`. Raises OSError if no agent that knows the token answers.
    """
    with contextlib.ExitStack() as closes:
        end = closes.enter_context(socket.create_connection(address, CONNECT_S))
        key, mine = token.encode(), secrets.token_bytes(NONCE_BYTES)
        nonce = _read(end, len(GREETING) + NONCE_BYTES)[len(GREETING) :]
        asks = _ASKS if place is None else _SHADOWS + bytes([place])
        end.sendall(frame_of(key, nonce, 0, asks + mine))
        if not hmac.compare_digest(_read(end, CODE_BYTES), _code_of(key, mine, 0, _GIVES)):
            raise ConnectionRefusedError("what listens there does not know the job's token")
        end.settimeout(None)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _SILENCE:
            end.setsockopt(socket.IPPROTO_TCP, option, value)
        end.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MS
        )  # else nothing probes unconfirmed bytes
        closes.pop_all()
    return end


def _read(end: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        if not (part := end.recv(num_bytes - len(found))):
            raise ConnectionResetError("the connection was closed")
        found += part
    return found


def asks_for_state(body: bytes) -> bool:
    """Return whether a frame asks for a rank's state, and is as long as such a frame."""
    asks = len(body) - NONCE_BYTES
    return (asks == len(_ASKS) and body.startswith(_ASKS)) or (
        asks == len(_SHADOWS) + 1 and body.startswith(_SHADOWS)
    )


def tell_about(end: socket.socket, told: dict[str, Any]) -> None:
    """Tell a shadow what it has to know before the state comes."""
    words = json.dumps(told).encode()
    with contextlib.suppress(OSError):  # the rank that has it next sees that
        end.sendall(_LENGTH.pack(len(words)) + words)


def hear_about(end: socket.socket) -> dict[str, Any]:
    """Return what an agent tells a shadow. Blocks, for some `CONNECT_S`. Raises OSError if that does not come."""
    end.settimeout(CONNECT_S)
    (length,) = _LENGTH.unpack(_read(end, _LENGTH.size))
    if length > MOST_BYTES:
        raise ConnectionResetError(f"an agent announces {length} bytes, and {MOST_BYTES} are the most")
    told: dict[str, Any] = json.loads(_read(end, length))
    end.settimeout(None)
    return told


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


@dataclass(frozen=True)
class Stranger:
    """The event that a process of this host does not know the token."""

    host: str


@dataclass
class _Incoming:
    """A connection that another agent has opened."""

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
    """All connections of an agent, which listens at `address`; port 0 of `listen` takes a free one.

    Raises OSError if the address is taken, or does not belong to this host.
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
        self._events: list[Received | Refused | Closed | Stranger] = []

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

    def turn(self, timeout_s: float, now_s: float) -> list[Received | Refused | Closed | Stranger]:
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

    def hand_over(self, connection: int, asked: bytes) -> tuple[socket.socket, int | None] | None:
        """Prove to a caller that the token is known here, and return the connection, let go; None: it is closed.

        With it the place of the rank on this host, if a shadow asks.
        """
        if connection not in self._incoming:
            return None
        given = self._incoming.pop(connection).socket
        self._selector.unregister(given)
        given.setblocking(True)
        asks = asked.startswith(_SHADOWS)
        given.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SLOW_MS if asks else _CUT_MS)
        with contextlib.suppress(OSError):  # who has it next sees that
            given.sendall(_code_of(self._token, asked[-NONCE_BYTES:], 0, _GIVES))
        return given, asked[len(_SHADOWS)] if asks else None

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
        """Close the oldest connection that has sent no frame with a valid code."""
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
            (length,) = _LENGTH.unpack_from(link.data)
            if length > (MOST_BYTES if link.number else MOST_FIRST_BYTES):
                return False
            if len(link.data) < _HEAD + length:
                return True
            code, body = bytes(link.data[_LENGTH.size : _HEAD]), bytes(link.data[_HEAD : _HEAD + length])
            if not hmac.compare_digest(code, _code_of(self._token, link.nonce, link.number, body)):
                with contextlib.suppress(OSError):
                    self._events.append(Stranger(link.socket.getpeername()[0]))
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
        """Receive from a listener and send what is queued for it. End the connection if the listener is gone."""
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
