"""Messages through Gloo between real processes: against Gloo's own collectives, and what a lost peer looks like."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from harness.ranks import Ranks, pool
from paceline.errors import CollectiveMismatchError, PeerLostError, ProtocolError
from paceline.process_group.executor import Executor
from paceline.schedules import SCHEDULES, Link, Links, Topology, price
from paceline.schedules.flat import ring
from paceline.transports.transport import C10dTransport

pytestmark = pytest.mark.processes

SUM = dist.ReduceOp.SUM
TOPOLOGY = Topology((0, 0, 1, 1))
SIZES = [0, 3, 300_001]


@contextmanager
def executor(piece_bytes=1 << 16):
    """An executor over a Gloo group of its own, so that a test may break it."""
    group = dist.new_group(backend="gloo")
    try:
        yield Executor(C10dTransport(group._get_backend(torch.device("cpu"))), piece_bytes=piece_bytes)
    finally:
        dist.destroy_process_group(group)


def compare_all(rank, num_ranks):
    with executor() as ours:
        before = ours.transport.bytes_sent
        expected_bytes = 0
        for name, algorithm in SCHEDULES.items():
            schedule = algorithm.build(TOPOLOGY)
            for num_elements in SIZES:
                generator = torch.Generator().manual_seed(num_elements + rank)
                mine = torch.randint(-1000, 1000, (num_elements,), generator=generator, dtype=torch.float32)
                gloos = mine.clone()
                ours.run(schedule, mine, SUM, 20.0)
                dist.all_reduce(gloos)
                assert torch.equal(mine, gloos), (name, num_elements)
                priced = price(
                    schedule,
                    mine.nbytes,
                    TOPOLOGY,
                    Links(Link(0, 1), Link(0, 1)),
                    element_bytes=mine.itemsize,
                )
                expected_bytes += priced.bytes_sent[rank] + priced.header_bytes[rank]
        assert ours.transport.bytes_sent - before == expected_bytes


def test_every_all_reduce_is_gloos_and_sends_what_it_is_priced_at():
    """Integers in float32: exact in any order, so equality is bitwise."""
    pool(4).run(compare_all)


def disagree(rank, num_ranks, sizes):
    with executor() as ours:
        try:
            ours.run(ring.all_reduce(num_ranks), torch.zeros(sizes[rank]), SUM, 20.0)
        except CollectiveMismatchError as error:
            first = str(error)
        try:
            ours.run(ring.all_reduce(num_ranks), torch.zeros(4), SUM, 20.0)
        except ProtocolError as error:
            return first, str(error)
        return None


@pytest.mark.parametrize("sizes", [(8, 9), (9, 8), (0, 4), (1 << 20, 1)])
def test_ranks_with_other_sizes_are_told_on_both_sides_and_no_process_is_aborted(sizes):
    for rank, (first, second) in enumerate(pool(2).run(disagree, sizes)):
        assert f"rank {rank} is in all_reduce number 0 (SUM of {sizes[rank]:,} float32" in first
        assert f"rank {1 - rank} is in all_reduce number 0 (SUM of {sizes[1 - rank]:,} float32" in first
        assert "make a new one" in second


def lose_rank_one(rank, num_ranks, name, how, timeout_s):
    with executor() as ours:
        schedule = SCHEDULES[name].build(TOPOLOGY)
        ours.run(schedule, torch.ones(1000), SUM, 20.0)
        store = dist.PrefixStore("after the first", dist.distributed_c10d._get_default_store())
        store.set(str(rank), "")
        store.wait([str(other) for other in range(num_ranks)])  # a barrier would break with the rank
        if rank == 1:
            os.kill(os.getpid(), how)
        try:
            ours.run(schedule, torch.ones(1000), SUM, timeout_s)
        except PeerLostError as error:
            return str(error), error.peer
        return None


@pytest.mark.parametrize(
    ("name", "how", "timeout_s"), [("direct", signal.SIGKILL, 30.0), ("ring", signal.SIGSTOP, 3.0)]
)
def test_a_rank_that_dies_or_stops_ends_the_collective_everywhere(name, how, timeout_s):
    """A killed rank long before the timeout; and at least one rank knows which one it was."""
    with Ranks(4) as ranks:
        outcomes = ranks.outcomes(lose_rank_one, name, how, timeout_s)
    told = [outcome.value for outcome in outcomes if outcome.rank != 1]
    assert all(message.startswith("all_reduce number 1 (SUM of 1,000 float32") for message, _ in told)
    assert any(peer == 1 and "rank 1" in message for message, peer in told)


class Failing:
    """A c10d backend whose messages time out at once, as on a connection that has failed before."""

    def rank(self):
        return 0

    def size(self):
        return 2

    def send(self, *_):
        return self

    recv = send

    def wait(self, *_):
        raise RuntimeError("Timed out waiting 60000ms for recv operation to complete.")


def test_an_error_says_how_long_was_waited_and_not_how_long_might_have_been():
    with pytest.raises(PeerLostError, match=r"from rank 1 for 0(\.\d+)? s \(of 60: "):
        C10dTransport(Failing()).exchange([], [(1, torch.zeros(3))], 60.0)
