"""Measures a link from inside a host: `python -I -S link_meter.py ROLE JSON`; standard library only.

Prints one JSON object a line: what it listens on, then what it saw. Receivers end when the sender closes its
connection or sends an empty datagram, or after a second of silence.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

PAYLOAD_BYTES = 1200
_SEGMENT, _GRO = 103, 104  # UDP_SEGMENT, UDP_GRO of linux/udp.h
_SILENCE_S = 1.0
_PATIENCE_S = 30.0
_HEADER = struct.Struct("!I")
_BLOCK = 1 << 18


def receive_datagrams() -> dict[str, Any]:
    """Count datagrams until a second of silence; the clock runs from the first one to the last one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("0.0.0.0", 0))  # noqa: S104 - in a network namespace of its own
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        udp.setsockopt(socket.IPPROTO_UDP, _GRO, 1)
        udp.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        _print_message({"port": udp.getsockname()[1]})
        packets = payload = marked = 0
        first_s = last_s = 0.0
        udp.settimeout(_PATIENCE_S)
        with contextlib.suppress(TimeoutError):
            while True:
                data, ancillary, _, _ = udp.recvmsg(65536, 128)
                now_s = time.monotonic()
                if not packets:
                    # The first datagram's time starts the clock, so its bytes do not count.
                    first_s, payload = now_s, -len(data)
                    udp.settimeout(_SILENCE_S)
                last_s = now_s
                size = len(data)
                for _, kind, value in ancillary:
                    if kind == _GRO:
                        size = int.from_bytes(value[:4], sys.byteorder)
                    elif kind == socket.IP_TOS:
                        marked += value[0] & 3 == 3
                packets += -(-len(data) // size)
                payload += len(data)
    return {"packets": packets, "payload_bytes": payload, "seconds": last_s - first_s, "marked": marked}


def send_datagrams(
    to: tuple[str, int], seconds: float, packets: int, rate: float, size: int, tos: int, segments: int
) -> dict[str, Any]:
    """Send `packets` datagrams, or for `seconds`; at `rate` payload bytes a second, or as fast as the link takes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        udp.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        if segments > 1:
            udp.setsockopt(socket.IPPROTO_UDP, _SEGMENT, size)
        udp.connect(tuple(to))
        data = bytes(size * segments)
        sent, started_s = 0, time.monotonic()
        while sent < packets if packets else time.monotonic() - started_s < seconds:
            try:
                udp.send(data)
            except OSError:  # the receiver has closed, or the host's own queue is full
                continue
            sent += segments
            if rate:
                ahead_s = sent * size / rate - (time.monotonic() - started_s)
                if ahead_s > 0.002:
                    time.sleep(ahead_s)
    return {"packets": sent}


def receive_stream() -> dict[str, Any]:
    """Count a TCP connection's bytes."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("0.0.0.0", 0))  # noqa: S104
        listener.listen(1)
        listener.settimeout(_PATIENCE_S)
        _print_message({"port": listener.getsockname()[1]})
        connection, _ = listener.accept()
        connection.settimeout(_PATIENCE_S)
        buffer = bytearray(_BLOCK)
        with connection:
            payload = -connection.recv_into(buffer)
            started_s = time.monotonic()
            total = -payload
            while received := connection.recv_into(buffer):
                total += received
            return {"payload_bytes": total + payload, "seconds": time.monotonic() - started_s}


def send_stream(address: str, port: int, seconds: float) -> dict[str, Any]:
    """Send for a while over one TCP connection."""
    with socket.create_connection((address, port), timeout=_PATIENCE_S) as tcp:
        data, ends_s = bytes(_BLOCK), time.monotonic() + seconds
        while time.monotonic() < ends_s:
            tcp.sendall(data)
    return {}


def echo() -> dict[str, Any]:
    """Send every datagram back."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("0.0.0.0", 0))  # noqa: S104
        _print_message({"port": udp.getsockname()[1]})
        udp.settimeout(_PATIENCE_S)
        while True:
            data, peer = udp.recvfrom(2048)
            if not data:
                return {}
            udp.sendto(data, peer)


def ask(address: str, port: int, times: int) -> dict[str, Any]:
    """Measure the round trips of single datagrams."""
    trips_s = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect((address, port))
        udp.settimeout(_SILENCE_S)
        for number in range(times):
            started_s = time.monotonic()
            udp.send(_HEADER.pack(number))
            with contextlib.suppress(TimeoutError):
                while udp.recv(2048) != _HEADER.pack(number):
                    pass
                trips_s.append(time.monotonic() - started_s)
        for _ in range(3):  # the end may get lost
            udp.send(b"")
    return {"trips_s": trips_s}


def spin(seconds: float) -> dict[str, Any]:
    """Compute, and return the share of the time in which this process had a core."""
    started_s, ends_s = time.process_time(), time.monotonic() + seconds
    while time.monotonic() < ends_s:
        pass
    return {"cores": (time.process_time() - started_s) / seconds}


def _print_message(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


_ROLES: dict[str, Callable[..., dict[str, Any]]] = {
    "receive_datagrams": receive_datagrams,
    "send_datagrams": send_datagrams,
    "receive_stream": receive_stream,
    "send_stream": send_stream,
    "echo": echo,
    "ask": ask,
    "spin": spin,
}

if __name__ == "__main__":
    _print_message(_ROLES[sys.argv[1]](**json.loads(sys.argv[2])))
