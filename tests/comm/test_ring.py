"""A reduce-scatter and an all-gather on a ring: sums, lengths, peers, and the end of its thread."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.ranks import pool
from paceline.comm import ring

pytestmark = pytest.mark.processes
LENGTHS = ([5, 700, 1300, 99, 2500], [0, 1, 3000, 0, 64], [0, 0, 0, 0, 0], [1000, 1000, 1000, 1000, 1000])


def rows_of(rank, case, num_ranks, dtype):
    source = torch.Generator().manual_seed(100 * case + rank)
    return [torch.randn(length, generator=source).to(dtype) for length in LENGTHS[case][:num_ranks]]


def on_ring(rank, num_ranks, dtype):
    """Launch all cases before the first is waited for. Return what differs, and the peers of this rank's messages."""
    group, wrong, peers, launched = dist.new_group(backend="gloo"), [], set(), []
    send, receive = ring.isend, ring.irecv

    def sent(chunk, gloo, peer, tag):
        peers.add(("to", peer))
        return send(chunk, gloo, peer, tag)

    def received(chunk, gloo, peer, tag):
        peers.add(("of", peer))
        return receive(chunk, gloo, peer, tag)

    with mock.patch.multiple(ring, isend=sent, irecv=received, _CHUNK_ELEMENTS=300):
        for case in range(len(LENGTHS)):
            rows = rows_of(rank, case, num_ranks, dtype)
            work = ring.reduce_scatter_on_ring([row.split(170) if len(row) else [] for row in rows], group)
            places = [torch.full((401,), float(rank == each) * (rank + case)) for each in range(num_ranks)]
            gathering = ring.all_gather_on_ring(places, places[rank], group)
            launched.append((work, rows, gathering, places))
        for case, (work, rows, gathering, places) in enumerate(launched):
            work.wait()
            gathering.wait()
            order = [*range(rank)[::-1], *range(rank, num_ranks)[::-1]]
            terms = [rows_of(each, case, num_ranks, dtype)[rank] for each in order]
            if not torch.equal(rows[rank], functools.reduce(torch.add, terms)):
                wrong.append((case, "sum"))
            if any(int(at[0]) != at.mean() or at[0] != each + case for each, at in enumerate(places)):
                wrong.append((case, "gathered"))
    return wrong, peers


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.float32), (3, torch.float64), (5, torch.float32)])
def test_each_rank_talks_to_its_neighbours_alone(num_ranks, dtype):
    """Sums have the order of the ring; rows may be empty, or of another length for each rank."""
    for rank, (wrong, peers) in enumerate(pool(num_ranks).run(on_ring, dtype)):
        assert wrong == []
        assert peers == {("to", (rank - 1) % num_ranks), ("of", (rank + 1) % num_ranks)}


def thread_of_a_group_that_ended(rank, num_ranks):
    """Return whether the ring's lane was told to end with its group, and whether it has."""
    group = dist.new_group(backend="gloo")
    row = torch.ones(10)
    ring.reduce_scatter_on_ring([[row]] * num_ranks, group).wait()
    lane = ring._rings[group].lane
    dist.barrier(group)
    dist.destroy_process_group(group)
    del group
    return lane._closed, lane.close(60.0)


def test_the_thread_ends_with_the_group():
    assert pool(2).run(thread_of_a_group_that_ended) == [(True, True)] * 2
