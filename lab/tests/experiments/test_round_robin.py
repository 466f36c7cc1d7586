"""Several groups in turn: the same results, each group gets its share, never more in flight than the bound."""

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from harness.linear_oracle import train_linear
from harness.ranks import pool
from paceline.errors import ConfigurationError
from paceline_lab.doubles.round_robin import RoundRobin


class Held(dist.ProcessGroup):
    """A group whose collectives end when the test says so."""

    def __init__(self, log, rank=0, size=1):
        super().__init__(rank, size)
        self._place = rank, size
        self.log = log

    def rank(self):
        return self._place[0]

    def size(self):
        return self._place[1]

    def barrier(self, opts=None):
        future = Future()
        self.log.append((self, future))
        return torch._C._distributed_c10d._create_work_from_future(future)


def test_groups_take_turns_and_the_bound_holds():
    """Nine collectives over three groups, two in flight: the end of n starts n + 2, on the next group."""
    log = []
    groups = [Held(log) for _ in range(3)]
    both = RoundRobin(groups, max_in_flight=2)
    works = [both.barrier() for _ in range(9)]
    for step in range(9):
        assert len(log) == min(step + 2, 9)
        assert not works[step].is_completed()
        log[step][1].set_result([])
        assert works[step].wait()
    assert [group for group, _ in log] == groups * 3


def test_an_error_goes_to_its_waiter_only():
    """The second of three fails; the others end."""
    log = []
    both = RoundRobin([Held(log)], max_in_flight=1)
    works = [both.barrier() for _ in range(3)]
    log[0][1].set_result([])
    log[1][1].set_exception(RuntimeError("on purpose"))
    log[2][1].set_result([])
    assert works[0].wait()
    assert works[2].wait()
    with pytest.raises(RuntimeError, match="on purpose"):
        works[1].wait()


@pytest.mark.parametrize(
    ("groups", "bound", "words"),
    [
        ([], None, "at least one"),
        ([Held([])], 0, "max_in_flight is 0"),
        ([Held([]), Held([], 1, 2)], None, "same ranks"),
    ],
)
def test_refusals(groups, bound, words):
    with pytest.raises(ConfigurationError, match=words):
        RoundRobin(groups, bound)


def train_in_turn(rank, num_ranks, seed, backend, bound):
    both = RoundRobin([dist.new_group(backend=backend) for _ in range(3)], bound)
    return train_linear(rank, num_ranks, seed, (40, 30), 4, process_group=both, bucket_cap_mb=0.001)


@pytest.mark.processes
@pytest.mark.parametrize("bound", [None, 1, 2])
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_data_parallel_over_a_round_robin(backend, bound):
    """Three groups in turn, bounded or not: one process's gradients, the same bits on all ranks."""
    results = pool(2).run(train_in_turn, 1, backend, bound)
    assert max(error for error, _ in results) < 1e-12
    assert len({bits for _, bits in results}) == 1
