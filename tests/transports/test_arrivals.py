"""Who arrives at a barrier wakes whoever sleeps until then, at whatever moment it has lain down, and nobody else."""

from unittest import mock

import pytest

from paceline.transports.shared_memory import Arena, Status, futex
from paceline.transports.shared_memory.arena import SIZE_BYTES


@pytest.fixture
def wake():
    with mock.patch.object(futex, "wake") as wake:
        yield wake


@pytest.fixture
def status():
    return Status(Arena(None, 2 * SIZE_BYTES, SIZE_BYTES))


def sleep_until(status, barrier):
    """Say so and look for the last time, but return instead of sleeping."""
    with mock.patch.multiple(futex, wait_while=mock.DEFAULT, full_fence=mock.DEFAULT):
        status.wait_for(barrier, 1.0)


def test_nobody_is_woken_where_nobody_sleeps(status, wake):
    for barrier in (1, 2):
        status.arrive(barrier)
        assert status.wait_for(barrier, 0.0), "who comes later does not sleep"
    wake.assert_not_called()


def test_a_sleeper_is_woken_once(status, wake):
    sleep_until(status, 1)
    for barrier in (1, 2):
        status.arrive(barrier)
    wake.assert_called_once()


def test_who_lies_down_while_its_peer_arrives_is_woken(status, wake):
    """After the word was reset, and before the arrival can be seen."""
    with mock.patch.object(futex, "fence", side_effect=lambda: sleep_until(status, 1)):
        status.arrive(1)
    wake.assert_called_once()


def test_who_waits_for_the_next_barrier_keeps_its_word(status, wake):
    """It saw this arrival and sleeps until the next before its owner has ended this one."""
    wake.side_effect = lambda _: sleep_until(status, 2)
    sleep_until(status, 1)
    status.arrive(1)
    wake.side_effect = None
    wake.reset_mock()
    status.arrive(2)
    wake.assert_called_once()
