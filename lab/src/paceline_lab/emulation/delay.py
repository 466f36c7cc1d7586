"""Links with delay: the kernel's netem where it has it, else a process that forwards packets between two TAP devices.

Rules
1. Only what a host sends is delayed, so a packet between two hosts meets the delay once, and a round trip twice.
2. The rate is shaped at both ends as without a delay: the wire only holds what is under way.
3. The user-space wire is one process a link, forked by the laboratory and dead with it. It keeps packets in order;
   netem, whose jitter is drawn for every packet, does not.

Limits: the user-space wire is Python and moves one packet at a time (measured in docs/guide/emulate.md). Packets that
it is too slow for are lost, and counted as `wire_drops`.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import random
import select
import struct
import time
from dataclasses import dataclass

from pyroute2 import IPRoute, NetlinkError

from paceline_lab.emulation import namespaces
from paceline_lab.emulation.cluster_spec import ClusterSpec
from paceline_lab.errors import UnsupportedError

TAP_QUEUE_PACKETS = 5000
_NETEM_LIMIT = 1_000_000  # packets; never reached, because the rate bounds what is under way
_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_INFO, _WITH_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _SEGMENTS_V4, _SEGMENTS_V6, _ECN = 0x01, 0x02, 0x04, 0x08
_UDP_SEGMENTS = 0x20 | 0x40
_HEADER_BYTES = 10
_LARGEST_SEGMENT = 65536
_FRAME_HEADERS = 18 + _HEADER_BYTES
_BATCH = 64
_DELAY = struct.Struct("=q")  # ns


def has_netem(ip: IPRoute, interface: int) -> bool:
    """Return whether the kernel has netem, tried on an interface without traffic."""
    try:
        ip.tc("add", "netem", interface, 0x10000, delay=1000)
    except NetlinkError:
        return False
    ip.tc("del", "netem", interface, 0x10000)
    return True


def add_netem(ip: IPRoute, interface: int, spec: ClusterSpec) -> None:
    """Delay the packets that an interface sends."""
    ip.tc(
        "add",
        "netem",
        interface,
        0x10000,
        delay=round(spec.delay_s * 1e6),
        jitter=round(spec.jitter_s * 1e6),
        limit=_NETEM_LIMIT,
    )


def set_netem(ip: IPRoute, interface: int, delay_s: float) -> None:
    """Change the delay of an interface; the jitter ends, because it was drawn around another delay."""
    ip.tc("change", "netem", interface, 0x10000, delay=round(delay_s * 1e6), jitter=0, limit=_NETEM_LIMIT)


@dataclass(frozen=True)
class Wire:
    """A process that carries a link's frames.

    Attributes:
        pid: Number of its process.
        control: A pipe to it, on which it takes another delay.
    """

    pid: int
    control: int

    def set_delay(self, delay_s: float) -> None:
        """Have frames that come from now on arrive after this delay, without jitter."""
        os.write(self.control, _DELAY.pack(round(delay_s * 1e9)))


def add_wire(host: int, at_host: str, at_switch: str, home: int, spec: ClusterSpec) -> Wire:
    """Make a device in the host whose first process is `host`, and one here; returns the process between them."""
    offload = bool(spec.offload)
    with namespaces.inside(host, home):
        near = _tap(at_host, offload=offload)
    far = _tap(at_switch, offload=offload)
    laboratory = os.getpid()
    told, control = os.pipe()
    wire = os.fork()
    if wire == 0:
        try:
            namespaces.forget_the_laboratory(near, far, told)
            namespaces.die_with_parent(laboratory)
            namespaces.sleep_exactly()
            largest = (_LARGEST_SEGMENT if offload else spec.mtu) + _FRAME_HEADERS
            _carry(near, far, told, largest, round(spec.delay_s * 1e9), round(spec.jitter_s * 1e9))
        finally:
            os._exit(1)
    for file in (near, far, told):
        os.close(file)
    return Wire(wire, control)


def _tap(name: str, *, offload: bool) -> int:
    """A TAP device whose frames carry a header that lets checksums, and with `offload` segments, stay undone."""
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise UnsupportedError(
            f"--delay needs netem, which this kernel lacks, or /dev/net/tun, which cannot be opened "
            f"({error.strerror}). "
            "Load sch_netem, run as root, or leave --delay out. Nothing was created."
        ) from error
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP | _NO_INFO | _WITH_HEADER))
    segments = _SEGMENTS_V4 | _SEGMENTS_V6 | _ECN
    for features in (_CHECKSUM | segments | _UDP_SEGMENTS, _CHECKSUM | segments) if offload else (_CHECKSUM,):
        with contextlib.suppress(OSError):  # kernels before 6.2 do not segment datagrams here
            fcntl.ioctl(device, _SET_OFFLOAD, features)
            break
    return device


def _carry(near: int, far: int, told: int, largest: int, delay_ns: int, jitter_ns: int) -> None:
    """Forward frames for ever: what `near` sends arrives at `far` after the delay, what `far` sends at once.

    Another delay may come over `told`, a pipe.
    """
    under_way: collections.deque[tuple[int, bytes]] = collections.deque()
    now_ns = time.monotonic_ns
    files, arrival_ns = [near, far, told], 0
    while True:
        while under_way and under_way[0][0] <= now_ns():
            _, frame = under_way.popleft()
            with contextlib.suppress(OSError):  # the far end is down
                os.write(far, frame)
        wait_s = max(0.0, (under_way[0][0] - now_ns()) / 1e9) if under_way else None
        ready, _, _ = select.select(files, [], [], wait_s)
        if told in ready:
            (delay_ns,), jitter_ns = _DELAY.unpack(os.read(told, _DELAY.size)), 0
        if far in ready:
            for frame in _frames(far, largest):
                with contextlib.suppress(OSError):
                    os.write(near, frame)
        if near in ready:
            for frame in _frames(near, largest):
                delayed_ns = now_ns() + delay_ns
                if jitter_ns:
                    delayed_ns += random.randint(-jitter_ns, jitter_ns)  # noqa: S311 - no secret
                arrival_ns = max(arrival_ns, delayed_ns)
                under_way.append((arrival_ns, frame))


def _frames(device: int, largest: int) -> list[bytes]:
    frames = []
    with contextlib.suppress(OSError):
        for _ in range(_BATCH):
            frames.append(os.read(device, largest))  # noqa: PERF401 - what was read before the error counts
    return frames
