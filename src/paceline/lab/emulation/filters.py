"""Packet filters of the switch, in classic BPF: random loss and the class of a DSCP; and how one is attached.

Classic BPF needs no privilege beyond the network namespace's own, so it also works in a user namespace, where
bpf(2) does not. Offsets count from the Ethernet header.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

INGRESS, EGRESS = 0xFFFFFFF2, 0xFFFFFFF3
CLASS_OF_BAND = 0x10010
NUM_BANDS = 8

_ETHERTYPE, _TOS = 12, 15
_IPV4 = 0x0800
_RANDOM = 0xFFFFF038  # the kernel's random number, as an offset
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE = 0x20, 0x28, 0x30
_IF_EQUAL, _IF_AT_LEAST = 0x15, 0x35
_SHIFT_RIGHT, _XOR, _ADD, _RETURN, _RETURN_A = 0x74, 0xA4, 0x04, 0x06, 0x16
_DROP, _GO_ON = 2, 0xFFFFFFFF

_NEW_FILTER, _ACK_CREATE = 44, 0x1 | 0x4 | 0x400
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


def loss(ratio: float) -> Filter:
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


def band_of_dscp() -> Filter:
    """Class selector 7 is band 0, served first; class selector 0 is band 7; what is not IPv4 is band 0."""
    return Filter(
        "band",
        _assembled(
            (_LOAD_HALF, 0, 0, _ETHERTYPE),
            (_IF_EQUAL, 1, 0, _IPV4),
            (_RETURN, 0, 0, CLASS_OF_BAND),
            (_LOAD_BYTE, 0, 0, _TOS),
            (_SHIFT_RIGHT, 0, 0, 5),
            (_XOR, 0, 0, 7),
            (_ADD, 0, 0, CLASS_OF_BAND),
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
    info = 1 << 16 | socket.htons(0x0003)  # priority 1, every protocol
    body = struct.pack("=BxxxiIII", 0, interface, 0, parent, info)
    body += _attribute(_KIND, b"bpf\0") + _attribute(_OPTIONS, options)
    header = struct.pack("=IHHII", 16 + len(body), _NEW_FILTER, _ACK_CREATE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.bind((0, 0))
        link.send(header + body)
        (result,) = struct.unpack_from("=i", link.recv(65536), 16)
    if result:
        raise OSError(-result, f"attaching the filter '{chosen.name}'")


def _assembled(*instructions: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)
