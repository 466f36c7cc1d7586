"""Linux traffic control of one network device: rate, queues, random loss and priority of what it carries.

Everything acts in the current network namespace. Filters are classic BPF, which needs no privilege beyond the
namespace's own. So it also works in a user namespace, where bpf(2) does not. Offsets count from the Ethernet header.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pyroute2 import IPRoute, NetlinkError
from pyroute2.ethtool import Ethtool
from pyroute2.netlink.rtnl.tcmsg import plugins, sched_pfifo

from paceline_lab.errors import UnsupportedError

# pyroute2 knows pfifo, which counts packets; the message of bfifo, which counts bytes, is the same.
plugins.setdefault("bfifo", sched_pfifo)

QDISC_ROOT, QDISC_CLSACT = 0x10000, 0xFFFF0000
_WHOLE_LINK, _ONLY_CLASS = 0x10001, 0x10010
_FLOOR_BYTES_PER_S = 1000  # what strict priority guarantees a band: next to nothing
_OFFLOADS = (
    "tx-tcp-segmentation",
    "tx-tcp6-segmentation",
    "tx-tcp-mangleid-segmentation",
    "tx-tcp-ecn-segmentation",
    "tx-udp-segmentation",
    "tx-generic-segmentation",
)


# ---- rate and queues


def shape(
    ip: IPRoute,
    name: str,
    rate_bits_per_s: float | None,
    queue_bytes: int,
    mtu: int,
    *,
    priority: bool = False,
) -> None:
    """Limit a device's sending to a rate, with a finite queue; with `priority` one queue per DSCP class selector."""
    if rate_bits_per_s is None:
        return
    index = index_of(ip, name)
    default_class = _CLASS_OF_BAND + _NUM_BANDS - 1 if priority else _ONLY_CLASS
    with needs("the HTB queueing discipline (sch_htb)"):
        ip.tc("add", "htb", index, QDISC_ROOT, default=default_class & 0xFFFF)
    for number, limits in _classes(rate_bits_per_s, mtu, priority=priority):
        ip.tc("add-class", "htb", index, number, **limits)
        if number != _WHOLE_LINK:
            queue = 0x100000 if number == _ONLY_CLASS else (0x10 + number - _CLASS_OF_BAND) << 16
            ip.tc("add", "bfifo", index, queue, parent=number, limit=queue_bytes)
    if priority:
        attach(_band_of_dscp(), index, QDISC_ROOT)


def reshape(ip: IPRoute, name: str, rate_bits_per_s: float, mtu: int, *, priority: bool = False) -> None:
    """Change the rate of a device that was shaped with one; its queues keep their packets."""
    index = index_of(ip, name)
    for number, limits in _classes(rate_bits_per_s, mtu, priority=priority):
        ip.tc("change-class", "htb", index, number, **limits)


def _classes(rate_bits_per_s: float, mtu: int, *, priority: bool) -> Iterator[tuple[int, dict[str, int]]]:
    """HTB's classes of a rate: one; or one for the link, and below it one a band."""
    rate = round(rate_bits_per_s / 8)
    # A burst is what may leave at once: ten packets, or what a millisecond's oversleeping would cost.
    burst = max(10 * mtu, round(rate * 0.0005))
    quantum = mtu + 100
    limits = {"ceil": rate, "cburst": burst, "quantum": quantum}
    whole = {"parent": QDISC_ROOT, "rate": rate, "burst": burst, **limits}
    if not priority:
        yield _ONLY_CLASS, whole
        return
    yield _WHOLE_LINK, whole
    for band in range(_NUM_BANDS):
        floor = {"rate": _FLOOR_BYTES_PER_S, "burst": quantum, "prio": band}
        yield _CLASS_OF_BAND + band, {"parent": _WHOLE_LINK, **floor, **limits}


def send_single_packets(name: str) -> None:
    """Switch off segmentation offload: segments are cut up before the device, so packets cross the link."""
    tool = Ethtool()
    features = tool.get_features(name)
    for offload in _OFFLOADS:
        if offload in features.features:
            features.features[offload].enable = False
    tool.set_features(name, features)


@contextmanager
def needs(what: str) -> Iterator[None]:
    """Raise an error that names what the kernel lacks, if it refuses what the block asks for."""
    try:
        yield
    except NetlinkError as error:
        raise UnsupportedError(
            f"this kernel lacks {what}, or does not allow them here ({error.args[1]}). Load the module, run as root, "
            "or try another machine. Nothing was created."
        ) from error


def index_of(ip: IPRoute, name: str) -> int:
    """The index of a device."""
    return int(ip.link_lookup(ifname=name)[0])


def disable_ipv6(name: str) -> None:
    """Switch off IPv6 on a device: its neighbour discovery would be counted as traffic."""
    set_kernel(f"net/ipv6/conf/{name}/disable_ipv6", "1")


def set_kernel(name: str, value: str) -> None:
    """Set a kernel parameter of the current network; one that is not there is not needed."""
    with suppress(OSError):
        (Path("/proc/sys") / name).write_text(value)


def drops_by_queue(ip: IPRoute, index: int) -> dict[int, int]:
    """Return how many packets each queueing discipline of a device dropped, by its handle."""
    found = {}
    for queue in ip.get_qdiscs(index):
        stats = queue.get_attr("TCA_STATS2")
        counts = None if stats is None else stats.get_attr("TCA_STATS_QUEUE")
        if counts is not None:
            found[queue["handle"]] = int(counts["drops"])
    return found


# ---- filters

INGRESS, EGRESS = 0xFFFFFFF2, 0xFFFFFFF3
_CLASS_OF_BAND = 0x10010
_NUM_BANDS = 8

_ETHERTYPE, _TOS = 12, 15
_IPV4 = 0x0800
_RANDOM = 0xFFFFF038  # the kernel's random number, as an offset
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE = 0x20, 0x28, 0x30
_IF_EQUAL, _IF_AT_LEAST = 0x15, 0x35
_SHIFT_RIGHT, _XOR, _ADD, _RETURN, _RETURN_A = 0x74, 0xA4, 0x04, 0x06, 0x16
_DROP, _GO_ON = 2, 0xFFFFFFFF

_NEW_FILTER, _DELETE_FILTER = 44, 45
_REQUEST_ACK, _CREATE = 0x1 | 0x4, 0x400
_KIND, _OPTIONS = 1, 2
_OPS_LEN, _OPS, _FD, _NAME, _FLAGS = 4, 5, 6, 7, 8
_DIRECT_ACTION = 1


@dataclass(frozen=True)
class Filter:
    """A program for cls_bpf.

    Attributes:
        name: Shown by `tc filter show`.
        code: Classic instructions, or None if `program` is the open file of a loaded eBPF program.
        program: See `code`.
        direct_action: Whether its result says what to do with the packet; else it is a class.
    """

    name: str
    code: bytes | None = None
    program: int = -1
    direct_action: bool = True


def random_loss(ratio: float) -> Filter:
    """Drop IPv4 packets at random."""
    return Filter(
        "loss",
        _assembled(
            (_LOAD_HALF, 0, 0, _ETHERTYPE),
            (_IF_EQUAL, 0, 3, _IPV4),
            (_LOAD_WORD, 0, 0, _RANDOM),
            (_IF_AT_LEAST, 1, 0, round(ratio * 2**32)),
            (_RETURN, 0, 0, _DROP),
            (_RETURN, 0, 0, _GO_ON),
        ),
    )


def _band_of_dscp() -> Filter:
    """Class selector 7 is band 0, served first; class selector 0 is band 7; what is not IPv4 is band 0."""
    return Filter(
        "band",
        _assembled(
            (_LOAD_HALF, 0, 0, _ETHERTYPE),
            (_IF_EQUAL, 1, 0, _IPV4),
            (_RETURN, 0, 0, _CLASS_OF_BAND),
            (_LOAD_BYTE, 0, 0, _TOS),
            (_SHIFT_RIGHT, 0, 0, 5),
            (_XOR, 0, 0, 7),
            (_ADD, 0, 0, _CLASS_OF_BAND),
            (_RETURN_A, 0, 0, 0),
        ),
        direct_action=False,
    )


def attach(chosen: Filter, interface: int, parent: int) -> None:
    """Attach a filter to a queue or to a side of an interface, in the current network namespace.

    pyroute2 knows eBPF filters only, so the message is written here.

    Raises:
        OSError: The kernel refused.
    """
    options = _attribute(_NAME, chosen.name.encode() + b"\0")
    options += _attribute(_FLAGS, struct.pack("=I", _DIRECT_ACTION if chosen.direct_action else 0))
    if chosen.code is None:
        options += _attribute(_FD, struct.pack("=I", chosen.program))
    else:
        options += _attribute(_OPS_LEN, struct.pack("=H", len(chosen.code) // 8))
        options += _attribute(_OPS, chosen.code)
    details = _attribute(_KIND, b"bpf\0") + _attribute(_OPTIONS, options)
    result = _ask_about_filter(_NEW_FILTER, _REQUEST_ACK | _CREATE, interface, parent, details)
    if result:
        raise OSError(-result, f"attaching the filter '{chosen.name}'")


def detach(interface: int, parent: int) -> None:
    """Remove what is attached to a queue or to a side of an interface; nothing is fine, too."""
    result = _ask_about_filter(_DELETE_FILTER, _REQUEST_ACK, interface, parent)
    if result not in (0, -errno.ENOENT, -errno.EINVAL):
        raise OSError(-result, "detaching a filter")


def _ask_about_filter(request: int, flags: int, interface: int, parent: int, details: bytes = b"") -> int:
    """Send one message and return the kernel's answer, 0 or a negative error number."""
    info = 1 << 16 | socket.htons(0x0003)  # priority 1, every protocol
    body = struct.pack("=BxxxiIII", 0, interface, 0, parent, info) + details
    header = struct.pack("=IHHII", 16 + len(body), request, flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.bind((0, 0))
        link.send(header + body)
        (result,) = struct.unpack_from("=i", link.recv(65536), 16)
    return int(result)


def _assembled(*instructions: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)
