"""A group of the backend `paceline` is given other members, as c10d asks for from torch 2.14 on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from harness.ranks import pool
from paceline.errors import ConfigurationError, PacelineError, PeerLostError, ProtocolError
from paceline.process_group.backend import ProcessGroup
from paceline.process_group.reconfiguring import Handle, in_order

LIMIT = timedelta(seconds=30)


@dataclass
class Options:
    """As torch 2.14's `ReconfigureOptions`."""

    uuid: int
    handles: list[str] | set[str]
    timeout: timedelta | None = None


class Rank:
    """A group, and a way to exchange its handles with others."""

    def __init__(self, rank: int, size: int, name: str, *, waits: bool = True) -> None:
        self.number, self._count = rank, 0
        self._store = dist.PrefixStore(f"test/{name}", dist.distributed_c10d._get_default_store())
        self.group = ProcessGroup(dist.PrefixStore("group", self._store), rank, size, LIMIT, waits=waits)

    def handles(self, ranks: range) -> list[str]:
        """Of these ranks, which all call it."""
        self._count += 1
        self._store.set(f"{ranks}/{self._count}/{self.number}", self.group.get_reconfigure_handle())
        return [self._store.get(f"{ranks}/{self._count}/{i}").decode() for i in ranks]

    def change(self, uuid: int, handles: list[str] | set[str]) -> None:
        self.group.reconfigure(Options(uuid, handles)).wait()

    def sum(self) -> float:
        """Over the group, of ones; and whatever was asked for is done."""
        tensor = torch.ones(1000)
        self.group.allreduce([tensor]).wait()
        return float(tensor[7])


def on_ranks(rank: int, num_ranks: int) -> dict[str, object]:
    """Wait, begin, shrink, grow, turn round, fail, begin anew."""
    me, found = Rank(rank, num_ranks, "changes"), {}
    with pytest.raises(ProtocolError, match="no members before reconfigure"):
        me.sum()
    everybody, first = range(num_ranks), range(num_ranks - 1)
    handles = me.handles(everybody)
    me.change(1, handles)
    found["all"] = me.sum()
    assert me.group.get_reconfigure_handle() != handles[rank]
    handles = me.handles(everybody)
    if rank in first:
        me.change(2, handles[:-1])
        found["fewer"] = me.sum(), me.group.size()
    else:
        with pytest.raises(PacelineError):  # the others have left
            me.sum()
    me.change(3, set(me.handles(everybody)))
    found["more"] = me.sum(), me.group.rank()
    me.change(4, me.handles(everybody)[::-1])
    found["turned"] = me.sum(), me.group.rank()
    handles = me.handles(everybody)
    me.group.abort()
    with pytest.raises(ProtocolError, match="it was aborted"):
        me.sum()
    with pytest.raises(ConfigurationError, match="the uuid 4 was used before"):
        me.change(4, handles)
    me.change(5, handles)
    found["after abort"] = me.sum()
    me.group.shutdown()
    return found


@pytest.mark.processes
def test_a_group_is_given_other_members() -> None:
    """The same object waits, begins, shrinks, grows, turns its ranks round, and outlives an abort."""
    for rank, found in enumerate(pool(3).run(on_ranks)):
        expected = {"all": 3.0, "more": (3.0, rank), "turned": (3.0, 2 - rank), "after abort": 3.0}
        assert found == expected | ({"fewer": (2.0, 2)} if rank < 2 else {})


def merge_and_split(rank: int, num_ranks: int) -> tuple[float, float]:
    """Groups of one each become one of all, and each is alone again."""
    me = Rank(0, 1, f"alone {rank}", waits=False)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"merge/{rank}", me.group.get_reconfigure_handle())
    me.change(1, [store.get(f"merge/{i}").decode() for i in range(num_ranks)])
    together = me.sum()
    me.change(2 + rank, [me.group.get_reconfigure_handle()])
    return together, me.sum()


@pytest.mark.processes
def test_groups_merge_and_split() -> None:
    """Their stores are the job's; each change has its own place there."""
    assert pool(3).run(merge_and_split) == [(3.0, 1.0)] * 3


def late_and_without_the_middle(rank: int, num_ranks: int) -> list[float]:
    """One rank begins alone; all meet, and send round; the middle one is left out, comes back, and nobody changes."""
    me, everybody, middle = Rank(rank, num_ranks, "late"), range(num_ranks), num_ranks // 2
    handles = me.handles(everybody)
    if rank == 0:
        me.change(1, handles[:1])
    me.change(2, me.handles(everybody))
    found = [me.sum()]
    received = torch.zeros(4)
    sent = me.group.send([torch.full((4,), float(rank))], (rank + 1) % num_ranks, 0)
    me.group.recv([received], (rank - 1) % num_ranks, 0).wait()
    sent.wait()
    found.append(float(received[3]))
    handles = me.handles(everybody)
    if rank != middle:
        me.change(3, handles[:middle] + handles[middle + 1 :])
        given = torch.full((4,), float(rank + 7))
        me.group.broadcast([given], dist.BroadcastOptions()).wait()  # of rank 0
        found += [me.sum(), float(me.group.rank()), float(given[0])]
    for uuid in (4, 5):
        me.change(uuid, me.handles(everybody))
        found += [me.sum(), float(me.group.rank())]
    me.group.shutdown()
    return found


@pytest.mark.processes
def test_a_rank_comes_late_and_the_middle_one_is_left_out() -> None:
    """With two tests above and the reused number: what torch's own suite asks of a backend on the CPU."""
    found = pool(3).run(late_and_without_the_middle)
    end = [[3.0, float(rank)] * 2 for rank in range(3)]
    assert found[0] == [3.0, 2.0, 2.0, 0.0, 7.0, *end[0]]
    assert found[1] == [3.0, 0.0, *end[1]]
    assert found[2] == [3.0, 1.0, 2.0, 1.0, 7.0, *end[2]]


def split_at_once(rank: int, num_ranks: int) -> tuple[float, float]:
    """A group that has met nobody is two groups first, then one."""
    me = Rank(rank, num_ranks, "split")
    handles = me.handles(range(num_ranks))
    me.change(1 + min(rank, 1), handles[:1] if rank == 0 else handles[1:])
    apart = me.sum()
    me.change(3, me.handles(range(num_ranks)))
    return apart, me.sum()


@pytest.mark.processes
def test_a_group_that_has_met_nobody_splits() -> None:
    assert pool(3).run(split_at_once) == [(1.0, 3.0), (2.0, 3.0), (2.0, 3.0)]


def lose_one(rank: int, num_ranks: int) -> float:
    """The last rank leaves without a word; the others go on in the same object."""
    me = Rank(rank, num_ranks, "lost", waits=False)
    handles = me.handles(range(num_ranks))
    if rank == num_ranks - 1:
        me.group.abort()
        return 0.0
    with pytest.raises(PeerLostError):
        me.sum()
    me.change(1, handles[:-1])
    return me.sum()


@pytest.mark.processes
def test_survivors_go_on_in_the_same_group() -> None:
    """After an error the group is broken until it has other members."""
    assert pool(3).run(lose_one) == [2.0, 2.0, 0.0]


def test_handles_are_checked_before_anything_changes() -> None:
    """Words of somebody else, an older handle of this rank, the same rank twice, nobody."""
    own, other = Handle(1, "a", 2, "h:1"), Handle(0, "b", 5, "h:1")
    assert in_order([str(own), str(other)], own) == [own, other]
    assert in_order({str(own), str(other)}, own) == [other, own]
    for bad, words in (
        (["gloo:0:1:0:127.0.0.1:1"], "is no handle of the backend paceline"),
        ([], "is not among the 0 that were given"),
        ([str(other)], "Collect the handles"),
        ([str(Handle(1, "a", 1, "h:1")), str(other)], "is not among the 2"),
        ([str(own), str(own)], "are of the same rank"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            in_order(bad, own)
