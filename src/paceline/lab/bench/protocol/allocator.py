"""Which memory does a fresh tensor get?

glibc's malloc adapts: whether a freed 16 MB gradient goes back to the kernel, to be page-faulted in again
in the next step, depends on what lies above it on the heap. On a world of one rank that alone made two
identical sides differ by 16 % (LOG.md), steadily within a process and differently in the next. So a
comparison of times keeps freed memory in the process, as jemalloc or tcmalloc would.
"""

from enum import Enum

MEBIBYTE = 2**20


class Allocator(str, Enum):
    """A policy of malloc."""

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
