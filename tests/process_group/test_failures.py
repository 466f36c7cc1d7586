"""A rank that dies, stops, leaves or does something else: the others raise in time, and say who and what."""

import ctypes
import gc
import itertools
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import paceline  # noqa: F401  registers the backend
from harness.ranks import Ranks, pool
from paceline.process_group.staging import Staging

pytestmark = pytest.mark.processes

STOPPED_TIMEOUT_S = 6.0  # that passes where a rank is stopped
TIMEOUT_S = 600.0  # of the others: whoever waits for it misses its pool's deadline


def group(timeout_s=TIMEOUT_S):
    return dist.new_group(backend="paceline", timeout=timedelta(seconds=timeout_s))


def lose(rank, _num_ranks, how, victim, num_elements, asynchronous):
    ours = group(STOPPED_TIMEOUT_S if how == signal.SIGSTOP else TIMEOUT_S)
    tensor = torch.ones(num_elements)
    dist.all_reduce(tensor, group=ours)
    if rank == victim:
        if how == "exit":
            os._exit(3)
        if how != "killed between pieces":
            os.kill(os.getpid(), how)
        Staging.wait = die_at_third(Staging.wait)
    try:
        for _ in range(5):
            work = dist.all_reduce(tensor, group=ours, async_op=asynchronous)
            if asynchronous:
                work.wait()
    except TimeoutError as error:
        return type(error).__name__, str(error)
    return None


def die_at_third(wait):
    count = itertools.count(1)

    def wait_or_die(self, what):
        if next(count) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        wait(self, what)

    return wait_or_die


@pytest.mark.parametrize(
    ("how", "word", "num_elements", "asynchronous"),
    [
        ("killed between pieces", "died", 3_000_000, False),
        (signal.SIGKILL, "died", 3_000_000, True),
        ("exit", "died", 10, False),
        (signal.SIGSTOP, "is stopped", 3_000_000, False),
    ],
)
def test_a_lost_rank_is_named(how, word, num_elements, asynchronous):
    """Killed, ended or stopped, between collectives or in one: the others name it, their collective and its size."""
    with Ranks(3) as ranks:
        outcomes = ranks.outcomes(lose, how, 1, num_elements, asynchronous)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.clean, outcome.story()
        kind, message = outcome.value
        assert kind == "PeerLostError"
        assert "rank 1" in message
        assert word in message
        assert f"of {num_elements} elements of float32" in message
        assert "all-reduce number" in message


def disagree(rank, _num_ranks, case):
    ours = group()
    try:
        if case == "size":
            dist.all_reduce(torch.ones(10 + rank), group=ours)
        elif case == "dtype":
            dist.all_reduce(torch.ones(10, dtype=torch.int32 if rank else torch.float32), group=ours)
        elif case == "operation":
            dist.all_reduce(torch.ones(10), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=ours)
        elif rank:
            dist.barrier(group=ours)
        else:
            dist.broadcast(torch.ones(100_000), 0, group=ours)
        message = ""
    except RuntimeError as error:
        message = str(error)
    try:
        dist.barrier(group=ours)
        again = None
    except RuntimeError as error:
        again = str(error)
    fresh = group()
    tensor = torch.ones(5)
    dist.all_reduce(tensor, group=fresh)
    return message, again, tensor.tolist()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("size", ["of 10 elements", "of 11 elements"]),
        ("dtype", ["of float32", "of int32"]),
        ("operation", ["SUM", "MAX"]),
        ("order", ["barrier", "broadcast"]),
    ],
)
def test_disagreement_is_named(case, words):
    """Different sizes, dtypes, operations or order: an error on both, not an abort; then a new group works."""
    for rank, (message, again, values) in enumerate(pool(2).run(disagree, case)):
        assert f"rank {rank} launched" in message
        assert f"while rank {1 - rank} launched" in message
        assert all(word in message for word in words)
        assert "can no longer be used" in again
        assert values == [2.0] * 5


def unequal_rows(rank, _num_ranks):
    """Rank 0 has 3 numbers for rank 1, which expects 2."""
    ours = group()
    sizes = ([1, 5], [1, 3]) if rank == 0 else ([2, 1], [5, 1])
    with pytest.raises(RuntimeError) as caught:
        dist.all_to_all_single(torch.zeros(sum(sizes[0])), torch.zeros(sum(sizes[1])), *sizes, group=ours)
        dist.barrier(group=ours)
    return type(caught.value).__name__, str(caught.value)


def test_unequal_rows_are_named():
    """The rank that finds them says which; the other is told with the next collective."""
    told, found = pool(2).run(unequal_rows)
    assert found[0] == "CollectiveMismatchError"
    assert "expects 8 bytes of rank 0, which has 12 for it" in found[1]
    assert told[0] == "PeerLostError"
    assert "rank 1" in told[1]


def split_badly(rank, _num_ranks):
    ours = group()
    for sizes, tensors in (
        ([1, 1, 1], (torch.zeros(3), torch.zeros(3))),
        ([], (torch.zeros(3), torch.zeros(4))),
    ):
        with pytest.raises(ValueError, match="cannot be split"):
            dist.all_to_all_single(*tensors, sizes or None, sizes or None, group=ours)
    with pytest.raises(ValueError, match="of one dtype"):
        ours.all_to_all_single(torch.zeros(2), torch.zeros(2, dtype=torch.int32), [], [])
    dist.barrier(group=ours)


def test_what_cannot_be_split_is_refused_before_anything_starts():
    """And the group goes on working."""
    pool(2).run(split_badly)


def raise_inside(rank, _num_ranks):
    """Rank 1 fails by itself before it comes; rank 0 is told long before the time limit."""
    ours = group()
    if rank == 1:
        ours.abort()
        return
    with pytest.raises(TimeoutError, match="rank 1"):
        ours.monitored_barrier()


def abort_what_waits(rank, _num_ranks):
    """Rank 0's collective waits for rank 1, which does not come; rank 0 aborts it."""
    ours = group()
    if rank == 1:
        dist.barrier()  # of the pool's own group: until rank 0 has given up
        dist.destroy_process_group(ours)
        return
    work = dist.all_reduce(torch.ones(4), group=ours, async_op=True)
    while not ours.host.me.status.has_arrived(1):  # its thread now waits for rank 1
        time.sleep(0.001)
    ours.abort()
    with pytest.raises(TimeoutError, match="told to give up"):
        work.wait()
    dist.barrier()
    dist.destroy_process_group(ours)


def test_abort_ends_ones_own_wait():
    """A collective that waits for a rank ends when its own rank aborts, and the group can be destroyed."""
    pool(2).run(abort_what_waits)


def test_abort_is_told():
    """`abort` on one rank ends the others' waiting."""
    pool(2).run(raise_inside)


def use(rank):
    ours = group(20.0)
    resident = ours.allocate_tensor(50_000, dtype=torch.float32, device=torch.device("cpu"))
    works = [dist.all_reduce(resident, group=ours, async_op=True) for _ in range(3)]
    dist.all_reduce(torch.ones(2_000_000), group=ours)
    for work in works:
        work.wait()
    dist.destroy_process_group(ours)


def footprint():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what has been freed is not held against anyone
    # Not that of `status`, which is a sum of counters per core: on 16 cores it is wrong by up to 2 MiB.
    resident_kib = int(Path("/proc/self/smaps_rollup").read_text().split("Rss:")[1].split()[0])
    maps = Path("/proc/self/maps").read_text()
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
        maps.count("memfd:paceline"),
        resident_kib,
    )


def many_groups(rank, _num_ranks, count):
    for _ in range(10):
        use(rank)
    before = footprint()
    for _ in range(count):
        use(rank)
    return before, footprint()


def test_forty_groups_leave_nothing():
    """No more descriptors, threads or mappings, and no more memory than 40 KiB a group."""
    for (fds, threads, maps, resident_kib), after in pool(2).run(many_groups, 40, deadline_s=100):
        assert after[0] <= fds
        assert after[1] <= threads
        assert after[2] <= maps
        assert after[3] <= resident_kib + 1_600


def hold(rank, _num_ranks, folder):
    ours = group()
    resident = ours.allocate_tensor(1_000_000, dtype=torch.float32, device=torch.device("cpu"))
    dist.all_reduce(resident, group=ours)
    (Path(folder) / f"maps{rank}").write_text(Path("/proc/self/maps").read_text())
    dist.all_reduce(resident, group=ours)  # the other has done so, too
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_when_every_rank_is_killed(tmp_path):
    """Shared memory has no name, so it goes with its last user."""
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(hold, str(tmp_path))
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2
    for rank in range(2):
        rows = [line.split(maxsplit=5) for line in (tmp_path / f"maps{rank}").read_text().splitlines()]
        shared = {row[5] for row in rows if len(row) == 6 and row[1] == "rw-s"}
        assert any(name.startswith("/memfd:paceline") for name in shared)
        assert not [name for name in shared if Path(name).exists()]
