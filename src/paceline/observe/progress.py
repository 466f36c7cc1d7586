"""A rank's progress in the collectives of each of its groups, in a mapped file that its launcher can read.

Rules
1. A rank counts a collective as it enters it, before anything can hang in it. So a rank that hangs has counted less.
2. Writing is a store to memory: it needs no lock, no system call and no reader.
3. The file lies in the launch's folder, which the launcher removes. Without a launcher of ours nothing is written.
4. Times are of `time.monotonic()`, one clock for all processes of a host.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

VARIABLE = "PACELINE_PROGRESS"
"""In the ranks' environment: the folder in which each writes how far it is."""
_MAGIC = b"paceprg1"
_HEADER = struct.Struct("<8sii16x")
_GROUP = struct.Struct("<16s96s")  # which group: a digest of its name, and its ranks
_NOW = struct.Struct("<qdqi4x")  # collectives entered, when, in which step, whether it waits there
_WHAT = struct.Struct("<80s")  # in words
_SLOT_BYTES = _GROUP.size + _NOW.size + _WHAT.size
_NUM_SLOTS = 32  # groups of a rank; those that come later are not counted
_FILE_BYTES = _HEADER.size + _NUM_SLOTS * _SLOT_BYTES


@dataclass(frozen=True)
class Entered:
    """The progress of one rank through the collectives of one group."""

    rank: int  # in the job
    pid: int  # its process
    group: bytes  # tells groups apart; the same on every rank of one
    ranks: tuple[int, ...]  # of the group, in the job; empty: too many to say
    count: int  # collectives that it has entered
    at_s: float  # when it entered, or left, the last one
    step: int  # in which step; -1: unknown
    what: str  # the last collective that it entered, in words
    waits: bool  # whether it is still within it
    known_s: float = math.inf  # until when that is known, if the rank is on another machine


class Counter:
    """The number of collectives that this rank has entered in one group."""

    def __init__(self, memory: mmap.mmap, slot: int) -> None:
        self._memory = memory
        self._at = _HEADER.size + slot * _SLOT_BYTES + _GROUP.size
        self._count = 0
        self._step = -1
        self._what = ""

    def enter(self, what: str, step: int = -1, *, waits: bool = True) -> None:
        """Note that this rank enters a collective, the same `what` on every rank; it `waits` there until `leave`."""
        self._count += 1
        self._step = step
        if what != self._what:
            self._what = what
            _WHAT.pack_into(self._memory, self._at + _NOW.size, what.encode())
        _NOW.pack_into(self._memory, self._at, self._count, time.monotonic(), step, waits)

    def leave(self) -> None:
        """Note that the collective entered last is over."""
        _NOW.pack_into(self._memory, self._at, self._count, time.monotonic(), self._step, False)


class _File:
    """The file of this process's counters, made when the first group is counted."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._path: Path | None = None
        self._slots: dict[bytes, Counter] = {}

    def counter(self, name: str, ranks: Sequence[int]) -> Counter | None:
        self._memory = self._memory or self._opened()
        members = _words(ranks)
        group = blake2b(f"{members}/{name}".encode(), digest_size=16).digest()
        slot = len(self._slots)
        if self._memory is not None and group not in self._slots and slot < _NUM_SLOTS:
            self._slots[group] = Counter(self._memory, slot)
            _GROUP.pack_into(self._memory, _HEADER.size + slot * _SLOT_BYTES, group, members.encode())
        return self._slots.get(group)

    def _opened(self) -> mmap.mmap | None:
        """Return this process's file; None without a launcher that reads it, or for a single rank."""
        folder, rank = os.environ.get(VARIABLE), os.environ.get("RANK", "")
        if not folder or not rank.isdecimal() or os.environ.get("WORLD_SIZE") == "1":
            return None
        path = Path(folder, f"progress.{rank}.{os.getpid()}")
        with contextlib.suppress(OSError), path.open("x+b") as file:
            self._path = path
            file.truncate(_FILE_BYTES)
            memory = mmap.mmap(file.fileno(), _FILE_BYTES)
            _HEADER.pack_into(memory, 0, _MAGIC, int(rank), os.getpid())
            return memory
        return None

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


_file = _File()
_num_begun = 0


def begin_again() -> None:
    """Count from nothing: this rank has another number from now on, or is in no group. Local.

    The file is removed, so that no reader sees where this rank has waited. Earlier counters no longer count.
    """
    global _file, _num_begun  # noqa: PLW0603  one a process
    _file.remove()
    _file = _File()
    _num_begun += 1


def num_begun() -> int:
    """Return how often this rank has begun again: counters from before are not to be kept."""
    return _num_begun


def _forget_parents() -> None:
    global _file  # noqa: PLW0603  a forked process is no rank
    _file = _File()


os.register_at_fork(after_in_child=_forget_parents)


def counter(name: str, ranks: Sequence[int]) -> Counter | None:
    """Return this rank's count in the group with this name and these ranks. None if no process reads it. Local."""
    return _file.counter(name, ranks)


def read(folder: Path) -> Iterator[Entered]:
    """Yield the progress of the ranks that write in this folder; processes that have ended included."""
    for path in folder.glob("progress.*"):
        with contextlib.suppress(OSError, struct.error, UnicodeDecodeError, ValueError):
            yield from _read(path.read_bytes())


def _read(content: bytes) -> Iterator[Entered]:
    magic, rank, pid = _HEADER.unpack_from(content, 0)
    if magic != _MAGIC:
        return
    for slot in range(_NUM_SLOTS):
        at = _HEADER.size + slot * _SLOT_BYTES
        group, members = _GROUP.unpack_from(content, at)
        count, at_s, step, waits = _NOW.unpack_from(content, at + _GROUP.size)
        (what,) = _WHAT.unpack_from(content, at + _GROUP.size + _NOW.size)
        if count:
            words = what.rstrip(b"\0").decode(errors="ignore")  # it may be cut within a letter
            yield Entered(rank, pid, group, _ranks(members), count, at_s, step, words, bool(waits))


def _words(ranks: Sequence[int]) -> str:
    """Return ranks as `0-3,6`; nothing if that is too long."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return words if len(words) <= 96 else ""


def _ranks(members: bytes) -> tuple[int, ...]:
    words = members.rstrip(b"\0").decode()
    found: list[int] = []
    for run in words.split(",") if words else []:
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
