"""The search among random programs keeps its report, from which it goes on."""

from collections import Counter

import pytest

from paceline_lab.experiments import fuzz
from paceline_lab.experiments.fuzz import Found, draw_program, store, stored


@pytest.mark.processes
def test_a_search_goes_on_where_its_report_ends(tmp_path):
    """With the same counts; not with another first seed."""
    found = Found(
        7, 3, 1.5, Counter({"free": 3}), Counter({"weight": 1}), Counter({"train": 2}), ["seed 8: ..."]
    )
    store(found, tmp_path / "fuzz.json")
    assert stored(tmp_path / "fuzz.json", 7) == found
    assert stored(tmp_path / "fuzz.json", 8) == Found(8)
    assert stored(tmp_path / "nothing.json", 7) == Found(7)


def test_a_launch_that_fails_once_is_no_mismatch_and_is_not_forgotten(monkeypatch):
    monkeypatch.setattr(fuzz, "pool", lambda num_ranks: num_ranks)
    monkeypatch.setattr(
        fuzz,
        "find_failures",
        lambda programs, *_: {programs[0]: [fuzz.NOT_REPEATED + "rank 0 missed the deadline"]},
    )
    found = Found(7)
    found.perform([draw_program(7)])
    assert (found.num_programs, found.failures) == (1, [])
    assert found.not_repeated == ["seed 7 or after it: not repeated: rank 0 missed the deadline"]
