"""The harness itself: it reports the outcome of every rank, never hangs, and leaves no process behind."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.ranks import OrphanError, Ranks, RanksFailedError, pool, run_job

pytestmark = pytest.mark.processes


def sum_of_ranks(rank, _num_ranks):
    tensor = torch.tensor(float(rank))
    dist.all_reduce(tensor)
    return tensor.item()


def fail_on(rank, _num_ranks, who):
    if rank == who:
        raise ValueError(f"no luck on {who}")
    return rank


def die_on(rank, _num_ranks, who):
    store = dist.distributed_c10d._get_default_store()
    if rank == who:
        store.wait(["connected"])  # before, a death would end the other's rendezvous
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("connected", "")
    return rank


def hang_on(rank, _num_ranks, who):
    while rank == who:
        time.sleep(60)
    return rank


def my_pid(_rank, _num_ranks):
    return os.getpid()


def leave_groups(_rank, _num_ranks):
    for _ in range(20):
        dist.new_group()
    return os.getpid()


def is_alive(pid):
    return Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_ranks_form_a_group_and_processes_are_reused():
    """A run's ranks talk to each other, and the next run meets the same processes."""
    ranks = pool(2)
    assert ranks.run(sum_of_ranks) == [1.0, 1.0]
    pids = ranks.run(my_pid)
    assert len(set(pids)) == 2
    assert ranks.run(my_pid) == pids == ranks.pids


def test_ranks_full_of_threads_are_replaced():
    """Groups that a test leaves open do not slow all tests after it."""
    with Ranks(2) as ranks:
        crowded = ranks.run(leave_groups)
        assert not any(map(is_alive, crowded))
        assert ranks.run(sum_of_ranks) == [1.0, 1.0]


def test_an_exception_is_told_and_the_next_run_is_clean():
    """One rank's exception comes back with its class and words; the others' values do too."""
    ranks = pool(2)
    good, bad = ranks.outcomes(fail_on, 1)
    assert good.value == 0
    assert good.clean
    assert bad.error.is_a("ValueError")
    assert bad.error.is_a("builtins.Exception")
    assert "no luck on 1" in bad.error.message
    with pytest.raises(RanksFailedError, match=r"rank 0 raised builtins\.ValueError: no luck on 0"):
        ranks.run(fail_on, 0)
    assert ranks.run(sum_of_ranks) == [1.0, 1.0]


def test_a_death_is_told_and_the_next_run_has_new_processes():
    """A killed rank shows as its signal; the pool starts again."""
    with Ranks(2) as ranks:
        survivor, dead = ranks.outcomes(die_on, 1)
        assert survivor.clean
        assert dead.exit_code == -signal.SIGKILL
        assert ranks.run(sum_of_ranks) == [1.0, 1.0]


def test_a_hang_ends_at_the_deadline_with_the_stack():
    """A rank that hangs is killed, and its log says where it hung."""
    with Ranks(2) as ranks:
        ranks.run(sum_of_ranks)
        pids = ranks.pids
        stuck, fine = ranks.outcomes(hang_on, 0, deadline_s=4.0)
        assert fine.clean
        assert stuck.missed_deadline
        assert "hang_on" in stuck.log
        assert not any(is_alive(pid) for pid in pids)


def test_close_leaves_nobody():
    """Check that after `close` every rank is dead, and the folder is gone."""
    ranks = Ranks(2, store="tcp")
    assert ranks.run(sum_of_ranks) == [1.0, 1.0]
    pids = ranks.pids
    ranks.close()
    assert not any(is_alive(pid) for pid in pids)
    assert not Path(ranks._folder).exists()


def test_a_command_that_leaves_a_process_is_caught():
    """`run_job` finds a child that outlived its command, ends it and says so."""
    leave = "import subprocess as s, sys; s.Popen(['sleep', '600'], stdout=s.DEVNULL, stderr=s.DEVNULL)"
    with pytest.raises(OrphanError):
        run_job([sys.executable, "-c", leave], grace_s=1.0)
    assert run_job([sys.executable, "-c", "print(6 * 7)"]).checked().stdout == "42\n"
