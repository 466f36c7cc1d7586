"""A parameter server's loop: connections in one thread, and a session for every model.

Rules
1. A client is served only after it has shown that it knows the job's token (`handshake`). Every client is accepted at
   once. Of clients that have shown nothing yet `_MOST_STRANGERS` are kept, and the oldest is dropped first. So
   strangers cost a rank only the time to accept them, however many come.
2. Sessions are independent. A session ends with its last connection. A rank that is started again opens a new one.
3. The memory of a session is limited: ranks that are far ahead are not read until the others have come (`Session`).
   Numbers that ranks send are checked before memory is allocated by them.
4. Arrived frames are read before a rank is judged late, and the clock is read before them. The clock counts a turn as
   at most `_LONGEST_TURN_S`. So no rank is late because this process stood still while its frames were unread.
5. The loop does nothing that takes seconds. A thread imports slow modules, and ranks that need one are not read
   meanwhile (`late_modules`).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline import version
from paceline.errors import ConfigurationError, ProtocolError
from paceline_servers.connection import Connection, fresh_place
from paceline_servers.handshake import PATIENCE_S, REFUSAL, RefusedError, ServerSide
from paceline_servers.late_modules import LateModules, make_steps, make_sums
from paceline_servers.session import Session
from paceline_servers.wire import Frame, Kind, pack, unpack

if TYPE_CHECKING:
    from paceline_servers.datagram_sums import DatagramSums

_TICK_S = 0.25
_LONGEST_TURN_S = 1.0
_MOST_STRANGERS = 256
_MOST_KNOCKED = 1024
_AT_ONCE = 64  # how many are accepted before other connections have a turn
_MOST_RANKS = 1 << 16
_LONGEST_TIMEOUT_S = 10.0 * 365 * 86400
_HELLO_BYTES = 1 << 16


@dataclass(eq=False)
class _Client:
    """A connection: a stranger or a rank. It is a rank once `session` is set."""

    connected: socket.socket
    since_s: float
    side: ServerSide
    connection: Connection | None = None
    session: Session | None = None
    rank: int = -1
    waiting: deque[Frame] = field(default_factory=deque)  # frames that wait for an import

    def place(self, frame: Frame, num_bytes: int) -> Sequence[Any]:
        """Return memory for a frame's body: little, until the client has identified itself."""
        if self.session is None and num_bytes > _HELLO_BYTES:
            raise ProtocolError(f"{num_bytes} bytes were announced before a rank has said who it is")
        return fresh_place(frame, num_bytes)


@dataclass
class _OpenSession:
    """A session and its ranks' connections."""

    session: Session
    clients: dict[int, _Client] = field(default_factory=dict)


class Server:
    """The server loop. It serves clients that know the token until it is stopped, and owns the listening socket."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener = listener
        self._token = token
        self._open: dict[str, _OpenSession] = {}
        self._clients: set[socket.socket] = set()
        # In the order of arrival: clients that have shown nothing, and clients that have knocked and are in no session.
        self._strangers: dict[_Client, None] = {}
        self._knocked: dict[_Client, None] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._late = LateModules()
        self._selector.register(self._late.woken, selectors.EVENT_READ, "loaded")
        self._accepts_again_s = 0.0
        self._looked_s = time.monotonic()
        self._now_s = self._looked_s
        self._is_stopped = False

    def watch(self, descriptor: Any) -> None:
        """Stop when this can be read, because the other end of a pipe was closed."""
        self._selector.register(descriptor, selectors.EVENT_READ, "stop")

    def run(self) -> None:
        """Serve. Blocks until it is stopped."""
        while not self._is_stopped:
            self._update_clock()
            for key, events in self._selector.select(_TICK_S):
                if key.data == "stop":
                    self._is_stopped = True
                elif key.data == "loaded":
                    self._resume_waiting()
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.data, events)
            self._judge(self._now_s)
        self._selector.close()
        self._late.close()
        for connected in list(self._clients):
            connected.close()
        for opened in self._open.values():
            opened.session.close()
        self._listener.close()

    def _update_clock(self) -> None:
        """Read the clock before the arrived frames (rule 4)."""
        looked_s = time.monotonic()
        self._now_s += min(looked_s - self._looked_s, _LONGEST_TURN_S)
        self._looked_s = looked_s

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connected, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the client has gone
            except OSError:  # no descriptor or memory is left; the listener would be ready again at once
                if self._shed(self._strangers):
                    continue
                self._selector.unregister(self._listener)
                self._accepts_again_s = self._now_s + _TICK_S
                return
            connected.setblocking(False)
            client = _Client(connected, self._now_s, ServerSide(self._token))
            self._clients.add(connected)
            self._strangers[client] = None
            self._selector.register(connected, selectors.EVENT_READ, client)
            self._serve(client, selectors.EVENT_READ)  # a rank has knocked already
            if len(self._strangers) > _MOST_STRANGERS:
                self._shed(self._strangers)

    def _shed(self, clients: dict[_Client, None]) -> bool:
        """Drop the client that came first. Return whether there was one."""
        oldest = next(iter(clients), None)
        if oldest is not None:
            self._drop(oldest, "")
        return oldest is not None

    def _serve(self, client: _Client, events: int) -> None:
        if client.connected not in self._clients:
            return  # dropped since
        try:
            if client.connection is None:
                self._handshake(client)
                return
            if events & selectors.EVENT_WRITE:
                client.connection.send()
            if events & selectors.EVENT_READ:
                client.waiting += client.connection.receive()
            self._take_waiting(client)
        except (OSError, ProtocolError, MemoryError) as error:
            self._drop(client, f"is gone: its connection broke ({error})")
            return
        self._want(client)

    def _handshake(self, client: _Client) -> None:
        """Continue the handshake."""
        try:
            part = client.connected.recv(client.side.num_missing)
        except BlockingIOError:
            return
        if not part:
            self._drop(client, "")
            return
        try:
            answer = client.side.take(part)
        except RefusedError:
            with contextlib.suppress(OSError):
                client.connected.send(REFUSAL)
            self._drop(client, "")
            return
        if answer:
            client.connected.send(answer)  # fits into any socket's buffer
        if client.side.has_entered:
            client.connection = Connection(client.connected, client.place)
        elif client.side.has_knocked and client in self._strangers:
            del self._strangers[client]
            self._knocked[client] = None
            if len(self._knocked) > _MOST_KNOCKED:
                self._shed(self._knocked)

    def _take_waiting(self, client: _Client) -> None:
        """Take the frames of a rank, up to one that waits for an import."""
        while client.waiting and self._late.is_ready_for(client.waiting[0].kind):
            self._take(client, client.waiting.popleft())

    def _resume_waiting(self) -> None:
        self._late.clear_wakeup()
        waiting = [client for opened in self._open.values() for client in opened.clients.values()]
        for client in waiting:
            if client.waiting:
                self._serve(client, 0)

    def _take(self, client: _Client, frame: Frame) -> None:
        if client.session is not None:
            self._send(client.session, client.session.receive(client.rank, frame, self._now_s))
            return
        if frame.kind is not Kind.HELLO:
            raise ProtocolError("the first message of a rank must say who it is")
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
        if not 0 < num_ranks <= _MOST_RANKS or not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
            raise ConfigurationError(
                f"a session of {num_ranks} ranks with a timeout of {timeout_s:g} s is not possible. A parameter "
                f"server serves 1 to {_MOST_RANKS} ranks, and a timeout is positive."
            )
        address = str(client.connected.getsockname()[0])

        def sums() -> DatagramSums:
            return make_sums(num_ranks, timeout_s, address)

        opened = self._open.get(session) or _OpenSession(Session(num_ranks, timeout_s, make_steps, sums))
        if opened.session.num_ranks != num_ranks or rank in opened.clients or not 0 <= rank < num_ranks:
            raise ConfigurationError(
                f"rank {rank} of {num_ranks} cannot join a session of {opened.session.num_ranks} ranks. "
                f"Ranks {sorted(opened.clients)} have come."
            )
        self._open[session] = opened
        opened.session.names[rank] = name
        opened.clients[rank] = client
        client.session, client.rank = opened.session, rank
        self._knocked.pop(client, None)
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
        """Watch a connection for reading or writing. Backpressure changes with each frame of the session."""
        if client.connected not in self._clients or client.connection is None:
            return
        is_accepted = client.session is None or client.session.accepts_from(client.rank)
        is_accepted = is_accepted and not client.waiting
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
        self._strangers.pop(client, None)
        self._knocked.pop(client, None)
        client.waiting.clear()
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

    def _judge(self, now_s: float) -> None:
        """Find late ranks and clients. Called after the frames that had come by `now_s` are read."""
        for opened in list(self._open.values()):
            self._send(opened.session, opened.session.check(now_s))
        for clients in (self._strangers, self._knocked):
            while clients and now_s - next(iter(clients)).since_s > PATIENCE_S:
                self._shed(clients)
        if now_s >= self._accepts_again_s and self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ)
