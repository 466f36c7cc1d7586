"""One rank gets the state of another host's while that trains: by a connection to its agent, which hands it to a rank.

    listener  greeting, random bytes; as in `links`
    caller    one frame: `_ASKS`, random bytes of its own
    listener  a code over these; what follows is what the rank sends (`elastic/replay.py`)

So both ends know the job's token before a rank hears of either. No rank listens. What follows is not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket

from paceline.launch.elastic.codes import (
    CODE_BYTES,
    CONNECT_S,
    GREETING,
    NONCE_BYTES,
    code_of,
    frame_of,
)
from paceline.launch.elastic.plan import Address

_ASKS, _GIVES = b"state ", b"given"
_CUT_MS = 10_000  # that what a giver has sent may be unconfirmed
_SILENCE = (
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 3),
)  # seconds, and how often


def call(address: Address, token: str) -> socket.socket:
    """Ask the agent that listens there; returns the connection over which a rank's state comes.

    Blocks, for some `CONNECT_S`. Raises OSError if no agent that knows the token answers.
    """
    with contextlib.ExitStack() as closes:
        end = closes.enter_context(socket.create_connection(address, CONNECT_S))
        key, mine = token.encode(), secrets.token_bytes(NONCE_BYTES)
        nonce = _read(end, len(GREETING) + NONCE_BYTES)[len(GREETING) :]
        end.sendall(frame_of(key, nonce, 0, _ASKS + mine))
        if not hmac.compare_digest(_read(end, CODE_BYTES), code_of(key, mine, 0, _GIVES)):
            raise ConnectionRefusedError("what listens there does not know the job's token")
        end.settimeout(None)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # who only reads hears nothing of a cut
        for option, value in _SILENCE:
            end.setsockopt(socket.IPPROTO_TCP, option, value)
        closes.pop_all()
    return end


def is_call(body: bytes) -> bool:
    """Return whether a frame asks for a rank's state."""
    return body.startswith(_ASKS)


def answer(end: socket.socket, key: bytes, body: bytes) -> None:
    """Prove to the caller that the token is known here, too. It waits from now on."""
    end.setblocking(True)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _CUT_MS)
    with contextlib.suppress(OSError):  # who has it next sees that
        end.sendall(code_of(key, body.removeprefix(_ASKS), 0, _GIVES))


def _read(end: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        if not (part := end.recv(num_bytes - len(found))):
            raise ConnectionResetError("the connection was closed")
        found += part
    return found
