"""Makes groups of the backend `paceline` whose ranks, all on this machine, believe to be on several hosts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import torch.distributed as dist

from paceline.transports.shared_memory.neighbours import SWITCH

LINKS = "within=2e-5/4e9 between=1e-4/1e9"


@contextlib.contextmanager
def group_on(
    hosts: str, rank: int, only: str | None = None, timeout_s: float = 20
) -> Iterator[dist.ProcessGroup]:
    """Open a group whose rank r believes to be on host hosts[r]; the links are given, not measured.

    Args:
        hosts: The host of each rank, a letter.
        rank: This one.
        only: The only schedule of all-reduces.
        timeout_s: The group's.
    """
    words = {
        SWITCH: f"host {hosts[rank]}",
        "PACELINE_LINKS": LINKS,
        **({"PACELINE_ALLREDUCE": only} if only else {}),
    }
    with mock.patch.dict(os.environ, words):
        ours = dist.new_group(backend="paceline", timeout=timedelta(seconds=timeout_s))
        assert isinstance(ours, dist.ProcessGroup)
        yield ours
        dist.destroy_process_group(ours)
