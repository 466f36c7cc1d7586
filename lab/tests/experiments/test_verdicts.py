"""Verdicts follow from rules or tests, figures are of the newest result, spreads are of enough samples."""

from __future__ import annotations

import json
import re

import pytest

from harness import claims, figures
from harness.claims import (
    FEWEST_FOR_A_SPREAD,
    HEADING,
    PAGE,
    cells,
    counted,
    newer_results,
    spread,
    verdict_of,
)
from harness.figures import Row, stored_rows, tables
from harness.terminal import REPOSITORY

STORED = stored_rows()
JUDGED = {
    row[0]: dict(zip(table.header, row, strict=True))
    for table in tables(PAGE.read_text())
    if table.header[0] == "#" and "verdict" in table.header
    for row in table.rows
}
UNTESTED = {"not yet", "cannot be tested here"}


@pytest.mark.parametrize("name", JUDGED)
def test_a_verdict_follows_from_its_rule(name):
    row, printed = STORED[name], JUDGED[name]["verdict"]
    kinds = row.verdict.keys() & {"tests", "words", "judged", "untested"}
    assert len(kinds) == 1, f"{name} has {kinds or 'nothing'} to follow from"
    assert ("untested" in kinds) == (printed in UNTESTED), name
    assert ("tests" in kinds) == (JUDGED[name]["how"] == "proved"), name
    found = verdict_of(row)
    assert found is None or found == printed, f"{name} says {printed}; from its rule follows: {found}"


@pytest.mark.parametrize("name", [name for name, row in STORED.items() if "tests" in row.verdict])
def test_what_is_proved_names_tests_that_exist(name):
    assert STORED[name].verdict["tests"]
    for test in STORED[name].verdict["tests"]:
        file, function = test.split("::")
        assert re.search(rf"^def {function}\(", (REPOSITORY / file).read_text(), re.MULTILINE), test


def test_every_figure_is_of_the_newest_result():
    paths = {
        (name, path)
        for name in STORED
        for _, source in STORED[name].figures
        for path in claims.paths_in(source)
    }
    older = {(name, path): newer for name, path in paths if (newer := list(newer_results(path)))}
    assert not older


def test_one_name_is_one_file():
    """Measuring again replaces the result: no copy of an older one lies beside it under another name."""
    for name in claims.stored_names():
        result = figures.result_of(name)
        assert result.get("name", name) == name, f"{name}.json calls itself {result['name']}"


def test_the_table_of_samples_is_the_stored_ones():
    assert PAGE.read_text() == claims.page(), "python tests/harness/claims.py"


def test_a_spread_that_is_told_is_of_five_samples_or_more():
    """The table leaves it out otherwise; a paragraph that tells one begins with its row's name."""
    text = PAGE.read_text().partition(HEADING)[0]
    told = [part for part in re.split(r"\n\n+", text) if re.search(r"±|quartile", part)]
    assert told
    for part in told:
        name = part.partition(".")[0]
        assert min(map(len, claims.samples_of(STORED[name]))) >= FEWEST_FOR_A_SPREAD, part


def _row(verdict, samples=()):
    return Row("", [], [], verdict, list(samples))


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of two results: the same study on one day and on the next."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    figures.result_of.cache_clear()
    for name, day in (("old", 1), ("new", 2)):
        result = {
            "question": "how long?",
            "config": {"num_rounds": day, "rate": 1},
            "place": {"hosts": 2},
            "provenance": {"date": f"2026-11-0{day}"},
            "summaries": {"torch": 2.0, "ours": 1.0},
            "samples": {"ours": [1.0, 1.1, 0.9], "torch": [2.0] * 5},
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    yield tmp_path
    figures.result_of.cache_clear()


def test_a_verdict_is_the_first_whose_condition_is_met(results):
    shorter = 'of("new > ours") < %s * of("new > torch")'
    for most, partly, verdict in ((0.6, 0.9, "holds"), (0.4, 0.9, "holds in part"), (0.4, 0.45, "refuted")):
        rule = {"words": "", "holds": shorter % most, "holds in part": shorter % partly}
        assert verdict_of(_row(rule)) == verdict
    assert verdict_of(_row({"words": "", "holds in part": shorter % 0.6})) == "holds in part"
    assert verdict_of(_row({"untested": "no GPU"})) is None


def test_an_older_result_is_noticed(results):
    assert list(newer_results("old > ours")) == ["new"]
    assert not list(newer_results("new > ours"))
    assert not list(newer_results("old > nobody"))
    other = json.loads((results / "new.json").read_text()) | {"config": {"rate": 2}}
    (results / "new.json").write_text(json.dumps(other))
    figures.result_of.cache_clear()
    assert not list(newer_results("old > ours"))


def test_three_samples_have_no_spread(results):
    assert (counted(_row({}, ["new > samples > *"])), spread(_row({}, ["new > samples > *"]))) == (
        "3 to 5",
        "",
    )
    assert spread(_row({}, ["new > samples > torch"])) == "0"


def test_settings_that_a_search_tried_less_often_are_no_cells(results):
    trials = [{"side": "ours", "rate": rate, "test": 1.0} for rate in (1, 1, 2)]
    trials += [{"side": "torch", "rate": 1, "test": 0.0}]
    (results / "trials.json").write_text(json.dumps({"trials": trials}))
    assert cells("trials > trials > side=ours by rate reading test") == [[1.0, 1.0]]
    assert cells("trials > trials > side!=ours by rate reading test") == [[0.0]]
