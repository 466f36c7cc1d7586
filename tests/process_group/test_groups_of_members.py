"""Groups that their members alone make (`use_local_synchronization`), and groups that are made again by one name."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import paceline  # noqa: F401  registers the backend
from harness.ranks import BACKEND, Ranks, pool
from paceline.process_group.registration import _make

pytestmark = pytest.mark.processes

TIMEOUT = timedelta(seconds=20)
MEMBERS = [[0, 2], [1, 2], [0, 1, 2]]


def sums(rank, backend, lists_of_members, keeps):
    """Over each of these groups, made by its members alone; None where the rank is in none."""
    found, kept = [], []
    for members in lists_of_members:
        total = torch.ones(1)
        if rank in members:
            group = dist.new_group(members, TIMEOUT, backend, use_local_synchronization=True)
            dist.all_reduce(total, group=group)
            kept.append(group)
        found.append(total.item() if rank in members else None)
        if kept and not keeps:
            dist.destroy_process_group(kept.pop())
    for group in kept:
        dist.destroy_process_group(group)
    return found


def of_members(rank, _num_ranks):
    """Of both backends; then what torch's names do not allow for Gloo: groups that were closed, and unequally many."""
    found = [sums(rank, backend, MEMBERS, keeps=False) for backend in ("paceline", "gloo")]
    return [
        *found,
        sums(rank, "paceline", 2 * MEMBERS, keeps=False),
        sums(rank, "paceline", MEMBERS, keeps=True),
    ]


@pytest.mark.parametrize("default", ["gloo", "paceline"])
def test_members_alone_make_a_group(default):
    """The others go on; next to a default group of either backend."""
    with Ranks(3, env={BACKEND: default}) as ranks:
        for rank, answer in enumerate(ranks.run(of_members)):
            right = [float(len(members)) if rank in members else None for members in MEMBERS]
            assert answer == [right, right, 2 * right, right]


def made_again(rank, num_ranks):
    """A group of the same name and store three times, as after destroy_process_group and init_process_group."""
    found = []
    for _ in range(3):
        what = SimpleNamespace(
            store=dist.PrefixStore("made again", dist.distributed_c10d._get_default_store()),
            group_rank=rank,
            group_size=num_ranks,
            timeout=TIMEOUT,
            group_id="0",
            global_ranks_in_group=list(range(num_ranks)),
        )
        group, total = _make(what, None), torch.ones(1)
        group.allreduce([total]).wait()
        group.shutdown()
        found.append(total.item())
    return found


def test_a_name_may_be_used_again():
    assert pool(2).run(made_again) == [[2.0] * 3] * 2
