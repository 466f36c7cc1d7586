"""Processes that are forked from a rank end like any others, and the rank and its peers go on as if nothing had been.

They have the rank's objects, memory and sockets, but none of its threads.
"""

import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import signal
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from harness.models import Mlp, digest, generator, squares
from harness.ranks import Ranks
from harness.running_servers import in_threads
from paceline import DistributedDataParallel
from paceline.optim import overlap
from paceline.process_group.connections import make_gloo
from paceline_lossy import BoundedLoss
from paceline_servers import ParameterServers

pytestmark = pytest.mark.processes

numbers = itertools.count()
PATIENCE_S = 30  # of a process that should end at once, on a busy machine
WAYS = {
    "gloo": {},
    "backend": {},
    "int8": {"compression": "int8"},
    "adasum": {"reduction": "adasum"},
    "bounded loss": {"reduction": lambda _: BoundedLoss(0.0)},
    "servers": {"reduction": ParameterServers},
    "forward overlap": {"overlap_forward": "always"},
}


def opened(rank):
    """A connected group of Gloo's that nobody else refers to: it is destroyed with the training."""
    store = dist.PrefixStore(f"apart/{next(numbers)}", dist.distributed_c10d._get_default_store())
    apart = make_gloo(store, rank, 2, timedelta(seconds=PATIENCE_S), "127.0.0.1")
    apart.barrier(dist.BarrierOptions()).wait()
    return apart


class Training:
    """One way to train, on one rank, with work of the last step still under way where that is possible."""

    def __init__(self, rank, way, addresses, group=None):
        torch.manual_seed(0)
        options = {name: value(addresses) if callable(value) else value for name, value in WAYS[way].items()}
        self.rank = rank
        self.apart = opened(rank)
        self.model = DistributedDataParallel(Mlp(), bucket_cap_mb=0.0005, process_group=group, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if "overlap_forward" in options:
            self.optimizer = overlap(self.optimizer, self.model)

    def train(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            squares(self.model(torch.randn(4, 8, generator=generator(step, self.rank)))).backward()
            self.optimizer.step()

    def digest(self):
        return digest(self.model.state_dict().values())


def forked(training):
    """A process is forked, reads the model, drops it and ends as interpreters do: its exit code, and what it read."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(PATIENCE_S)
        torch.set_num_threads(1)  # or torch's own threads may crash it (`paceline.comm.forked`)
        with contextlib.suppress(BaseException):
            os.write(writes, training.digest().encode())
            training.__dict__.clear()
            gc.collect()
        ctypes.pythonapi.Py_Exit(7)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        read = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), read


def has_left(training):
    """Whether the others have been told that this rank has left."""
    detection = training.model._paceline_coordinator.membership.peers._failure_detection
    groups = [group for group in dist.distributed_c10d._world.pg_map if hasattr(group, "host")]
    in_memory = any(group.host.me.status.has_left for group in groups)
    return in_memory or detection._store.get(f"left/{training.rank}") is not None


def train_and_fork(rank, num_ranks, way, addresses):
    """How the forked process ended, whether it read what the rank did, and told others; and how the training ended."""
    warnings.simplefilter("ignore")
    group = dist.new_group(backend="paceline") if way == "backend" else None
    training = Training(rank, way, addresses, group)
    training.train(range(5))
    if way == "forward overlap":
        assert training.model.forward_overlap.has_outstanding
    code, read = forked(training)
    found = (code, read == training.digest(), has_left(training))
    batches = DataLoader(torch.arange(5, 9), num_workers=2, multiprocessing_context="fork")
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # it may have children
        training.train(map(int, batches))
    undisturbed = Training(rank, way, addresses, group)
    undisturbed.train(range(9))
    return found, training.digest() == undisturbed.digest(), training.digest()


@pytest.fixture(scope="module")
def ranks():
    """Not those that all tests share: what is forked of a rank that has profiled may crash (`paceline.comm.forked`)."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.lab] * (way == "bounded loss")) for way in WAYS]
)
def test_what_is_forked_ends_and_its_rank_goes_on(ranks, way):
    """Whatever ended threads, told the others or destroyed groups: not in a forked process."""
    with in_threads(1) if way == "servers" else contextlib.nullcontext([]) as addresses:
        both = ranks.run(train_and_fork, way, addresses, deadline_s=3.0 * PATIENCE_S)
    assert [found for found, *_ in both] == [(7, True, False)] * 2
    assert [is_undisturbed for _, is_undisturbed, _ in both] == [True] * 2
    assert both[0][2] == both[1][2]
