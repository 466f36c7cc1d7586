"""Frames between ranks and servers: a header of fixed length, then bytes that are gradients, or metadata in JSON.

Nothing that arrives is ever executed or unpickled: a frame is numbers, or JSON of which known fields are read.
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
    """What a frame is. The first four, JOIN and SUM go to a server and back, by their number; others have no answer."""

    HELLO = 1  # metadata: who a rank is, in which session; the answer: metadata
    PUSH = 2  # keys, then gradients; the answer: sums, or stepped parameters
    SET_UP = 3  # metadata: an optimizer and its keys; the answer: nothing, once it is there
    FETCH = 4  # metadata; the answer: metadata, then state
    BEGIN = 5  # metadata: a step begins, and whether the one before was used
    PARAMETERS = 6  # keys, then their values
    LOAD = 7  # metadata, then state
    FAILED = 8  # metadata: from a server, the session is over; from a rank, it lost a server, or was told of a rank
    BYE = 9  # from a rank that ends well
    JOIN = 10  # metadata: where a rank's datagrams come from; the answer, once all have joined: where the server's do
    SUM = 11  # metadata: a sum by datagrams; the answer, once it is done: nothing
    # From a rank, metadata: which other server it has waited for, for half of its timeout; or that none.
    WAITS = 12


class DType(IntEnum):
    """Of a push."""

    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 3


WIDTHS = {DType.FLOAT32: 4, DType.FLOAT64: 8, DType.FLOAT16: 2, DType.BFLOAT16: 2}


@dataclass(frozen=True)
class Frame:
    """One message."""

    kind: Kind  # what it is
    number: int = 0  # by which an answer is matched; of a push, how many its rank had sent before
    num_keys: int = 0  # so many numbers of keys come first in the body
    dtype: DType = DType.FLOAT32  # of the elements
    body: tuple[Any, ...] = ()  # parts that follow each other on the wire

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.body)

    @property
    def header(self) -> bytes:
        return HEADER.pack(self.kind, self.dtype, 0, self.number, self.num_keys, self.num_bytes)


def header_of(received: bytes) -> tuple[Frame, int]:
    """Return a frame without its body, and the body's number of bytes. ProtocolError: another protocol."""
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
    """Metadata for a frame's body."""
    return json.dumps(metadata, separators=(",", ":")).encode()


def unpack(body: Any) -> dict[str, Any]:
    """What `pack` was given. Raises ProtocolError if it is something else."""
    try:
        metadata = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"metadata were expected, and something else was received: {error}") from error
    if not isinstance(metadata, dict):
        raise ProtocolError("metadata were expected, and something else was received")
    return metadata


def pack_state(metadata: Mapping[str, Any]) -> bytes:
    """Metadata that bytes follow: with their length in front."""
    packed = pack(metadata)
    return KEY.pack(len(packed)) + packed


def unpack_state(body: Any) -> tuple[dict[str, Any], memoryview]:
    """Metadata of `pack_state`, and the bytes behind them."""
    view = memoryview(body).cast("B")
    if len(view) < KEY.size or (length := KEY.unpack(view[: KEY.size])[0]) > len(view) - KEY.size:
        raise ProtocolError("a state was expected, and something else was received")
    return unpack(view[KEY.size : KEY.size + length]), view[KEY.size + length :]
