"""The doctor's study: what ranks recorded is stored case by case and graded from there; its pages follow from it."""

from __future__ import annotations

import pytest

from harness.made_runs import MadeRun, always, nothing
from harness.terminal import REPOSITORY
from paceline.observe.run_folder import begin_run
from paceline.observe.run_lines import to_line
from paceline.observe.run_records import Labels
from paceline_lab.experiments.slow_ranks.doctor import Config
from paceline_lab.experiments.slow_ranks.grading import grades_of, rows_of
from paceline_lab.experiments.slow_ranks.injections import Case
from paceline_lab.experiments.slow_ranks.links import CLEAN_LINKS, LINK_CAUSES
from paceline_lab.experiments.slow_ranks.pages import pages
from paceline_lab.experiments.slow_ranks.records import BEFORE, REPAIRED, SLOW, store, stored

LATE = Case("forward", 100, 3)


def record(folder, extra):
    """As the ranks of a training leave it."""
    run_id = begin_run(folder, ["study"]).run_id
    for rank in MadeRun(extra, num_steps=24, headers={"run_id": run_id}).make().ranks:
        lines = (rank.header, Labels(rank.labels), *rank.steps)
        (folder / f"rank{rank.header.rank}.jsonl").write_bytes(b"".join(map(to_line, lines)))


@pytest.fixture
def runs(tmp_path):
    for name, extra in ((BEFORE, nothing), (SLOW, always(2, "forward", 0.1)), (REPAIRED, nothing)):
        record(tmp_path / "runs" / name, extra)
    (tmp_path / "runs/checkpoint").write_text("what a rank saved besides")
    return tmp_path / "runs"


def test_a_case_is_graded_from_what_is_stored(tmp_path, runs):
    store(tmp_path / "a.jsonl", LATE, 2, "", runs)
    (grade,) = grades_of(stored(tmp_path / "a.jsonl"))
    assert (grade.answer, grade.is_cause_right, grade.is_when_right) == ("right", True, True)
    assert grade.effect > 1
    assert abs(grade.error) < 0.05
    store(tmp_path / "b.jsonl", LATE, 1, "", runs)  # another rank was to be named
    (grade,) = grades_of(stored(tmp_path / "b.jsonl"))
    assert (grade.answer, grade.is_cause_right, grade.error) == ("wrong", False, None)
    assert rows_of([grade], {"forward": "ms"})[0].num_wrong == 1


def test_a_study_that_was_cut_off_goes_on(tmp_path, runs):
    """The line under way is lost, and the next one does not stick to it."""
    file = tmp_path / "a.jsonl"
    store(file, LATE, 2, "", runs)
    store(file, Case("loader", 30, 0), 0, "", runs)
    file.write_bytes(file.read_bytes()[:-100])
    assert list(stored(file)) == [LATE]
    store(file, Case("clean", 0, 0), 0, "", runs)
    assert list(stored(file)) == [LATE, Case("clean", 0, 0)]
    assert b"/tmp" not in file.read_bytes()


def test_a_link_is_compared_with_clean_ones(tmp_path, runs):
    slow = Case("slow link", 20, 0)
    for name in (BEFORE, REPAIRED):
        for path in (runs / name).iterdir():
            path.unlink()
        (runs / name).rmdir()
    store(tmp_path / "a.jsonl", slow, 2, "", runs)
    assert grades_of(stored(tmp_path / "a.jsonl")) == []
    store(tmp_path / "a.jsonl", Case(CLEAN_LINKS, 0, 0), -1, "", runs)
    grades = {x.cause: x for x in grades_of(stored(tmp_path / "a.jsonl"))}
    assert grades["slow link"].answer == "wrong"  # a rank is named
    assert grades["slow link"].direction == "silent"
    assert grades["clean"].answer == "alarm"


def test_every_seed_asks_every_cause_as_often():
    config = Config(seeds=2, clean=5, links=True)
    assert [sum(x.cause == "clean" for x in config.cases_of(seed)) for seed in (0, 1)] == [3, 2]
    assert {x.cause for x in config.links_of(0)} == set(LINK_CAUSES)
    some = Config(seeds=1, clean=0, links=True, causes=("lossy link", "loader"))
    assert {x.cause for x in some.cases_of(0)} == {"loader"}
    assert {x.cause for x in some.links_of(0)} == {"lossy link", CLEAN_LINKS}


def test_the_pages_say_what_is_stored():
    """After another run: `python -m paceline_lab.experiments.slow_ranks.pages`."""
    for path, words in pages().items():
        assert path.read_text() == words, path.relative_to(REPOSITORY)
