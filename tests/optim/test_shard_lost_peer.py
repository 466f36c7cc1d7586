"""A rank that dies in the middle of a ring: all others name it, and no thread of theirs goes on waiting."""

import os
import signal
from unittest import mock

import pytest
import torch
from torch import nn

from harness.models import generator
from harness.ranks import Ranks
from paceline import DistributedDataParallel
from paceline.comm import ring
from paceline.optim import shard

pytestmark = pytest.mark.processes

VICTIM = 1


def die_on_the_ring(rank, num_ranks, sums, overlap_forward):
    """After three good steps `VICTIM` dies on the ring. Return what a survivor said, and whether its threads end.

    Args:
        rank: This one.
        num_ranks: How many.
        sums: Whether it dies among the gradients, not among the parameters.
        overlap_forward: As of the wrapper.
    """
    receive = ring._Passing.receive

    def dies(passing, step):
        if passing._adds == sums and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        receive(passing, step)

    one_host_each = {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(num_ranks)}
    with mock.patch.dict(os.environ, one_host_each), mock.patch.object(ring, "_CHUNK_ELEMENTS", 500):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(60, 60) for _ in range(4)))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.01, overlap_forward=overlap_forward)
        optimizer = shard(torch.optim.AdamW(model.parameters()), model)

        def train(step):
            optimizer.zero_grad()
            model(torch.randn(4, 60, generator=generator(step, rank))).square().mean().backward()
            optimizer.step()

        for step in range(3):
            train(step)
        if overlap_forward:
            model.flush()
        if rank == VICTIM:
            ring._Passing.receive = dies
        try:
            for step in range(3, 5):
                train(step)
        except RuntimeError as error:
            said = f"{type(error).__name__} {error}"
        else:
            said = "no error"
        return said, [each.lane.close(20.0) for each in ring._rings.values()]


@pytest.mark.parametrize(
    ("sums", "overlap_forward"), [(True, False), (False, False), (False, "always")], ids=str
)
def test_a_rank_that_dies_on_the_ring_is_named(sums, overlap_forward):
    """Two ranks are its neighbours and the third is not. Each names it long before the timeout, and its threads end."""
    with Ranks(4, group_timeout_s=600.0) as ranks:
        outcomes = ranks.outcomes(die_on_the_ring, sums, overlap_forward, deadline_s=90.0)
    for outcome in outcomes:
        if outcome.rank == VICTIM:
            assert outcome.exit_code == -signal.SIGKILL, outcome.story()
            continue
        assert outcome.clean, outcome.story()
        said, have_ended = outcome.value
        assert said.startswith("PeerLostError"), said
        verdict = said.partition("The backend said")[0]
        named = {each for each in range(4) if each != outcome.rank and f"rank {each} " in verdict}
        assert named == {VICTIM}, said
        assert "has died" in verdict
        assert have_ended
        assert all(have_ended)


def left_alone(rank, num_ranks):
    """Rank 0 begins a sum in which rank 1 takes no part. Return whether its thread ends with the program."""
    group = torch.distributed.new_group(backend="gloo")
    row = torch.ones(1000)
    torch.distributed.barrier(group)
    if rank:
        return True
    work = ring.reduce_scatter_on_ring([[row]] * num_ranks, group)
    ring._rings[group].close(0.1)
    with pytest.raises(RuntimeError, match="closure"):
        work.wait()
    return ring._rings[group].lane.close(0.0)


def test_a_thread_that_waits_for_a_rank_ends_with_the_program():
    """Otherwise it would come back into an interpreter that is ending, and abort the process."""
    with Ranks(2, group_timeout_s=600.0) as ranks:
        assert ranks.run(left_alone, deadline_s=60.0) == [True, True]
