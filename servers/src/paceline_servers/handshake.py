"""The handshake: rank and server prove to each other that they know the job's token, before they exchange frames.

    rank    knock: greeting (with the protocol's version), 32 random bytes, code of "knock" and these
    server  greeting, 32 random bytes; zeros instead of them if it refuses the knock
    rank    code of "rank" and both random numbers
    server  code of "server" and both

Codes are HMAC-SHA256 by the token, so the token never crosses the network. The knock lets a server tell ranks from
strangers by the first bytes that arrive. So it sheds strangers, however many come, and keeps clients that have knocked.
A recorded knock is of no other use, because the second code depends on the server's random number. A stranger can make
a server hold these few bytes, for `PATIENCE_S`. The frames that follow are neither encrypted nor signed. An attacker
that can change TCP connections can change gradients, as with Gloo.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

from paceline.errors import ConfigurationError

GREETING = b"paceline servers 2\n"
NONCE_BYTES = CODE_BYTES = 32
PATIENCE_S = 10.0
FROM_SERVER = len(GREETING) + NONCE_BYTES
KNOCK_BYTES = len(GREETING) + NONCE_BYTES + CODE_BYTES
_NO = bytes(NONCE_BYTES)  # in place of a server's random bytes
REFUSAL = GREETING + _NO


class RefusedError(ConfigurationError):
    """An error: the other end is no server of this job, or this is no rank of the server's job."""


class ServerSide:
    """A server's part of one handshake; bytes in, bytes out.

    A client that `has_knocked` has shown by a code, which may be a recorded one, that it is a rank. A client that
    `has_entered` has proved it, and sends nothing else of the handshake.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._client_nonce = b""
        self._received = b""
        self.has_knocked = self.has_entered = False

    @property
    def num_missing(self) -> int:
        """Return the number of bytes that the client has to send next."""
        return (CODE_BYTES if self.has_knocked else KNOCK_BYTES) - len(self._received)

    def take(self, part: bytes) -> bytes:
        """Take up to `num_missing` bytes; return the answer. Raises RefusedError for another token."""
        self._received += part
        if self.num_missing:
            return b""
        said, self._received = self._received, b""
        if self.has_knocked:
            self._check(said, b"rank", self._nonce, self._client_nonce)
            self.has_entered = True
            return _code(self._token, b"server", self._nonce, self._client_nonce)
        greeting, rest = said[: len(GREETING)], said[len(GREETING) :]
        self._client_nonce = rest[:NONCE_BYTES]
        self._check(rest[NONCE_BYTES:] if greeting == GREETING else b"", b"knock", self._client_nonce)
        self.has_knocked = True
        return GREETING + self._nonce

    def _check(self, code: bytes, role: bytes, *nonces: bytes) -> None:
        if not hmac.compare_digest(code, _code(self._token, role, *nonces)):
            raise RefusedError("the client does not know the job's token")


def enter(connected: socket.socket, token: str, where: str) -> None:
    """Perform a rank's part, on a blocking socket with a timeout. Raises RefusedError with the reason, and OSError."""
    mine, key = secrets.token_bytes(NONCE_BYTES), token.encode()
    connected.sendall(GREETING + mine + _code(key, b"knock", mine))
    received = _receive(connected, FROM_SERVER)
    greeting, nonce = received[: len(GREETING)], received[len(GREETING) :]
    if greeting != GREETING:
        raise RefusedError(
            f"{where} greets with {greeting!r}, not {GREETING!r}: it is not a parameter server, or one of another "
            "version of Paceline. Start servers and ranks from the same installation."
        )
    if nonce == _NO:
        raise RefusedError(
            f"{where} refused this rank: it was started with another PACELINE_TOKEN. Give "
            "servers and ranks the same."
        )
    connected.sendall(_code(key, b"rank", nonce, mine))
    if not hmac.compare_digest(_receive(connected, CODE_BYTES), _code(key, b"server", nonce, mine)):
        raise RefusedError(
            f"what listens at {where} does not know the job's token: it is no server of this job. Look at --servers "
            "and PACELINE_TOKEN, of the servers and of the ranks."
        )


def _code(token: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.new(token, b"paceline servers " + role + b"".join(nonces), hashlib.sha256).digest()


def _receive(connected: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = connected.recv(num_bytes - len(received))
        if not part:
            raise ConnectionResetError("the connection was closed")
        received += part
    return received
