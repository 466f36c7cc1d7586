"""Frames between ranks and servers: a header of fixed length, then bytes that are gradients, or metadata in JSON.

No received bytes are ever executed or unpickled. A frame is numbers, or JSON of which known fields are read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from paceline.errors import ProtocolError

HEADER = struct.Struct("<BBHIIQ")  # kind, dtype, 0, number, number of keys, bytes that follow
MAX_BODY_BYTES = 1 << 38  # all state of a server's keys is one frame
KEY = struct.Struct("<I")


class Kind(IntEnum):
    """The kind of a frame. The first four, JOIN and SUM are answered, by their number. The others have no answer."""

    HELLO = 1  # metadata: the rank's identity and session; the answer: nothing
    PUSH = 2  # keys, then gradients; the answer: sums, or stepped parameters
    SET_UP = 3  # metadata: an optimizer and its keys; the answer, once it is made: nothing
    FETCH = 4  # metadata; the answer: metadata, then state
    BEGIN = 5  # metadata: the settings of a step that begins, and whether the last one was used
    PARAMETERS = 6  # keys, then their values
    LOAD = 7  # metadata, then state
    FAILED = 8  # metadata: from a server, the session is over; from a rank, it lost a server or heard of a lost rank
    BYE = 9  # from a rank that ends well
    JOIN = 10  # metadata: the address of a rank's datagrams; the answer, once all have joined: the server's address
    SUM = 11  # metadata: a sum by datagrams; the answer, once it is done: nothing
    WAITS = 12  # metadata: the other server that a rank has waited for, for half of its timeout; or none


class DType(IntEnum):
    """The element type of a push."""

    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 3


WIDTHS = {DType.FLOAT32: 4, DType.FLOAT64: 8, DType.FLOAT16: 2, DType.BFLOAT16: 2}


@dataclass(frozen=True)
class Frame:
    """One message."""

    kind: Kind
    number: int = 0  # matches an answer to its request; of a push, how many its rank had sent before
    num_keys: int = 0  # how many key numbers come first in the body
    dtype: DType = DType.FLOAT32  # of the elements
    body: tuple[Any, ...] = ()  # concatenated on the wire

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.body)

    @property
    def header(self) -> bytes:
        return HEADER.pack(self.kind, self.dtype, 0, self.number, self.num_keys, self.num_bytes)


def header_of(received: bytes) -> tuple[Frame, int]:
    """Return a frame without its body, and the body's length. Raises ProtocolError for another protocol."""
    kind, dtype, zero, number, num_keys, num_bytes = HEADER.unpack(received)
    try:
        frame = Frame(Kind(kind), number, num_keys, DType(dtype))
    except ValueError as error:
        raise ProtocolError(f"a frame of an unknown kind or dtype was received ({error})") from error
    if zero or num_bytes > MAX_BODY_BYTES or num_keys * KEY.size > num_bytes:
        raise ProtocolError(
            f"a frame of {num_bytes} bytes with {num_keys} keys was received; at most {MAX_BODY_BYTES} bytes may be"
        )
    return frame, num_bytes


def pack(metadata: Mapping[str, Any]) -> bytes:
    """Return metadata as bytes for a frame's body."""
    return json.dumps(metadata, separators=(",", ":")).encode()


def unpack(body: Any) -> dict[str, Any]:
    """Return the metadata that `pack` was given. Raises ProtocolError for other bytes."""
    try:
        metadata = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"metadata were expected, and something else was received: {error}") from error
    if not isinstance(metadata, dict):
        raise ProtocolError("metadata were expected, and something else was received")
    return metadata


def pack_state(metadata: Mapping[str, Any]) -> bytes:
    """Return metadata as bytes behind their length, so that other bytes can follow."""
    packed = pack(metadata)
    return KEY.pack(len(packed)) + packed


def unpack_state(body: Any) -> tuple[dict[str, Any], memoryview]:
    """Return the metadata of `pack_state`, and the bytes behind it."""
    view = memoryview(body).cast("B")
    if len(view) < KEY.size or (length := KEY.unpack(view[: KEY.size])[0]) > len(view) - KEY.size:
        raise ProtocolError("a state was expected, and something else was received")
    return unpack(view[KEY.size : KEY.size + length]), view[KEY.size + length :]
