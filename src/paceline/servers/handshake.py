"""Who connects knows the job's token, and so does the server: each proves it to the other before anything is said.

    server  greeting (with the protocol's version), 32 random bytes
    rank    32 random bytes, code of "rank" and both
    server  code of "server" and both

Codes are HMAC-SHA256 by the token, so the token never crosses the network, and a recorded handshake is of no use again.
A stranger can make a server hold these few bytes, for `PATIENCE_S`. What follows is not encrypted, nor is each frame
signed: whoever can change TCP connections on their way can change gradients, as with Gloo.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

from paceline.errors import ConfigurationError

GREETING = b"paceline servers 1\n"
NONCE_BYTES = CODE_BYTES = 32
PATIENCE_S = 10.0
FROM_SERVER = len(GREETING) + NONCE_BYTES
FROM_RANK = NONCE_BYTES + CODE_BYTES


class RefusedError(ConfigurationError):
    """The other end is no server of this job, or this is no rank of the server's job."""


class ServerSide:
    """A server's part; bytes in, bytes out."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @property
    def first_words(self) -> bytes:
        return GREETING + self._nonce

    def answer(self, received: bytes) -> bytes:
        """The last words to a rank that knows the token.

        Raises:
            RefusedError: It does not.
        """
        theirs, code = received[:NONCE_BYTES], received[NONCE_BYTES:]
        if not hmac.compare_digest(code, _code(self._token, b"rank", self._nonce, theirs)):
            raise RefusedError("whoever connected does not know the job's token")
        return _code(self._token, b"server", self._nonce, theirs)


def enter(connected: socket.socket, token: str, where: str) -> None:
    """A rank's part, on a socket that blocks and has a timeout.

    Raises:
        RefusedError: This is no server of this job; says why.
        OSError: The connection failed.
    """
    received = _receive(connected, FROM_SERVER)
    greeting, nonce = received[: len(GREETING)], received[len(GREETING) :]
    if greeting != GREETING:
        raise RefusedError(
            f"{where} greets with {greeting!r}, not {GREETING!r}: it is no parameter server, or one of another version "
            "of Paceline. Start servers and ranks from the same installation."
        )
    mine, key = secrets.token_bytes(NONCE_BYTES), token.encode()
    connected.sendall(mine + _code(key, b"rank", nonce, mine))
    try:
        answer = _receive(connected, CODE_BYTES)
    except ConnectionError as error:
        raise RefusedError(
            f"the parameter server at {where} refused this rank: it was started with another PACELINE_TOKEN. Give "
            "servers and ranks the same."
        ) from error
    if not hmac.compare_digest(answer, _code(key, b"server", nonce, mine)):
        raise RefusedError(
            f"what listens at {where} does not know the job's token: it is no server of this job. Look at --servers "
            "and PACELINE_TOKEN, of the servers and of the ranks."
        )


def _code(token: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.new(token, b"paceline servers " + who + b"".join(nonces), hashlib.sha256).digest()


def _receive(connected: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = connected.recv(num_bytes - len(received))
        if not part:
            raise ConnectionResetError("the connection was closed")
        received += part
    return received
