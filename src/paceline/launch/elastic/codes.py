"""Codes by which agents prove that they know the job's token, over random bytes that the other end chose."""

from __future__ import annotations

import hashlib
import hmac
import struct

GREETING = b"paceline agents 3\n"
NONCE_BYTES = CODE_BYTES = 32
CONNECT_S = 1.0  # then the connection is tried anew: TCP itself would wait ever longer after a cut
LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")


def frame_of(key: bytes, nonce: bytes, number: int, body: bytes) -> bytes:
    """Return a frame as it is sent; see `links`."""
    return LENGTH.pack(len(body)) + code_of(key, nonce, number, body) + body


def code_of(key: bytes, nonce: bytes, number: int, body: bytes) -> bytes:
    """Return the code of the frame with this number, for the listener that chose `nonce`."""
    return hmac.new(key, nonce + _NUMBER.pack(number) + body, hashlib.sha256).digest()
