"""Handles of collectives: a chain is done when its last stage is, and says so once, whoever asks when."""

import gc
import time
import weakref
from datetime import timedelta

import pytest

from paceline.comm.collectives import C10dWork, Chain
from paceline.comm.lane import LaneWork
from paceline.errors import PeerLostError, ProtocolError


class Stage:
    """A handle that a test completes."""

    def __init__(self):
        self.is_done, self.callbacks = False, []

    def complete(self):
        self.is_done = True
        for callback in self.callbacks:
            callback()

    def wait(self, timeout_s=None):
        return self.is_done

    def on_done(self, callback):
        if self.is_done:
            callback()
        else:
            self.callbacks.append(callback)


def chain_of(stages, num_stages):
    return Chain(iter(stages), num_stages)


def test_a_chain_of_one_stage_reports_it_before_anybody_waits():
    """As any handle: the last gradient's arrival is noted by the thread that sees it."""
    told, stage = [], Stage()
    chain_of([stage], 1).on_done(lambda: told.append("done"))
    assert not told
    stage.complete()
    assert told == ["done"]


def test_a_chain_reports_its_last_stage_and_not_its_first():
    told, first, last = [], Stage(), Stage()
    chain = chain_of([first, last], 2)
    chain.on_done(lambda: told.append("done"))
    first.complete()
    assert not chain.wait(0)  # the second one is under way
    assert not told
    last.complete()
    assert told == ["done"]
    assert chain.wait(0)
    assert told == ["done"]


def test_a_chain_of_unknown_length_reports_when_it_has_been_waited_for():
    told, first, last = [], Stage(), Stage()
    chain = chain_of([first, last], None)
    chain.on_done(lambda: told.append("done"))
    first.complete()
    last.complete()
    assert not told
    assert chain.wait()
    assert told == ["done"]


def test_a_chain_without_stages_is_done():
    """What one rank alone returns: it says so without a wait."""
    told, chain = [], Chain()
    chain.on_done(lambda: told.append("done"))
    assert chain.is_done()
    assert chain.wait(0)
    assert told == ["done"]


def test_what_a_stage_raises_every_wait_raises():
    """A second waiter must not take what failed for done."""

    def stages():
        yield Slowly(1)
        raise ProtocolError("it cannot be read")

    chain = Chain(stages())
    for _ in range(2):
        with pytest.raises(ProtocolError, match="cannot be read"):
            chain.wait(1.0)
        assert isinstance(chain.failure(), ProtocolError)


class Slowly:
    """Done after so many slices."""

    def __init__(self, num_slices):
        self.num_slices, self.told = num_slices, []

    def wait(self, timeout_s=None):
        self.told.append(timeout_s)
        self.num_slices = 0 if timeout_s is None else self.num_slices - 1
        return self.num_slices <= 0

    def on_done(self, callback):
        callback()


def test_a_chain_is_waited_for_in_slices():
    """Each link in turn, never longer than the slice; what comes after a link is done when that is."""
    seen, first, second = [], Slowly(2), Slowly(3)

    def stages():
        yield first
        seen.append("between")
        yield second
        seen.append("after")

    chain = Chain(stages())
    assert [chain.wait(0.5) for _ in range(4)] == [False, False, False, True]
    assert seen == ["between", "after"]
    assert all(0 < timeout_s <= 0.5 for timeout_s in first.told + second.told)


@pytest.mark.parametrize("num_stages", [2, None])
def test_who_asks_afterwards_is_told_at_once(num_stages):
    told, stages = [], [Stage(), Stage()]
    for stage in stages:
        stage.complete()
    chain = chain_of(stages, num_stages)
    assert chain.wait()
    chain.on_done(lambda: told.append("done"))
    assert told == ["done"]


class UnderWay:
    """A work of c10d's that does not end; like Gloo's it waits for whole milliseconds."""

    def wait(self, limit):
        time.sleep(limit // timedelta(milliseconds=1) / 1e3)
        raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return False


@pytest.mark.parametrize("timeout_s", [0.001, 0.0012, 0.0019, 0.0155])
def test_the_rest_of_a_slice_is_no_error(timeout_s):
    """A chain waits for what is left of a slice. 1.9 ms cut to 1 looked like an early error, and training ended."""
    assert not C10dWork(UnderWay()).wait(timeout_s)


@pytest.mark.parametrize(
    "told", [PeerLostError("rank 1 died", 1), ProtocolError("rank 1 died")], ids=["lost", "used"]
)
def test_a_kept_error_keeps_no_group(told):
    """What performs a collective is a function over its group, and a frame of the error that it raised refers to it."""
    held = Stage()

    def perform(held=held):
        def inner():
            raise RuntimeError(f"closed, as {held!r} found")

        try:
            inner()
        except RuntimeError as error:
            raise told from error

    work, seen = LaneWork(perform, [], "all-reduce"), weakref.ref(held)
    del held, perform
    work.perform()
    with pytest.raises(type(told), match="rank 1 died"):
        work.wait()
    gc.collect()
    assert seen() is None
