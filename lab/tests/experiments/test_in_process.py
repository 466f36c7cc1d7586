"""Process groups of ranks that live in one process: one thread that plays them all, or a thread a rank."""

import threading

import pytest
import torch

from paceline.comm.collectives import all_gather, all_reduce, all_reduce_max, broadcast
from paceline.errors import CollectiveMismatchError, ProtocolError
from paceline_lab.doubles.in_process import InProcessWorld


def test_collectives_of_a_world():
    """Whoever comes last performs; sums are folded in rank order; nobody waits before."""
    groups = InProcessWorld(3).groups
    rows = [torch.tensor([rank + 1.0, -rank]) for rank in range(3)]
    pending = [all_reduce(tensor, group) for tensor, group in zip(rows[::-1], reversed(groups), strict=True)]
    assert all(each.wait(1.0) for each in pending)
    assert all(row.tolist() == [6.0, -3.0] for row in rows)
    peaks = [torch.tensor([float(rank)]) for rank in range(3)]
    for each in [all_reduce_max(tensor, group) for tensor, group in zip(peaks, groups, strict=True)]:
        each.wait()
    assert [peak.item() for peak in peaks] == [2.0] * 3
    told = [torch.tensor([float(rank)]) for rank in range(3)]
    for each in [broadcast(tensor, group, 1) for tensor, group in zip(told, groups, strict=True)]:
        each.wait()
    assert [tensor.item() for tensor in told] == [1.0] * 3
    got = [[torch.empty(1) for _ in range(3)] for _ in range(3)]
    works = [all_gather(got[rank], torch.tensor([float(rank)]), groups[rank]) for rank in range(3)]
    assert not any(not work.wait(1.0) for work in works)
    assert [[row.item() for row in mine] for mine in got] == [[0.0, 1.0, 2.0]] * 3


def test_an_error_in_a_collective_reaches_every_rank():
    """Two tensors of as many elements that cannot be added: nobody waits for ever."""
    groups = InProcessWorld(2).groups
    shapes = (2, 3), (3, 2)
    works = [all_reduce(torch.ones(shape), group) for shape, group in zip(shapes, groups, strict=True)]
    for work in works:
        with pytest.raises(RuntimeError, match="must match the size"):
            work.wait()


def test_a_collective_waits_for_everybody_and_refuses_another_one():
    first, second = InProcessWorld(2).groups
    assert all_reduce(torch.ones(2), first).wait(0.01) is False
    with pytest.raises(CollectiveMismatchError, match="rank 1 called all-gather of 2"):
        all_gather([torch.empty(2), torch.empty(2)], torch.ones(2), second)


def test_ranks_as_threads_return_what_each_found():
    """Here each waits for the others."""

    def task(group):
        mine = torch.tensor([group.rank() + 1.0])
        all_reduce(mine, group).wait()
        return group.rank(), mine.item()

    assert InProcessWorld(3).run(task) == [(rank, 6.0) for rank in range(3)]


def test_an_error_of_one_thread_ends_the_others():
    """What it raised is raised; those that wait for it are told, and so is one that launches later."""
    told = []
    may_launch = threading.Event()

    def task(group):
        if group.rank() == 1:
            raise ValueError("on purpose")
        if group.rank() == 2:
            may_launch.wait(10.0)
        try:
            all_reduce(torch.ones(1), group).wait()
        except ProtocolError as error:
            told.append(str(error))
            may_launch.set()
            raise

    with pytest.raises(ValueError, match="on purpose"):
        InProcessWorld(3).run(task)
    assert told == ["rank 1 of this process ended with ValueError: on purpose"] * 2
