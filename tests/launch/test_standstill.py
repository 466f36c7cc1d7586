"""Who waits for whom: decided from what each rank has entered, without any process."""

from __future__ import annotations

import os
import struct

import pytest

from paceline.host.processes import Activity
from paceline.launch.hang_board import Standstill
from paceline.launch.hang_watch import headline, headline_of_all, standstill, waiting
from paceline.observe import progress
from paceline.observe.progress import Entered

ALL = b"all"


def _at(rank, count, *, waits=True, group=ALL, ranks=(0, 1, 2), at_s=0.0, what="in a barrier"):
    return Entered(rank, 100 + rank, group, ranks, count, at_s, 1, what, waits)


def test_who_has_not_entered_what_others_wait_in_is_missing():
    found = standstill([_at(0, 5), _at(1, 4, waits=False), _at(2, 5, at_s=3.0)], 3)
    assert (found.missing, found.starting, found.since_s) == ((1,), False, 3.0)
    assert [each.rank for each in found.waiting] == [0, 2]


def test_nobody_waits():
    assert standstill([_at(rank, 5, waits=False) for rank in range(3)], 3) is None
    assert standstill([], 3) is None


def test_a_rank_that_waits_is_not_to_blame():
    """0 waits for 1, which waits for 2 in another group; 2 does something else."""
    pair = {"group": b"pair", "ranks": (1, 2)}
    found = standstill(
        [_at(0, 5), _at(1, 4, waits=False), _at(1, 9, **pair), _at(2, 8, waits=False, **pair)], 3
    )
    assert found.missing == (2,)


def test_ranks_of_other_groups_are_not_missed():
    left, right = {"group": b"left", "ranks": (0, 1)}, {"group": b"right", "ranks": (2,)}
    found = standstill(
        [_at(0, 5, **left), _at(1, 4, waits=False, **left), _at(2, 1, waits=False, **right)], 3
    )
    assert found.missing == (1,)


def test_a_rank_that_has_entered_nothing_is_missed_while_it_starts():
    found = standstill([_at(0, 1), _at(2, 1)], 3)
    assert (found.missing, found.starting) == ((1,), True)
    assert standstill([_at(0, 1), _at(2, 1)], 0).missing == ()  # it may be on another machine


def test_different_collectives_at_once():
    found = standstill([_at(0, 5), _at(1, 5, what="in torch.distributed.all_reduce"), _at(2, 5)], 3)
    assert found.missing == ()
    assert found.differs
    assert not standstill([_at(0, 5), _at(1, 5), _at(2, 5)], 3).differs


def test_launched_and_not_waited_for():
    """As with async_op, or on an accelerator: only the counts tell."""
    found = standstill([_at(0, 5, waits=False), _at(1, 4, waits=False), _at(2, 5, waits=False)], 3)
    assert found.missing == (1,)


def test_a_later_collective_of_somebody_else_is_a_sign_that_it_goes_on():
    other = {"group": b"other", "ranks": (1,)}
    found = standstill([_at(0, 5), _at(1, 4, waits=False), _at(1, 7, waits=False, at_s=9.0, **other)], 2)
    assert found.since_s == 9.0


@pytest.mark.parametrize(
    ("after", "alive"),
    [
        (Activity(0.0, 0.0, 0, 0, on_disk=False), False),
        (Activity(0.1, 0.5, 1000, 10, on_disk=False), False),  # threads that look around
        (Activity(0.3, 0.0, 0, 0, on_disk=False), True),
        (Activity(0.1, 2.0, 0, 0, on_disk=False), True),  # it computes, and others have the cores
        (Activity(0.0, 0.0, 10**6, 0, on_disk=False), True),
        (Activity(0.0, 0.0, 0, 10**3, on_disk=False), True),
        (Activity(0.0, 0.0, 0, 0, on_disk=True), True),
    ],
)
def test_signs_of_life(after, alive):
    before = Activity(0.0, 0.0, 0, 0, on_disk=False)
    assert after.has_done_something(before, 3.0) == alive


def _file(monkeypatch, folder):
    monkeypatch.setenv(progress.VARIABLE, str(folder))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(progress, "_file", progress._File())


def test_what_a_rank_counts_is_read_back(monkeypatch, tmp_path):
    _file(monkeypatch, tmp_path)
    count = progress.counter("0", [0, 1, 2, 3, 7])
    assert progress.counter("0", [0, 1, 2, 3, 7]) is count
    other = progress.counter("1", range(0, 400, 2))  # too many to say which
    assert list(progress.read(tmp_path)) == []
    count.enter("waiting for bucket 0 " + "é" * 60, 7)
    other.enter("in a barrier", waits=False)
    first, second = progress.read(tmp_path)
    assert (first.rank, first.pid, first.ranks, first.count, first.step) == (
        3,
        os.getpid(),
        (0, 1, 2, 3, 7),
        1,
        7,
    )
    assert first.what.startswith("waiting for bucket 0 é")
    assert first.waits
    assert (second.ranks, second.step, second.waits) == ((), -1, False)
    count.leave()
    assert not next(progress.read(tmp_path)).waits


def test_more_groups_than_there_is_room_for(monkeypatch, tmp_path):
    _file(monkeypatch, tmp_path)
    counts = [progress.counter(str(number), [0, 1]) for number in range(40)]
    assert counts[31] is not None
    assert counts[32] is None


def test_files_that_are_none(monkeypatch, tmp_path):
    """Cut off, empty, and another version's."""
    _file(monkeypatch, tmp_path)
    progress.counter("0", [0, 1]).enter("in a barrier")
    whole = next(tmp_path.glob("progress.*")).read_bytes()
    for name, content in {
        "1.1": whole[:300],
        "2.1": b"",
        "4.1": struct.pack("8s", b"paceprg9") + whole[8:],
    }.items():
        (tmp_path / f"progress.{name}").write_bytes(content)
    assert [each.rank for each in progress.read(tmp_path)] == [3, 3]


def test_nobody_counts_without_a_launcher(monkeypatch):
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.setattr(progress, "_file", progress._File())
    assert progress.counter("0", [0, 1]) is None


def test_sentences_have_no_comma_too_many():
    """A step is said between commas, where the sentence goes on."""
    waits = [
        Entered(rank, 1, ALL, (0, 1), 1, 0.0, 7, "waiting for bucket 0", waits=True) for rank in range(2)
    ]
    named = Standstill(tuple(waits[:1]), (1,), 0.0)
    assert headline(named, 5.0).endswith("Rank 0 has been waiting for bucket 0, step 7, for 5.0 s.")
    assert waiting(named).endswith("bucket 0, step 7")
    both = Standstill(tuple(waits), (), 0.0)
    assert headline(both, 5.0).endswith(
        "rank 0 is waiting for bucket 0, step 7; rank 1 is waiting for bucket 0, step 7."
    )
    assert "step 7, and nothing" in headline_of_all(both, 2, 5.0)
