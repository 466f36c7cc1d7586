"""The page: the verdict first, nothing from outside, nothing that the run's words could break."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from harness.recorded_runs import write_run
from paceline.observe.run_reading import read_run
from paceline.report.page import Span, page_of, row_of, strip, table_of_cells

_VOID = {"meta", "link", "rect", "line", "polyline"}


class _Tags(HTMLParser):
    """Tags that are opened and closed in order, and their words."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag == "rect":
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def _page(folder):
    text = page_of(read_run(folder))
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    return text, tags, " ".join(tags.words)


def test_the_verdict_comes_first(tmp_path):
    write_run(tmp_path / "run", late_s=lambda rank, _: 0.03 * (rank == 1))
    _, tags, words = _page(tmp_path / "run")
    assert words.index("Rank 1 is 30 ms late") < words.index("Where a step goes, by rank")
    for heading in (
        "What to do",
        "Steps over time",
        "The longest step",
        "Links between ranks",
        "Shares of the batch",
    ):
        assert heading in words
    assert "rank 1, last" in words
    assert len([tag for tag, _ in tags.seen if tag == "svg"]) >= 7


def test_nothing_comes_from_outside(tmp_path):
    write_run(tmp_path / "run")
    text, tags, _ = _page(tmp_path / "run")
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!data:,)\w", text)
    assert "script" not in {tag for tag, _ in tags.seen}
    policy = next(attrs["content"] for tag, attrs in tags.seen if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "prefers-color-scheme: dark" in text
    assert any(attrs.get("name") == "viewport" for _, attrs in tags.seen)


def test_silence_is_said(tmp_path):
    write_run(tmp_path / "run")
    assert "No rank and no link delays steps" in _page(tmp_path / "run")[2]


def test_words_of_the_run_stay_words(tmp_path):
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
    write_run(tmp_path / "run", command=("python", evil))
    _, tags, words = _page(tmp_path / "run")
    assert evil in words
    assert not {"script", "img"} & {tag for tag, _ in tags.seen}


def test_cells_and_labels_stay_words():
    made = (
        table_of_cells(("<b>",), [("<i>", "<u>")])
        + row_of("<b>", "", "<i>")
        + strip([Span(0, 1, "sent", "<b>")], 1)
    )
    assert not re.search("<[biu]>", made)


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(1, 20), (3, 0), (2, 1), (70, 15)])
def test_runs_of_other_sizes(num_ranks, num_steps, tmp_path):
    write_run(tmp_path / "run", num_ranks=num_ranks, num_steps=num_steps)
    words = _page(tmp_path / "run")[2]
    assert f"{num_ranks} ranks" in words
    if num_ranks == 70:
        assert "6 more ranks are left out here." in words


def test_what_is_missing_is_said(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "rank0.jsonl").unlink()
    assert "Of the run: ranks 0 of 3 left no record" in _page(tmp_path / "run")[2]


def test_clocks_of_other_hosts(tmp_path):
    write_run(tmp_path / "run", clocks_s={1: 3600.0, 2: -5.0})
    words = _page(tmp_path / "run")[2]
    axis = re.search(r"The longest step.*? 0 \s*([\d.]+ ms) \s*([\d.]+ ms)", words, re.DOTALL)
    assert axis is not None
    assert float(axis[2].split()[0]) < 200
