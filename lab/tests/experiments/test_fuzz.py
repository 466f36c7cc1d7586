"""The search among random programs keeps its report, from which it goes on."""

from collections import Counter

import pytest

from paceline_lab.experiments.fuzz import Found, store, stored


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
