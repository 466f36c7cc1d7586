"""The kernel's counts of a thread grow with what it does; files that are not there count nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from paceline.host import thread_times
from paceline.host.processes import threads_queued
from paceline.host.thread_times import CoreNeighbours, ThreadClock


def test_time_on_a_core_is_counted_and_time_asleep_is_not():
    clock = ThreadClock()
    before = clock.read()
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    assert clock.read().cpu_s - before.cpu_s >= 0.045  # the kernel's counter is brought along at a tick
    asleep = clock.read()
    time.sleep(0.05)
    assert clock.read().cpu_s - asleep.cpu_s < 0.04
    clock.close()


def test_files_are_closed():
    before = {x.name for x in Path("/proc/self/fd").iterdir()}
    clock = ThreadClock()
    clock.read()
    clock.close()
    clock.close()
    assert {x.name for x in Path("/proc/self/fd").iterdir()} <= before


def test_a_kernel_that_says_nothing_counts_nothing(monkeypatch):
    monkeypatch.setattr(thread_times, "_opened", lambda _: -1)
    times = ThreadClock().read()
    assert (times.cpu_s, times.queued_s, times.throttled_s) == (0, 0, 0)


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (b"usage_usec 5\nnr_throttled 2\nthrottled_usec 1500\n", 0.0015),
        (b"nr_periods 3\nnr_throttled 2\nthrottled_time 2500000\n", 0.0025),
        (b"nr_periods 3\n", 0.0),
        (b"", 0.0),
    ],
)
def test_a_quotas_file_in_both_versions(words, seconds):
    assert thread_times._throttled_s(words) == pytest.approx(seconds)


def test_this_process_is_not_its_own_neighbour():
    neighbours = CoreNeighbours()
    assert neighbours.look() == []
    assert os.getpid() not in [pid for pid, _, _ in neighbours.look()]


def test_threads_are_counted():
    num_threads, queued_s = threads_queued()
    assert num_threads == len(list(Path("/proc/self/task").iterdir()))
    assert queued_s >= 0
