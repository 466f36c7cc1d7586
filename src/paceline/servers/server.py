"""A parameter server's loop: connections in one thread, and a session for every model.

Rules
1. Nobody who has not shown that they know the job's token is listened to (`handshake`).
2. Sessions know nothing of each other. One ends when its last connection does; a rank that is started again opens a new
   one.
3. What a session holds is limited: ranks that are far ahead are not read from until the others have come (`Session`).
"""

from __future__ import annotations

import importlib
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from paceline import version
from paceline.errors import ConfigurationError, ProtocolError
from paceline.servers.connection import Connection
from paceline.servers.handshake import FROM_RANK, PATIENCE_S, RefusedError, ServerSide
from paceline.servers.session import Session, Steps, Sums
from paceline.servers.wire import Frame, Kind, pack, unpack

_TICK_S = 0.25
_MOST_STRANGERS = 64


@dataclass
class _Client:
    """Somebody who has connected; a rank, once `session` is set."""

    connected: socket.socket
    since_s: float
    side: ServerSide
    received: bytes = b""
    connection: Connection | None = None
    session: Session | None = None
    rank: int = -1


@dataclass
class _Open:
    """A session and its ranks' connections."""

    session: Session
    clients: dict[int, _Client] = field(default_factory=dict)


class Server:
    """Serves until `stop`.

    Args:
        listener: A listening socket, which becomes this object's.
        token: The job's.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener = listener
        self._token = token
        self._open: dict[str, _Open] = {}
        self._clients: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._accepts_again_s = 0.0
        self._is_stopped = False

    def watch(self, descriptor: Any) -> None:
        """Stop when this can be read: the other end of a pipe was closed."""
        self._selector.register(descriptor, selectors.EVENT_READ, "stop")

    def run(self) -> None:
        """Serve. Blocks until somebody stops it."""
        while not self._is_stopped:
            for key, events in self._selector.select(_TICK_S):
                if key.data == "stop":
                    self._is_stopped = True
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.data, events)
            self._look_at_the_time(time.monotonic())
        self._selector.close()
        for connected in list(self._clients):
            connected.close()
        for opened in self._open.values():
            opened.session.close()
        self._listener.close()

    @property
    def _is_full(self) -> bool:
        clients = (key.data for key in self._selector.get_map().values() if isinstance(key.data, _Client))
        return sum(client.connection is None for client in clients) >= _MOST_STRANGERS

    def _accept(self) -> None:
        if self._is_full:  # many ranks may come at once: who is too many waits in the kernel's queue
            self._selector.unregister(self._listener)
            return
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # whoever it was has gone
        except OSError:  # no descriptor or memory is left; the listener would be ready again at once
            self._selector.unregister(self._listener)
            self._accepts_again_s = time.monotonic() + _TICK_S
            return
        connected.setblocking(False)
        side = ServerSide(self._token)
        client = _Client(connected, time.monotonic(), side)
        self._clients.add(connected)
        self._selector.register(connected, selectors.EVENT_READ, client)
        try:
            connected.send(side.first_words)  # fits into any socket's buffer
        except OSError:
            self._drop(client, "")

    def _serve(self, client: _Client, events: int) -> None:
        if client.connected not in self._clients:
            return  # dropped since
        try:
            if client.connection is None:
                self._meet(client)
                return
            if events & selectors.EVENT_WRITE:
                client.connection.send()
            if events & selectors.EVENT_READ:
                for frame in client.connection.receive():
                    self._take(client, frame)
        except (OSError, ProtocolError, MemoryError) as error:
            self._drop(client, f"is gone: its connection broke ({error})")
            return
        self._want(client)

    def _meet(self, client: _Client) -> None:
        """The handshake."""
        part = client.connected.recv(FROM_RANK - len(client.received))
        if not part:
            self._drop(client, "")
            return
        client.received += part
        if len(client.received) < FROM_RANK:
            return
        try:
            answer = client.side.answer(client.received)
        except RefusedError:
            self._drop(client, "")
            return
        client.connected.send(answer)
        client.connection = Connection(client.connected)

    def _take(self, client: _Client, frame: Frame) -> None:
        if client.session is not None:
            self._send(client.session, client.session.receive(client.rank, frame, time.monotonic()))
            return
        if frame.kind is not Kind.HELLO:
            raise ProtocolError("a rank says first who it is")
        words = unpack(frame.body[0] if frame.body else b"")
        assert client.connection is not None, "the handshake is over"
        try:
            self._admit(client, words)
        except ConfigurationError as error:
            failed = {"kind": "configuration", "rank": words.get("rank"), "words": str(error)}
            client.connection.queue(Frame(Kind.FAILED, body=(pack(failed),)))
            return
        client.connection.queue(Frame(Kind.HELLO, frame.number))

    def _admit(self, client: _Client, words: dict[str, Any]) -> None:
        try:
            theirs, name, session = str(words["version"]), str(words["name"]), str(words["session"])
            rank, num_ranks = int(words["rank"]), int(words["num_ranks"])
            timeout_s = float(words["timeout_s"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"a rank did not say who it is ({error})") from error
        if theirs != version.__version__:
            raise ConfigurationError(
                f"rank {rank} has Paceline {theirs}, and the parameter server {version.__version__}. Install the same "
                "everywhere."
            )
        address = str(client.connected.getsockname()[0])

        def make_sums() -> Sums:
            return _make_sums(num_ranks, timeout_s, address)

        opened = self._open.get(session) or _Open(Session(num_ranks, timeout_s, _make_steps, make_sums))
        if opened.session.num_ranks != num_ranks or rank in opened.clients or not 0 <= rank < num_ranks:
            raise ConfigurationError(
                f"rank {rank} of {num_ranks} cannot join a session of {opened.session.num_ranks} ranks, of which "
                f"{sorted(opened.clients)} have come."
            )
        self._open[session] = opened
        opened.session.names[rank] = name
        opened.clients[rank] = client
        client.session, client.rank = opened.session, rank
        if opened.session.failure is not None:
            self._send(opened.session, [(rank, opened.session.failure)])

    def _send(self, session: Session, outgoing: list[tuple[int, Frame]]) -> None:
        if not outgoing:
            return
        clients = next(each.clients for each in self._open.values() if each.session is session)
        for rank, frame in outgoing:
            client = clients.get(rank)
            if client is not None and client.connection is not None:
                client.connection.queue(frame)
                self._want(client)

    def _want(self, client: _Client) -> None:
        """Watch for what is wanted of a connection. Backpressure changes with what the session receives and answers."""
        if client.connected not in self._clients or client.connection is None:
            return
        is_accepted = client.session is None or client.session.accepts_from(client.rank)
        wanted = selectors.EVENT_READ if is_accepted else 0
        wanted |= selectors.EVENT_WRITE if client.connection.wants_to_send else 0
        is_watched = client.connected in self._selector.get_map()
        if is_watched and wanted:
            self._selector.modify(client.connected, wanted, client)
        elif is_watched:
            self._selector.unregister(client.connected)
        elif wanted:
            self._selector.register(client.connected, wanted, client)

    def _drop(self, client: _Client, words: str) -> None:
        self._clients.discard(client.connected)
        if client.connected in self._selector.get_map():
            self._selector.unregister(client.connected)
        client.connected.close()
        for name, opened in list(self._open.items()):
            if client.session is opened.session:
                del opened.clients[client.rank]
                self._send(opened.session, opened.session.lose(client.rank, words))
                if not opened.clients:
                    opened.session.close()
                    del self._open[name]

    def _look_at_the_time(self, now_s: float) -> None:
        for opened in list(self._open.values()):
            self._send(opened.session, opened.session.check(now_s))
        for key in list(self._selector.get_map().values()):
            client = key.data
            if isinstance(client, _Client) and client.session is None and now_s - client.since_s > PATIENCE_S:
                self._drop(client, "")
        may_accept = now_s >= self._accepts_again_s and not self._is_full
        if may_accept and self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ)


def _make_steps(words: dict[str, Any]) -> Steps:
    """Torch takes seconds to import, and only those who step need it."""
    stepping = importlib.import_module("paceline.servers.stepping")
    steps: Steps = stepping.SteppedKeys(words)
    return steps


def _make_sums(num_ranks: int, timeout_s: float, address: str) -> Sums:
    """Numba takes seconds to import, and only those who sum by datagrams need it."""
    try:
        datagram_sums = importlib.import_module("paceline.servers.datagram_sums")
    except ImportError as error:
        raise ConfigurationError(
            f"this parameter server cannot sum by datagrams: {error}. Install it there: pip install 'paceline[lossy]'"
        ) from error
    sums: Sums = datagram_sums.DatagramSums(num_ranks, timeout_s, address)
    return sums
