"""A rank's connections to all servers. One thread sends the requests and receives the answers.

Rules
1. Requests to one server keep their order. Requests to different servers are under way at the same time.
2. Any error ends the link: all awaited answers and all later requests raise it.
3. A rank that has lost a server, or was told by a server of a lost rank, tells the other servers, which tell all
   ranks. Otherwise the other servers would blame this rank, because it leaves.
4. A rank that has waited for a server for half of its timeout reports that to the other servers. Then they blame that
   server for the delay, not this rank.
5. Arrived answers are read before a server is judged late, and the clock is read before them. So a process that stood
   still does not blame a server whose answer it has not read yet.
6. A message says what was observed. A closed connection does not tell why it was closed.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import version
from paceline.errors import ConfigurationError, PacelineError, PeerLostError, ProtocolError, ServerLostError
from paceline.host.exit import end_before_exit
from paceline.host.processes import ProcessIdentity
from paceline_servers.connection import Connection, Place, fresh_place
from paceline_servers.handshake import enter
from paceline_servers.response_future import ResponseFuture
from paceline_servers.wire import Frame, Kind, pack, unpack

_TICK_S = 0.25
GRACE_S = 2.0  # a server reports a missing rank itself, a little later than a rank's timeout
_FAREWELL_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # before it connects again
PATIENCE_S = 60.0  # the least time to connect and set up, because a server with an optimizer imports torch


@dataclass
class _Request:
    """A request that will be answered."""

    answers: ResponseFuture
    place: Sequence[Any] | None
    since_s: float
    until_s: float


@dataclass(eq=False)
class _Server:
    """A server: its connection and the requests to it."""

    number: int
    address: str
    connection: Connection
    asked: dict[tuple[Kind, int], _Request]
    reported_awaited: str = ""  # the other server that this rank has reported to it as awaited

    def __str__(self) -> str:
        return f"parameter server {self.number} at {self.address}"


@dataclass(frozen=True)
class Identity:
    """The identity of a rank that connects."""

    rank: int
    num_ranks: int
    session: str  # a name that all ranks of the model share, and no other model
    timeout_s: float  # how long other ranks may take
    token: str  # the token of the job


class ServerLink:
    """Connections to servers.

    Args:
        addresses: "host:port" of each server, in the same order on every rank.
        who: The identity of this rank.

    Contract:
        Local; blocks until every server has answered.

    Raises:
        ServerLostError: A server cannot be reached.
        ConfigurationError: An address is no server's, or a server has another token or version.
    """

    def __init__(self, addresses: Sequence[str], who: Identity) -> None:
        self._who = who
        self._selector = selectors.DefaultSelector()
        self._servers: list[_Server] = []
        self._todo: deque[tuple[_Server, Frame]] = deque()
        # re-entrant, because the garbage collector may call `close()` while this thread holds it
        self._lock = threading.RLock()
        self._error: Exception | None = None
        self._given_up: ServerLostError | None = None
        self._is_closing = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        try:
            for number, address in enumerate(addresses):
                asked: dict[tuple[Kind, int], _Request] = {}
                connected = _connect(number, address, who)
                server = _Server(number, address, Connection(connected, self._place_for(asked)), asked)
                self._selector.register(connected, selectors.EVENT_READ, server)
                self._servers.append(server)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(
            target=self._run, name=f"paceline servers of rank {who.rank}", daemon=True
        )
        self._thread.start()
        end_before_exit(self, ServerLink.close)
        hello = {
            "version": version.__version__,
            "session": who.session,
            "rank": who.rank,
            "num_ranks": who.num_ranks,
            "timeout_s": who.timeout_s,
            "name": str(ProcessIdentity.of_this_process()),
        }
        answers = ResponseFuture(len(addresses))
        for number in range(len(addresses)):
            self.ask(number, Frame(Kind.HELLO, body=(pack(hello),)), answers, patience_s=PATIENCE_S)
        answers.wait()

    @property
    def num_servers(self) -> int:
        return len(self._servers)

    @property
    def bytes_sent(self) -> tuple[int, ...]:
        """Return the bytes sent to each server so far."""
        return tuple(server.connection.bytes_sent for server in self._servers)

    @property
    def bytes_received(self) -> tuple[int, ...]:
        """Return the bytes received from each server so far."""
        return tuple(server.connection.bytes_received for server in self._servers)

    def ask(
        self,
        server: int,
        frame: Frame,
        answers: ResponseFuture | None = None,
        place: Sequence[Any] | None = None,
        patience_s: float = 0.0,
    ) -> None:
        """Send a frame. Does not wait.

        Args:
            server: The number of the server.
            frame: The frame. Its body must not change until the answer has arrived, or ever if there is none.
            answers: The future that gets the answer. None: there is no answer.
            place: The memory for the answer's body. None: it is added to `answers.bodies`.
            patience_s: How long the server may take, if that is longer than the rank's timeout.
        """
        with self._lock:
            if self._error is None:
                to = self._servers[server]
                if answers is not None:
                    now_s = time.monotonic()
                    until_s = now_s + max(self._who.timeout_s + GRACE_S, patience_s)
                    to.asked[frame.kind, frame.number] = _Request(answers, place, now_s, until_s)
                self._todo.append((to, frame))
                error = None
            else:
                error = self._error
        if error is not None:
            if answers is not None:
                answers.note(error)
            return
        self._wake_up()

    def close(self, timeout_s: float) -> None:
        """Leave, and tell the servers."""
        for number in range(self.num_servers):
            self.ask(number, Frame(Kind.BYE))
        with self._lock:
            self._is_closing = True
        self._wake_up()
        if (
            threading.current_thread() is not self._thread
        ):  # that thread may have collected the last reference
            self._thread.join(timeout_s)

    def give_up(self, error: ServerLostError) -> None:
        """End the link to a server that counts as lost, though this connection may still reach it. Does not wait."""
        with self._lock:
            self._given_up = self._given_up or error
        self._wake_up()

    def address_of(self, server: int) -> str:
        """Return the address of this host on the connection to a server."""
        return str(self._servers[server].connection.socket.getsockname()[0])

    def _wake_up(self) -> None:
        try:
            self._wake.send(b"x")
        except OSError:  # full, so the thread wakes up anyway; or closed
            return

    # ---- on the thread

    def _run(self) -> None:
        try:
            while not self._is_over():
                looked_s = time.monotonic()
                for key, events in self._selector.select(_TICK_S):
                    if key.data is None:
                        self._woken.recv(4096)
                    else:
                        self._serve(key.data, events)
                self._queue()
                self._judge(looked_s)
        except PacelineError as error:
            self._end(error)
            if isinstance(error, PeerLostError):
                self._tell(error)
        except Exception as error:  # noqa: BLE001  no caller may wait forever
            self._end(ProtocolError(f"the connections to the parameter servers broke: {error!r}"))
        finally:
            self._close_sockets()

    def _is_over(self) -> bool:
        with self._lock:
            if not self._is_closing or self._todo:
                return False
        return not any(server.connection.wants_to_send for server in self._servers)

    def _queue(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    return
                server, frame = self._todo.popleft()
            server.connection.queue(frame)
            self._want(server)

    def _serve(self, server: _Server, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for frame in server.connection.receive():
                    self._take(server, frame)
            if events & selectors.EVENT_WRITE:
                server.connection.send()
        except PacelineError:  # some of them are also an OSError
            raise
        except OSError as error:
            raise self._lost(
                server,
                f"has closed the connection ({error}): its process has ended, or it has dropped this rank. Its own "
                "output says which",
            ) from error
        self._want(server)

    def _want(self, server: _Server) -> None:
        wanted = selectors.EVENT_WRITE if server.connection.wants_to_send else 0
        self._selector.modify(server.connection.socket, selectors.EVENT_READ | wanted, server)

    def _place_for(self, asked: Mapping[tuple[Kind, int], _Request]) -> Place:
        def place(frame: Frame, num_bytes: int) -> Sequence[Any]:
            with self._lock:
                found = asked.get((frame.kind, frame.number))
            return fresh_place(frame, num_bytes) if found is None or found.place is None else found.place

        return place

    def _take(self, server: _Server, frame: Frame) -> None:
        if frame.kind is Kind.FAILED:
            raise _error_of(unpack(frame.body[0]), str(server))
        with self._lock:
            asked = server.asked.pop((frame.kind, frame.number), None)
        if asked is None:
            raise ProtocolError(f"parameter server {server.number} answers what was not asked")
        if asked.place is None:
            asked.answers.bodies += frame.body
        asked.answers.note()

    def _judge(self, now_s: float) -> None:
        """Raise if a server is late. Called after the answers that had come by `now_s` are read."""
        if self._given_up is not None:
            raise self._given_up
        awaited = []
        for server in self._servers:
            with self._lock:
                first = next(iter(server.asked.values()), None)
            if first is not None and first.until_s < now_s:
                waited_s = first.until_s - first.since_s
                raise self._lost(server, f"has not answered for {waited_s:g} s: its process may be stopped")
            if first is not None and now_s - first.since_s > self._who.timeout_s / 2:
                awaited.append(server)
        for server in self._servers:
            self._report_awaited(server, next((str(other) for other in awaited if other is not server), ""))

    def _report_awaited(self, server: _Server, awaited: str) -> None:
        """Report the awaited server to another one (rule 4), if that one does not know it yet."""
        if server.reported_awaited != awaited:
            server.reported_awaited = awaited
            server.connection.queue(Frame(Kind.WAITS, body=(pack({"server": awaited}),)))
            self._want(server)

    def _lost(self, server: _Server, words: str) -> ServerLostError:
        return ServerLostError(f"{server} {words}")

    def _end(self, error: Exception) -> None:
        with self._lock:
            self._error = error
            asked = [each for server in self._servers for each in server.asked.values()]
            for server in self._servers:
                server.asked.clear()
            self._todo.clear()
        for each in asked:
            each.answers.note(error)

    def _tell(self, error: PeerLostError) -> None:
        """Report the error to the other servers (rule 3), as far as they can be reached soon."""
        kind = "server" if isinstance(error, ServerLostError) else "lost"
        words = {"kind": kind, "rank": error.peer, "words": str(error)}
        until_s = time.monotonic() + _FAREWELL_S
        for server in self._servers:
            server.connection.queue(Frame(Kind.FAILED, body=(pack(words),)))
            with contextlib.suppress(OSError):
                while server.connection.wants_to_send and time.monotonic() < until_s:
                    server.connection.send()
                    time.sleep(0.001)

    def _close_sockets(self) -> None:
        with self._lock:
            self._error = self._error or ProtocolError("the connections to the parameter servers were closed")
        self._selector.close()
        for server in self._servers:
            server.connection.close()
        self._wake.close()
        self._woken.close()


def _connect(number: int, address: str, who: Identity) -> socket.socket:
    """Connect and perform the handshake. Retry if a server that sheds strangers closed the connection."""
    where = f"parameter server {number} at {address}"
    host, _, port = address.rpartition(":")
    until_s, pause_s = time.monotonic() + PATIENCE_S, _FIRST_PAUSE_S
    while True:
        try:
            connected = socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S)
        except ValueError as error:
            raise ConfigurationError(
                f"{address!r} is not an address of a parameter server. Name host and port: 10.0.0.5:7000"
            ) from error
        except OSError as error:
            raise ServerLostError(
                f"{where} cannot be reached ({error.strerror or error}): nothing that ranks can reach listens there"
            ) from error
        try:
            enter(connected, who.token, where)
        except ConnectionError as error:
            connected.close()
            if time.monotonic() + pause_s > until_s:
                raise ServerLostError(
                    f"{where} has closed every connection for {PATIENCE_S:g} s before it answered ({error})"
                ) from error
        except OSError as error:
            connected.close()
            raise ServerLostError(f"{where} did not identify itself ({error})") from error
        except BaseException:
            connected.close()
            raise
        else:
            return connected
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _error_of(words: dict[str, Any], who: str) -> PacelineError:
    rank = words.get("rank")
    text = f"{words.get('words')} ({who} says so)"
    if words.get("kind") == "server":
        return ServerLostError(text)
    if words.get("kind") == "lost":
        return PeerLostError(text, rank if isinstance(rank, int) else None)
    return ConfigurationError(text) if words.get("kind") == "configuration" else ProtocolError(text)
