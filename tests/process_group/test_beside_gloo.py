"""A script that says `gloo` on one host: gradients go through shared memory by themselves, with the same numbers."""

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.models import Mlp, digest, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.comm.gradient_group import group_beside
from paceline.transports.shared_memory.neighbours import SWITCH

pytestmark = pytest.mark.processes


def trained(rank, num_ranks, says):
    """The gradients' digest after two steps, and whether Gloo reduced them."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": says or str(num_ranks)}):
        group = dist.new_group(timeout=timedelta(seconds=20))
        torch.manual_seed(0)
        model = DistributedDataParallel(Mlp(), process_group=group)
        again = DistributedDataParallel(Mlp(), process_group=group)
    assert model.process_group is group
    assert model.reducer.process_groups[0] is again.reducer.process_groups[0]
    for step in range(2):
        model.zero_grad()
        x = torch.randn(4, 8, generator=generator(rank, step))
        squares(model(x)).backward()
    return digest(p.grad for p in model.parameters()), model.reducer.process_groups[0] is group


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_same_numbers_as_over_gloo(num_ranks):
    """With torchrun's word that all ranks are here, and without; two ranks agree bitwise, however they are reduced."""
    beside = pool(num_ranks).run(trained, None)
    gloo = pool(num_ranks).run(trained, "1")
    assert [is_gloo for _, is_gloo in beside] == [False] * num_ranks
    assert [is_gloo for _, is_gloo in gloo] == [True] * num_ranks
    assert len({words for words, _ in beside}) == 1
    if num_ranks == 2:
        assert beside[0][0] == gloo[0][0]


def not_beside(_rank, num_ranks):
    with mock.patch.dict(os.environ, {SWITCH: "0"}):
        switched_off = dist.new_group(timeout=timedelta(seconds=20))
        assert group_beside(switched_off) is switched_off
    for ranks in ([0], [1]):
        alone = dist.new_group(ranks)
        if alone is not dist.GroupMember.NON_GROUP_MEMBER:
            assert group_beside(alone) is alone
    ours = dist.new_group(backend="paceline")
    assert group_beside(ours) is ours


def test_where_nothing_is_gained():
    """Switched off, over a part of the job's ranks, on another backend: the group itself."""
    pool(2).run(not_beside)
