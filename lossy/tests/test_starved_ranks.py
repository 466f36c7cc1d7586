"""A rank that gets a fiftieth of a core: the others' waits end by the process group's timeout all the same."""

import contextlib
import os
import signal
import time
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.ranks import Ranks
from paceline import DistributedDataParallel
from paceline.errors import PeerLostError
from paceline_lossy import BoundedLoss

TIMEOUT_S = 3.0
SLACK_S = 12.0  # to find out and say who is late, on a machine with other work; it was over a minute once
_PERIOD_US, _QUOTA_US = 100_000, 2_000


@contextlib.contextmanager
def slow_group():
    """A cgroup whose processes have a fiftieth of a core together; yields the file that takes their numbers."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    folder = (first if first.is_dir() else second) / f"paceline-test-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        if first.is_dir():
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(_QUOTA_US))
        else:
            (folder / "cpu.max").write_text(f"{_QUOTA_US} {_PERIOD_US}")
    except OSError as error:
        pytest.skip(f"no cgroup with a quota can be made here: {error}")
    try:
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()  # its processes have ended


def _train(rank, _num_ranks, compression, starving):
    """Two steps as usual, then rank 1 starves; how long each of rank 0's backwards took, and how the last ended."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    network = nn.Sequential(nn.Linear(512, 8192), nn.ReLU(), nn.Linear(8192, 512))  # 32 MB of gradients
    options = {"compression": compression} if isinstance(compression, str) else {"reduction": compression}
    model = DistributedDataParallel(network, process_group=group, **options)
    x = torch.randn(16, 512)
    took_s, end = [], "trained"
    for step in range(6):
        if step == 2 and rank == 1:
            Path(starving).write_text(str(os.getpid()))
        loss = model(x).square().mean()
        began_s = time.monotonic()
        try:
            loss.backward()
        except PeerLostError as error:
            end = str(error)
        took_s.append(time.monotonic() - began_s)
        if end != "trained":
            break
    if rank == 0:
        for pid in Path(starving).read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    return took_s, end


@pytest.mark.processes
@pytest.mark.slow(apart=True)
@pytest.mark.parametrize(
    "compression",
    [
        pytest.param(BoundedLoss(0.05), id="bounded loss"),
        pytest.param("int8", id="int8", marks=pytest.mark.lab),
        pytest.param(None, id="plain", marks=pytest.mark.lab),
    ],
)
def test_a_wait_for_a_starved_rank_ends_by_the_timeout(compression):
    with slow_group() as starving, Ranks(2) as ranks:
        waiting, _ = ranks.outcomes(_train, compression, str(starving), deadline_s=2 * (TIMEOUT_S + SLACK_S))
    took_s, end = waiting.value
    assert max(took_s) < TIMEOUT_S + SLACK_S
    assert end == "trained" or "rank 1" in end
    assert "has died" not in end
