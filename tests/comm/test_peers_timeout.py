"""The process group's timeout holds, whatever is waited for."""

from datetime import timedelta

import pytest

from paceline.comm import peers
from paceline.comm.peers import GRACE_S, SLICE_S, Peers
from paceline.errors import PeerLostError

TIMEOUT_S = 15.0


class _Group:
    """What is asked of a process group."""

    _timeout = timedelta(seconds=TIMEOUT_S)

    def rank(self):
        return 0

    def size(self):
        return 2


class _Work:
    """Takes the time that it is told; ends after so many looks, if ever."""

    def __init__(self, takes_s, num_looks=10**9):
        self.now_s, self._takes_s, self._left = 0.0, takes_s, num_looks

    def wait(self, timeout_s=None):
        self.now_s += self._takes_s
        self._left -= 1
        return self._left <= 0

    def monotonic(self):
        return self.now_s


def test_what_has_no_timeout_of_its_own_ends_at_the_groups(monkeypatch):
    """A codec, a compiler, a thread that gets no core: whatever holds up a bucket, its rank says so."""
    work = _Work(SLICE_S)
    monkeypatch.setattr(peers, "time", work)
    with pytest.raises(
        PeerLostError, match="has not ended 15 s, the process group's timeout, after rank 0 began"
    ):
        Peers(_Group(), "a", in_slices=True).wait(work, "averaging bucket 1")
    assert TIMEOUT_S + GRACE_S < work.now_s <= TIMEOUT_S + GRACE_S + 2 * SLICE_S


def test_a_rank_that_stood_still_waits_once_more(monkeypatch):
    work = _Work(100.0, num_looks=2)
    monkeypatch.setattr(peers, "time", work)
    Peers(_Group(), "a", in_slices=True).wait(work, "averaging bucket 1")
