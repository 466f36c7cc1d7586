"""Who reaches a server's port without the job's token, or speaks another protocol, gets nowhere and disturbs nobody."""

import contextlib
import errno
import socket
import threading
import time

import numpy as np
import pytest

from harness.running_servers import in_threads
from paceline import version
from paceline.errors import ConfigurationError, ProtocolError, ServerLostError
from paceline_servers.connection import Connection
from paceline_servers.handshake import (
    CODE_BYTES,
    GREETING,
    KNOCK_BYTES,
    NONCE_BYTES,
    REFUSAL,
    RefusedError,
    ServerSide,
    enter,
)
from paceline_servers.link import Identity, ServerLink
from paceline_servers.process import listen, serve_on
from paceline_servers.response_future import ResponseFuture
from paceline_servers.server import Server
from paceline_servers.session import Session
from paceline_servers.wire import HEADER, DType, Frame, Kind, header_of, pack

LIMIT_S = 30.0  # for what is about to happen, on a busy machine


def rank(token="secret", number=0, num_ranks=1, session="s"):
    return Identity(number, num_ranks, session, LIMIT_S, token)


def wait_for(condition):
    """Ask again until it holds."""
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def wait_until_still(links):
    """Until nothing more is sent."""
    sent, before = None, 0
    while sent != before:
        sent, before = [link.bytes_sent for link in links], sent
        time.sleep(0.1)  # no synchronization: whether anything still moves


def push_alone(link, number):
    """Push a piece to one server by its only rank, and have the answer."""
    answers, body = ResponseFuture(1), bytearray(8)
    link.ask(0, Frame(Kind.PUSH, number, 0, DType.FLOAT64, (b"\0" * 8,)), answers, [body])
    assert answers.wait(LIMIT_S)


def talk(address, words):
    """What a server says to these words before it closes the connection."""
    heard = b""
    with dialled(address) as stranger:
        stranger.sendall(words)
        with contextlib.suppress(ConnectionError):
            while part := stranger.recv(100):
                heard += part
    return heard


def dialled(address):
    """A connection to a server, whose other end says nothing by itself."""
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), LIMIT_S)


def test_strangers_are_dropped_and_the_job_goes_on():
    with in_threads(1, "secret") as addresses:
        link = ServerLink(addresses, rank())
        for words in (
            b"x" * KNOCK_BYTES,
            b"GET / HTTP/1.1\r\n\r\n" + b" " * KNOCK_BYTES,
            HEADER.pack(2, 0, 0, 0, 0, 8) * 5,
        ):
            assert talk(addresses[0], words) == REFUSAL
        with pytest.raises(RefusedError, match="another PACELINE_TOKEN"):
            ServerLink(addresses, rank("guess"))
        push_alone(link, 0)
        link.close(2.0)


def test_a_rank_that_is_there_already_or_has_another_version_is_told(monkeypatch):
    with in_threads(1) as addresses:
        first = ServerLink(addresses, rank("", 0, 2))
        for again in (rank("", 0, 2), rank("", 1, 3), rank("", 7, 2)):
            with pytest.raises(ConfigurationError, match="cannot join a session of 2 ranks"):
                ServerLink(addresses, again)
        first.close(2.0)
        with monkeypatch.context() as patch:
            patch.setattr(version, "__version__", "0.0.0")
            patch.setattr("paceline_servers.server.version", type("other", (), {"__version__": "9.9.9"}))
            with pytest.raises(
                ConfigurationError, match=r"rank 0 has Paceline 0\.0\.0, and the parameter server 9\.9\.9"
            ):
                ServerLink(addresses, rank("", session="t"))


def test_something_else_at_the_address_is_refused():
    listener = listen("127.0.0.1", 0)
    try:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.settimeout(LIMIT_S)

        def greet():
            connected, _ = listener.accept()
            connected.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n" * 3)
            connected.close()

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(RefusedError, match="it is not a parameter server"):
            ServerLink([address], rank())
        thread.join()
    finally:
        listener.close()
    with pytest.raises(ConfigurationError, match="is not an address of a parameter server"):
        ServerLink(["nowhere:x"], rank())
    with socket.socket() as deaf:  # bound, so that nobody else listens there
        deaf.bind(("127.0.0.1", 0))
        with pytest.raises(ServerLostError, match="cannot be reached"):
            ServerLink([f"127.0.0.1:{deaf.getsockname()[1]}"], rank())


def test_who_only_greets_like_a_server_is_refused():
    """It takes whatever a rank says; that it does not know the token is seen by its answer."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.settimeout(LIMIT_S)
        theirs.sendall(GREETING + b"x" * NONCE_BYTES + bytes(CODE_BYTES))
        with pytest.raises(RefusedError, match="does not know the job's token: it is no server of this job"):
            enter(mine, "secret", "somewhere")


def test_an_answer_goes_nowhere_but_where_it_fits():
    """A server that sends more, or less, than what was asked for has not overwritten anything."""
    room = bytearray(8)
    for num_bytes in (4, 12):
        mine, theirs = socket.socketpair()
        with mine, theirs:
            connection = Connection(mine, lambda *_: (room,))
            theirs.sendall(
                Frame(Kind.PUSH, 1, 0, DType.FLOAT32, (b"x" * num_bytes,)).header + b"x" * num_bytes
            )
            with pytest.raises(ProtocolError, match=f"an answer of {num_bytes} bytes does not fit"):
                connection.receive()
    assert room == bytearray(8)


def test_serving_refuses_what_cannot_be(monkeypatch):
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    for place in ("7000", "127.0.0.1:", "127.0.0.1:port", "127.0.0.1:70000"):
        with pytest.raises(ConfigurationError, match="is not an address"):
            serve_on(place)
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    with pytest.raises(ConfigurationError, match="cannot listen on 203"):
        serve_on("203.0.113.7:7000")


@pytest.mark.parametrize(
    "words",
    [
        b"[" * 200_000,
        b'{"version": "", "name": "", "session": "", "rank": Infinity, "num_ranks": 1, "timeout_s": 1}',
    ],
)
def test_who_knows_the_token_and_says_nonsense_does_not_end_the_server(words):
    with in_threads(1, "secret") as addresses:
        host, port = addresses[0].split(":")
        with socket.create_connection((host, int(port)), LIMIT_S) as liar:
            enter(liar, "secret", "the server")
            liar.sendall(Frame(Kind.HELLO, body=(words,)).header + words)
            with pytest.raises((ConnectionResetError, ConnectionAbortedError, StopIteration)):
                if not liar.recv(100):
                    raise StopIteration
        ServerLink(addresses, rank()).close(2.0)


HELLO = pack(
    {"version": version.__version__, "name": "", "session": "t", "rank": 5, "num_ranks": 2, "timeout_s": 5.0}
)


@pytest.mark.timeout(60)
def test_who_says_nothing_or_too_little_is_dropped_after_a_while_and_nobody_else(monkeypatch):
    monkeypatch.setattr("paceline_servers.server.PATIENCE_S", 600.0)
    with in_threads(1, "secret") as addresses:
        link = ServerLink(addresses, rank())
        host, port = addresses[0].split(":")
        strangers = [socket.create_connection((host, int(port)), LIMIT_S) for _ in range(5)]
        _silent, half, *known = strangers
        half.sendall(b"x" * (KNOCK_BYTES - 1))
        for each in known:  # who knows the token, and
            enter(each, "secret", "the server")
        known[1].sendall(Frame(Kind.HELLO, body=(HELLO,)).header[:-1])  # begins a frame
        known[2].sendall(Frame(Kind.HELLO, body=(HELLO,)).header + HELLO)  # is refused, and stays
        push_alone(link, 0)  # so the server has read what was sent before
        monkeypatch.setattr("paceline_servers.server.PATIENCE_S", 0.0)
        for stranger in strangers:
            with stranger:
                while stranger.recv(1000):
                    pass
        push_alone(link, 1)
        link.close(2.0)


def test_who_was_refused_leaves_no_session():
    with in_threads(1) as addresses:
        with pytest.raises(ConfigurationError, match="rank 7 of 2 cannot join"):
            ServerLink(addresses, rank("", 7, 2))
        ServerLink(addresses, rank("", 0, 1)).close(2.0)  # of the same name, with another number of ranks


class _NoneLeft:
    """A listening socket whose process has no file descriptors left, until it is told."""

    def __init__(self, listener):
        self._listener, self.num_tries, self.are_some = listener, 0, False

    def __getattr__(self, name):
        return getattr(self._listener, name)

    def accept(self):
        self.num_tries += 1
        if not self.are_some:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()


class _Clock:
    """Stands still until it is told; a server looks at it once a turn."""

    now_s, num_looks = 1000.0, 0

    def monotonic(self):
        self.num_looks += 1
        return self.now_s


@pytest.mark.timeout(60)
def test_a_server_without_file_descriptors_goes_on_and_does_not_spin(monkeypatch):
    listener, clock = _NoneLeft(listen("127.0.0.1", 0)), _Clock()
    monkeypatch.setattr("paceline_servers.server.time", clock)
    server = Server(listener, "")
    mine, theirs = socket.socketpair()
    server.watch(theirs)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with socket.create_connection(listener.getsockname(), LIMIT_S) as connected:
            for number in range(1, 4):
                wait_for(lambda number=number: listener.num_tries == number)
                turns = clock.num_looks
                wait_for(lambda turns=turns: clock.num_looks > turns + 3)
                assert listener.num_tries == number, "tried again before its time"
                clock.now_s += 0.25
            connected.setblocking(False)
            with pytest.raises(BlockingIOError):
                connected.recv(100)
            listener.are_some = True
            clock.now_s += 0.25  # it tried a fourth time before
            connected.settimeout(LIMIT_S)
            enter(connected, "", "the server")
    finally:
        mine.close()
        thread.join()
        theirs.close()


@pytest.mark.timeout(60)
def test_ranks_that_are_far_ahead_wait_in_the_network_and_not_in_the_servers_memory(monkeypatch):
    most, size, num_pieces = 1 << 20, 1 << 18, 256  # 64 MiB of each rank
    held, made = [], []

    class Watched(Session):
        def _push(self, *given):
            outgoing = super()._push(*given)
            held.append(self._held_bytes)
            return outgoing

    def make(*given):
        made.append(Watched(*given, most_held_bytes=most))
        return made[0]

    monkeypatch.setattr("paceline_servers.server.Session", make)
    values, body = np.ones(size // 4, np.float32), np.empty(size // 4, np.float32)
    with in_threads(1) as addresses:
        links = [ServerLink(addresses, rank("", number, 3)) for number in range(3)]
        waiting = []
        for number, link in enumerate(links):
            if number == 2:
                wait_for(lambda: held and held[-1] >= most)
                wait_until_still(links)  # or it would hold more
            waiting.append(ResponseFuture(num_pieces))
            for piece in range(num_pieces):
                frame = Frame(Kind.PUSH, piece, 0, DType.FLOAT32, (values,))
                link.ask(0, frame, waiting[-1], [body])
        for answers in waiting:
            assert answers.wait(30.0)
        assert (body == 3).all()
        for link in links:
            link.close(2.0)
    assert most <= max(held) <= most + 3 * (5 << 20), "a turn of a connection is 4 MiB"
    assert made[0]._held_bytes == 0


@pytest.mark.timeout(60)
def test_strangers_who_say_nothing_make_room_for_ranks_and_for_each_other(monkeypatch):
    """Nobody is dropped for the time: what lets the ranks in is that the oldest strangers go."""
    monkeypatch.setattr("paceline_servers.server.PATIENCE_S", 600.0)
    monkeypatch.setattr("paceline_servers.server._MOST_STRANGERS", 8)
    with in_threads(1, "secret") as addresses, contextlib.ExitStack() as strangers:
        slow = strangers.enter_context(dialled(addresses[0]))
        enter(slow, "secret", "the server")  # a rank that has not said yet who it is, and is no stranger
        held = [strangers.enter_context(dialled(addresses[0])) for _ in range(70)]
        link = ServerLink(addresses, rank())
        push_alone(link, 0)
        for stranger in held[:-8]:
            assert stranger.recv(1) == b"", "the oldest are shed"
        for stranger in held[
            -7:
        ]:  # the eighth's place was the rank's, if it was accepted before it had knocked
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.recv(1)
        slow.sendall(Frame(Kind.HELLO, body=(HELLO,)).header + HELLO)
        assert slow.recv(1000), "it is answered"
        link.close(2.0)


@pytest.mark.timeout(60)
def test_where_descriptors_are_scarce_a_stranger_goes_for_a_rank(monkeypatch):
    monkeypatch.setattr("paceline_servers.server.PATIENCE_S", 600.0)
    listener = _NoneLeft(listen("127.0.0.1", 0))
    listener.are_some = True
    server = Server(listener, "secret")
    mine, theirs = socket.socketpair()
    server.watch(theirs)
    thread = threading.Thread(target=server.run)
    thread.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        with dialled(address) as stranger:
            wait_for(lambda: server._strangers)
            listener.are_some = False
            drop = server._drop

            def dropped(*given):
                drop(*given)
                listener.are_some = True

            monkeypatch.setattr(server, "_drop", dropped)
            link = ServerLink([address], rank())
            assert stranger.recv(1) == b""
            link.close(2.0)
    finally:
        mine.close()
        thread.join()
        theirs.close()


class _ShedsFirst:
    """A listening socket whose server closes the first connections, as if it had to."""

    def __init__(self, listener, number):
        self._listener, self.left = listener, number

    def __getattr__(self, name):
        return getattr(self._listener, name)

    def accept(self):
        connected, place = self._listener.accept()
        if self.left:
            self.left -= 1
            connected.shutdown(socket.SHUT_RDWR)
        return connected, place


@pytest.mark.timeout(60)
def test_a_rank_that_was_shed_comes_again():
    listener = _ShedsFirst(listen("127.0.0.1", 0), 3)
    server = Server(listener, "")
    mine, theirs = socket.socketpair()
    server.watch(theirs)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        ServerLink([f"127.0.0.1:{listener.getsockname()[1]}"], rank("")).close(2.0)
        assert listener.left == 0
    finally:
        mine.close()
        thread.join()
        theirs.close()


def test_a_connection_that_closes_without_a_word_accuses_nobody(monkeypatch):
    monkeypatch.setattr("paceline_servers.link.PATIENCE_S", 0.2)
    listener = listen("127.0.0.1", 0)

    def close_all():
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    thread = threading.Thread(target=close_all, daemon=True)
    thread.start()
    try:
        with pytest.raises(ServerLostError, match="has closed every connection") as error:
            ServerLink([f"127.0.0.1:{listener.getsockname()[1]}"], rank())
        assert "PACELINE_TOKEN" not in str(error.value)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(LIMIT_S)


@pytest.mark.parametrize(
    ("num_ranks", "timeout_s"),
    [(10**9, 5.0), (0, 5.0), (-1, 5.0), (1, float("nan")), (1, float("inf")), (1, 0.0), (1, -1.0)],
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_made_of_them(num_ranks, timeout_s):
    with in_threads(1) as addresses:
        with pytest.raises(ConfigurationError, match="A parameter server serves 1 to"):
            ServerLink(addresses, Identity(0, num_ranks, "s", timeout_s, ""))
        ServerLink(addresses, rank("")).close(2.0)


def test_nobody_has_memory_reserved_before_it_has_said_who_it_is():
    with in_threads(1) as addresses, dialled(addresses[0]) as rich:
        enter(rich, "", "the server")
        rich.sendall(HEADER.pack(Kind.HELLO, 0, 0, 0, 0, 1 << 30))
        with contextlib.suppress(ConnectionError):
            assert rich.recv(1) == b""


def test_more_ranks_than_may_be_strangers_come_at_once():
    with in_threads(1, "secret") as addresses:
        host, port = addresses[0].split(":")
        waiting = [socket.create_connection((host, int(port)), LIMIT_S) for _ in range(70)]
        for connected in waiting:
            enter(connected, "secret", "the server")
            connected.close()


def test_nobody_waits_for_a_server_that_says_nothing_of_its_failure():
    listener = listen("127.0.0.1", 0)

    def fail():
        connected, _ = listener.accept()
        side = ServerSide("secret")
        while not side.has_entered:
            connected.sendall(side.take(connected.recv(side.num_missing)))
        connected.sendall(Frame(Kind.FAILED).header)
        connected.recv(10_000)
        connected.close()

    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(ProtocolError, match="the connections to the parameter servers broke"):
        ServerLink([f"127.0.0.1:{listener.getsockname()[1]}"], rank())
    thread.join()
    listener.close()


def test_the_state_of_a_large_model_is_one_frame():
    num_bytes = 3 << 30  # Adam's, of 400 million parameters
    frame, announced = header_of(HEADER.pack(Kind.FETCH, 0, 0, 0, 0, num_bytes))
    assert (frame.kind, announced) == (Kind.FETCH, num_bytes)
    with pytest.raises(ProtocolError, match="at most"):
        header_of(HEADER.pack(Kind.FETCH, 0, 0, 0, 0, 1 << 40))
