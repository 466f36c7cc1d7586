"""ECN marking at a switch port: an eBPF program that marks, or drops, packets above a backlog.

Rules
1. The backlog is that of a virtual queue, drained at the port's rate: a program in front of a queue cannot see the
   queue. It is kept as the time at which the queue will be empty, so that one atomic addition keeps it on all cores.
2. An ECN-capable packet above the mark threshold is marked. Another packet above the drop threshold is dropped; each
   class selector may have a drop threshold of its own. A packet that passes is added to the backlog.
3. The program is assembled here and loaded by bpf(2): no compiler, no pinned file. It goes with its interface.

Limits: needs root (bpf(2) is refused in a user namespace); IPv4; without IP options it makes no difference.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence

from paceline_lab.emulation.traffic_control import Filter

_CALL_NUMBER = {"x86_64": 321, "aarch64": 280}
_MAP_CREATE, _MAP_LOOKUP, _PROGRAM_LOAD = 0, 1, 5
_ARRAY, _CLASSIFIER = 2, 3
_LOG_BYTES = 1 << 16

# Registers: r0 results, r1 to r5 arguments and scratch, r6 to r9 kept over calls, r10 the stack.
_ADD, _MUL, _AND, _SHIFT_RIGHT, _SUB = 0x00, 0x20, 0x50, 0x70, 0x10
_EQUAL, _ABOVE, _AT_LEAST, _NOT_EQUAL, _ALWAYS = 0x10, 0x20, 0x30, 0x50, 0x00
_NOW, _MARK_CE = 5, 97  # the kernel's bpf_ktime_get_ns and bpf_skb_ecn_set_ce
_COMPARE_EXCHANGE = 0xF1
_SKB_LENGTH, _SKB_PROTOCOL = 0, 16
_TOS, _TO_CLASS = 15, 5
_DROP, _GO_ON = 2, -1

# The map's single value: when the queue will be empty (ns), and two counters.
_EMPTY_AT, _MARKED, _DROPPED = 0, 8, 16
_VALUE_BYTES = 24
_LOG2_SCALE = 16


def load(
    rate_bits_per_s: float, mark_bytes: int | None, drop_bytes: Sequence[int] | None
) -> tuple[Filter, int]:
    """The program for a port of this rate, and the open file of its counters; `drop_bytes` by class selector.

    Raises:
        OSError: The kernel refused; EPERM without root.
    """
    counters = _bpf(_MAP_CREATE, struct.pack("=IIIII", _ARRAY, 4, _VALUE_BYTES, 1, 0))
    ns_per_byte = 8e9 / rate_bits_per_s
    code = _program(
        counters,
        round(ns_per_byte * 2**_LOG2_SCALE),
        None if mark_bytes is None else round(mark_bytes * ns_per_byte),
        [round(limit * ns_per_byte) for limit in drop_bytes or ()],
    )
    log = ctypes.create_string_buffer(_LOG_BYTES)
    text, licence = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
    fields = (
        _CLASSIFIER,
        len(code) // 8,
        ctypes.addressof(text),
        ctypes.addressof(licence),
        1,
        _LOG_BYTES,
        ctypes.addressof(log),
    )
    try:
        program = _bpf(_PROGRAM_LOAD, struct.pack("=IIQQIIQ", *fields))
    except OSError as error:
        said = log.value.decode(errors="replace").strip().splitlines()
        raise OSError(error.errno, f"{error.strerror} {said[-1] if said else ''}".strip()) from error
    return Filter("marking", program=program), counters


def read(counters: int) -> tuple[int, int]:
    """Return how many packets were marked and dropped so far."""
    key, value = ctypes.c_uint32(0), ctypes.create_string_buffer(_VALUE_BYTES)
    _bpf(_MAP_LOOKUP, struct.pack("=IIQQQ", counters, 0, ctypes.addressof(key), ctypes.addressof(value), 0))
    _, marked, dropped = struct.unpack("=QQQ", value.raw)
    return marked, dropped


def _program(counters: int, scaled_ns_per_byte: int, mark_ns: int | None, drop_ns: Sequence[int]) -> bytes:
    """The instructions; r6 the packet, r7 the map's value, r8 now, r9 when the queue will be empty."""
    a = _Assembler()
    a.move(6, 1)
    a.value_of_map(7, counters)
    a.load_word(1, 6, _SKB_PROTOCOL)
    a.jump(_NOT_EQUAL, 1, 0x0008, "pass")  # the network's byte order of 0x0800, IPv4
    a.call(_NOW)
    a.move(8, 0)
    a.load(9, 7, _EMPTY_AT)
    a.jump_register(_ABOVE, 9, 8, "busy")
    # Idle: the queue has been empty since then, so it starts from now; if another core was faster, it said the same.
    a.move(0, 9)
    a.compare_exchange(7, _EMPTY_AT, 8)
    a.move(9, 8)
    a.label("busy")
    a.subtract(9, 8)  # the backlog, in ns
    a.load_packet_byte(_TOS)
    a.and_(0, 3)
    a.jump(_EQUAL, 0, 0, "plain")
    if mark_ns is not None:
        a.constant(1, mark_ns)
        a.jump_register(_AT_LEAST, 1, 9, "keep")
        a.move(1, 6)
        a.call(_MARK_CE)
        a.count(7, _MARKED)
    a.jump(_ALWAYS, 0, 0, "keep")
    a.label("plain")
    if drop_ns:
        a.load_packet_byte(_TOS)
        a.shift_right(0, _TO_CLASS)
        for number, limit in enumerate(drop_ns):
            a.constant(1, limit)
            if number + 1 < len(drop_ns):
                a.jump(_EQUAL, 0, number, "compare")
        a.label("compare")
        a.jump_register(_AT_LEAST, 1, 9, "keep")
        a.count(7, _DROPPED)
        a.leave(_DROP)
    a.label("keep")
    a.load_word(1, 6, _SKB_LENGTH)
    a.constant(2, scaled_ns_per_byte)
    a.multiply(1, 2)
    a.shift_right(1, _LOG2_SCALE)
    a.atomic_add(7, _EMPTY_AT, 1)
    a.label("pass")
    a.leave(_GO_ON)
    return a.code()


class _Assembler:
    """Just the eBPF instructions that the program above needs."""

    def __init__(self) -> None:
        self._words: list[bytes] = []
        self._labels: dict[str, int] = {}
        self._jumps: list[tuple[int, str]] = []

    def move(self, to: int, source: int) -> None:
        self._add(0xBF, to, source)

    def constant(self, to: int, value: int) -> None:
        self._add(0x18, to, 0, 0, value & 0xFFFFFFFF)
        self._add(0, 0, 0, 0, value >> 32)

    def value_of_map(self, to: int, counters: int) -> None:
        self._add(0x18, to, 2, 0, counters)
        self._add(0)

    def load(self, to: int, address: int, offset: int) -> None:
        self._add(0x79, to, address, offset)

    def load_word(self, to: int, address: int, offset: int) -> None:
        self._add(0x61, to, address, offset)

    def load_packet_byte(self, offset: int) -> None:
        self._add(0x30, immediate=offset)

    def subtract(self, to: int, source: int) -> None:
        self._add(0x0F | _SUB, to, source)

    def multiply(self, to: int, source: int) -> None:
        self._add(0x0F | _MUL, to, source)

    def shift_right(self, to: int, bits: int) -> None:
        self._add(0x07 | _SHIFT_RIGHT, to, immediate=bits)

    def and_(self, to: int, bits: int) -> None:
        self._add(0x07 | _AND, to, immediate=bits)

    def atomic_add(self, address: int, offset: int, source: int) -> None:
        self._add(0xDB, address, source, offset, _ADD)

    def compare_exchange(self, address: int, offset: int, source: int) -> None:
        self._add(0xDB, address, source, offset, _COMPARE_EXCHANGE)

    def count(self, address: int, offset: int) -> None:
        self._add(0xB7, 1, immediate=1)
        self.atomic_add(address, offset, 1)

    def call(self, function: int) -> None:
        self._add(0x85, immediate=function)

    def leave(self, result: int) -> None:
        self._add(0xB7, 0, immediate=result)
        self._add(0x95)

    def label(self, name: str) -> None:
        self._labels[name] = len(self._words)

    def jump(self, condition: int, register: int, value: int, label: str) -> None:
        self._jumps.append((len(self._words), label))
        self._add(0x05 | condition, register, immediate=value)

    def jump_register(self, condition: int, register: int, other: int, label: str) -> None:
        self._jumps.append((len(self._words), label))
        self._add(0x0D | condition, register, other)

    def code(self) -> bytes:
        for at, label in self._jumps:
            word = self._words[at]
            self._words[at] = word[:2] + struct.pack("=h", self._labels[label] - at - 1) + word[4:]
        return b"".join(self._words)

    def _add(self, code: int, to: int = 0, source: int = 0, offset: int = 0, immediate: int = 0) -> None:
        signed = immediate - (1 << 32) if immediate >= 1 << 31 else immediate
        self._words.append(struct.pack("=BBhi", code, source << 4 | to, offset, signed))


def _bpf(command: int, attributes: bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(attributes, 144)
    result: int = libc.syscall(_CALL_NUMBER.get(platform.machine(), 321), command, buffer, 144)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
