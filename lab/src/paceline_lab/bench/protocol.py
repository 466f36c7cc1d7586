"""The rules of every benchmark: order of turns, the allocator, and what is refused before and after.

Rules
1. Real processes (torchrun's), a real Gloo group over loopback or emulated links, one thread per rank.
2. All sides live in the same processes in the same run and alternate, so a load on the machine hits each of them. A
   side with a launcher of its own runs in launches that alternate, and the report says so.
3. A round visits the sides in one order and then in the reverse (ABBA); odd rounds start from the other end (BAAB).
4. A step's time is the slowest rank's. A barrier goes before each timed step.
5. Sides are compared within a round. Reports show the median of those ratios and their quartiles.
6. Raw samples are kept, with what is needed to run them again.
7. A side that computes a wrong result is refused afterwards, whatever its times. A side whose package is missing is
   refused before anything starts.

PacelineError
└── BenchmarkError
    ├── RanksFailedError  (also RuntimeError) one of the processes raised or died
    └── WrongAnswerError  (also RuntimeError) a side computes a wrong result

A wrong option raises a ConfigurationError.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from paceline.errors import ConfigurationError, PacelineError

MEBIBYTE = 2**20
PEERS = ("accelerate", "deepspeed", "torchft", "mpi4py")  # only benchmarks need them


@dataclass(frozen=True)
class Turn:
    """One block of consecutive steps of one side."""

    round_index: int
    side_index: int


def turns(num_sides: int, num_rounds: int) -> Iterator[Turn]:
    """Yield ABBA, BAAB, ABBA, ...: every side twice a round, so that a linear drift cancels within the round."""
    for round_index in range(num_rounds):
        forward = list(range(num_sides))
        if round_index % 2:
            forward.reverse()
        for side_index in forward + forward[::-1]:
            yield Turn(round_index, side_index)


class Allocator(str, Enum):
    """Malloc's policy for the memory of a fresh tensor.

    glibc's malloc adapts. A freed 16 MB gradient goes back to the kernel or stays, depending on what lies above it on
    the heap. If it goes back, the next step page-faults it in again. On one rank that alone made two identical sides
    differ by 16 % (LOG.md), steadily within a process and differently in the next. So a comparison of times keeps
    freed memory in the process, as jemalloc or tcmalloc would.
    """

    KEEP = "keep"  # freed memory stays in the process: the same pages again in every step
    GLIBC = "glibc"  # as a user has it who sets nothing
    EXACT = "exact"  # every tensor of 64 KiB or more is mapped and unmapped: resident memory is live memory


ENVIRONMENTS: dict[Allocator, dict[str, str]] = {
    Allocator.KEEP: {
        "MALLOC_MMAP_THRESHOLD_": str(4096 * MEBIBYTE),
        "MALLOC_TRIM_THRESHOLD_": str(16384 * MEBIBYTE),
        "MALLOC_TOP_PAD_": str(256 * MEBIBYTE),
    },
    Allocator.GLIBC: {},
    Allocator.EXACT: {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
}


def require(package: str) -> None:
    """Refuse another library that is not installed; other names pass.

    Raises:
        ConfigurationError: Says what to install.
    """
    if package in PEERS and importlib.util.find_spec(package) is None:
        raise ConfigurationError(
            f"{package} is not installed; pip install -r lab/peers-requirements.txt (in the source "
            f"repository), or pip install {package}."
        )


class BenchmarkError(PacelineError):
    """Root of everything that ends a benchmark with one paragraph instead of a traceback."""


class RanksFailedError(BenchmarkError, RuntimeError):
    """A rank raised an exception or was killed; the others have been stopped."""


class WrongAnswerError(BenchmarkError, RuntimeError):
    """Ranks or sides ended with different numbers."""
