"""The kernel's batched datagram calls, from compiled code: recvmmsg, sendmmsg, poll and the clock.

Numbers and layouts are those of 64-bit Linux (`struct mmsghdr`, `struct iovec`, `struct cmsghdr`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from paceline_lossy.datagrams import datagram as d
from paceline_lossy.datagrams.machine_code import compiled, copy_memory, inner

_recvmmsg: Any = types.ExternalFunction(
    "recvmmsg", types.int32(types.int32, types.intp, types.uint32, types.int32, types.intp)
)
_sendmmsg: Any = types.ExternalFunction(
    "sendmmsg", types.int32(types.int32, types.intp, types.uint32, types.int32)
)
_ppoll: Any = types.ExternalFunction("ppoll", types.int32(types.intp, types.uint64, types.intp, types.intp))
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_ioctl: Any = types.ExternalFunction("ioctl", types.int32(types.int32, types.uint64, types.intp))
_errno: Any = types.ExternalFunction("__errno_location", types.intp())

AGAIN, INVALID, IO_ERROR, TOO_LONG, NO_BUFFER = 11, 22, 5, 90, 105
POLL_IN, POLL_OUT = 1, 4
_MSG_DONTWAIT = 0x40
_SIOCOUTQ = 0x5411
_CLOCK_MONOTONIC = 1
# An mmsghdr in words of 64 bits: name, its length, iov, their number, control, its length, flags, length.
_MSG_WORDS = 8
_CONTROL_WORDS = 8
_SOL_UDP, _UDP_SEGMENT = 17, 103
_IPPROTO_IP, _IP_TOS = 0, 1
_CONGESTED = 3
_ADDRESS_WORDS = 2  # a sockaddr_in
MOST_SEGMENTS = 40  # of one offloaded message, which is at most 64 KiB long


class Batch(NamedTuple):
    """Memory of a batch of datagrams, and the kernel's description of it."""

    rows: NDArray[np.uint8]
    words: NDArray[np.uint32]
    longs: NDArray[np.uint64]
    sizes: NDArray[np.int64]
    ways: NDArray[np.int64]
    marks: NDArray[np.int64]
    messages: NDArray[np.int64]
    vectors: NDArray[np.int64]
    control: NDArray[np.int64]
    addresses: NDArray[np.int64]  # one per peer
    covered: NDArray[np.int64]  # how many rows a message sends
    ports: NDArray[np.int64]  # the port that a message leaves by


def new_batch(rows: int, row_bytes: int, addresses: NDArray[np.int64]) -> Batch:
    """Return memory for `rows` datagrams. `addresses` holds one sockaddr_in per peer, shape (P, 2)."""
    memory = np.zeros((rows, row_bytes), np.uint8)
    return Batch(
        rows=memory,
        words=memory.view(np.uint32),
        longs=memory.view(np.uint64),
        sizes=np.zeros(rows, np.int64),
        ways=np.zeros(rows, np.int64),
        marks=np.zeros(rows, np.int64),
        messages=np.zeros((rows, _MSG_WORDS), np.int64),
        vectors=np.zeros((rows, 2), np.int64),
        control=np.zeros((rows, _CONTROL_WORDS), np.int64),
        addresses=addresses,
        covered=np.zeros(rows, np.int64),
        ports=np.zeros(rows, np.int64),
    )


@compiled
def now_us(scratch: Any) -> int:
    """Return the monotonic clock. `scratch` has shape (2,), int64."""
    _clock_gettime(_CLOCK_MONOTONIC, scratch.ctypes.data)
    return int(scratch[0] * 1_000_000 + scratch[1] // 1000)


@inner
def last_error(scratch: Any) -> int:
    """Return the error number of this thread's last failed call. `scratch` has shape (N,), int64."""
    scratch[0] = 0
    copy_memory(scratch.ctypes.data, _errno(), 4)
    return int(scratch[0])


@inner
def queued_bytes(descriptor: int, scratch: Any) -> int:
    """Return the bytes of memory that the socket has sent and the link has not. `scratch` has shape (N,), int64."""
    scratch[0] = 0
    _ioctl(descriptor, _SIOCOUTQ, scratch.ctypes.data)
    return int(scratch[0] & 0xFFFFFFFF)


@inner
def wait_for(descriptors: Any, events: Any, scratch: Any, timeout_us: int) -> None:
    """Wait until one of two descriptors is ready, at most `timeout_us`.

    All arrays are int64. `descriptors` and `events` have shape (2,), `scratch` (4,).
    """
    scratch[0], scratch[1] = timeout_us // 1_000_000, timeout_us % 1_000_000 * 1000
    scratch[2] = descriptors[0] | events[0] << 32
    scratch[3] = descriptors[1] | events[1] << 32
    _ppoll(scratch.ctypes.data + 16, 2, scratch.ctypes.data, 0)


@inner
def receive_batch(descriptor: int, batch: Any) -> int:
    """Fill rows, sizes and marks with arrived datagrams. Return their number, or minus an error number."""
    count = batch.sizes.shape[0]
    row_bytes = batch.rows.shape[1]
    for i in range(count):
        message, vector = batch.messages[i], batch.vectors[i]
        vector[0], vector[1] = batch.rows.ctypes.data + i * row_bytes, row_bytes
        message[0] = message[1] = 0
        message[2], message[3] = batch.vectors.ctypes.data + i * 16, 1
        message[4], message[5] = batch.control.ctypes.data + i * 8 * _CONTROL_WORDS, 8 * _CONTROL_WORDS
        message[6] = 0
    got = _recvmmsg(descriptor, batch.messages.ctypes.data, count, _MSG_DONTWAIT, 0)
    if got < 0:
        return -last_error(batch.marks)
    for i in range(got):
        message = batch.messages[i]
        batch.sizes[i] = message[7] & 0xFFFFFFFF
        if message[6] & 0x20:  # MSG_TRUNC: longer than any datagram of this protocol
            batch.sizes[i] = 0
        control = batch.control[i]
        is_tos = message[5] > 16 and control[1] == (_IPPROTO_IP | _IP_TOS << 32)
        batch.marks[i] = 1 if is_tos and control[2] & 3 == _CONGESTED else 0
    return int(got)


@compiled
def prepare_messages(batch: Any, count: int, segments: int, num_ports: int) -> int:
    """Describe `count` filled rows as messages of at most `segments` datagrams each; return how many messages.

    The datagrams of a message take one way, and have one type of service, which the message carries.
    """
    row_bytes = batch.rows.shape[1]
    made = 0
    i = 0
    while i < count:
        way, first = batch.ways[i], i
        length = batch.sizes[i]
        tos = d.tos_of(batch.words[i])
        i += 1
        while (
            i < count
            and i - first < segments
            and batch.ways[i] == way
            and d.tos_of(batch.words[i]) == tos
            and batch.sizes[i - 1] == row_bytes
            and length + batch.sizes[i] < 65000
        ):
            length += batch.sizes[i]
            i += 1
        message, vector = batch.messages[made], batch.vectors[made]
        vector[0], vector[1] = batch.rows.ctypes.data + first * row_bytes, length
        message[0], message[1] = batch.addresses.ctypes.data + way // num_ports * 8 * _ADDRESS_WORDS, 16
        message[2], message[3] = batch.vectors.ctypes.data + made * 16, 1
        control = batch.control[made]
        control[0], control[1], control[2] = 20, _IPPROTO_IP | _IP_TOS << 32, tos
        message[4], message[5] = batch.control.ctypes.data + made * 8 * _CONTROL_WORDS, 24
        message[6] = 0
        if i - first > 1:
            control[3], control[4], control[5] = 18, _SOL_UDP | _UDP_SEGMENT << 32, row_bytes
            message[5] = 48
        batch.covered[made], batch.ports[made] = i - first, way % num_ports
        made += 1
    return made


@compiled
def send_messages(descriptors: Any, batch: Any, first: int, made: int) -> int:
    """Send the messages from number `first` on that leave by the same port. `descriptors` are the ports' sockets.

    Return how many the kernel took, or minus an error number.
    """
    port, end = batch.ports[first], first + 1
    while end < made and batch.ports[end] == port:
        end += 1
    start = batch.messages.ctypes.data + first * 8 * _MSG_WORDS
    got = _sendmmsg(descriptors[port], start, end - first, _MSG_DONTWAIT)
    return int(got) if got >= 0 else -last_error(batch.marks)
