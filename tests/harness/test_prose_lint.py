"""The rules of `prose_lint.py`: what they find, and what they leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import prose_lint
from harness.prose_lint import Allowed, Prose, findings

HERE = Path(__file__)


def _rules(text, **settings):
    return [finding.rule for finding in findings(Prose(HERE, 1, text, **settings))]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("One " * 26 + "word.", "27 words"),
        ("It took 1.5 ms, 2 ms and 1,636 ms.", "3 numbers"),
        ("Buckets are sent as ever.", "'as ever' (say it plainly)"),
        ("Of two ranks one is behind, of which nothing is known.", "'of which' (name the noun)"),
        ("Retry; else stop.", "'else' (otherwise)"),
        ("Of each host's link.", "'Of each' (begin with the noun)"),
        ("It takes 5 ms a step.", "'ms a step' (per)"),
        ("It waits (if asked) for all.", "'(if' (a condition is a sentence, not a parenthesis)"),
        ("Ours is shorter than torch's.", "'Ours' (Paceline, torch)"),
    ],
)
def test_what_breaks_a_rule_is_found(text, rule):
    assert _rules(text) == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "Use `of which or beside (if 1, 2 and 3)` in code.",
        "[Read](https://host/1/2/3/4) about ResNet-50, int8 and bf16 on 2 hosts with 4 ranks.",
        "Each rank sends 2(P-1)/P of its bytes, for P = 1, 2, 3, ... ranks.",
        "Nothing else is sent. Somewhere else it would be.",
        "A step of 1.5 ms is short. So is one of 2 ms. One of 3 ms is not.",
    ],
)
def test_what_breaks_no_rule_is_left_alone(text):
    assert _rules(text) == []


def test_notes_are_held_to_the_words_only():
    assert _rules("Figures 1, 2 and 3 " * 10, sentences=False) == []
    assert _rules("The ones beside it", sentences=False) == ["'beside' (next to, or compared with)"]


def test_a_page_that_is_too_long_is_named(monkeypatch):
    assert list(prose_lint.too_long()) == []
    readme = prose_lint.words_of(prose_lint.REPOSITORY / "README.md")
    monkeypatch.setattr(prose_lint, "LONGEST", (("README.md", readme - 1),))
    monkeypatch.setattr(prose_lint, "LONGEST_TOGETHER", ((("README.md", "docs/versions.md"), readme),))
    one, together = prose_lint.too_long()
    assert one.startswith(f"README.md: {readme} words, and at most {readme - 1}")
    assert "words together" in together


def test_words_are_counted_without_code_and_addresses(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title\n\nSee [the page](https://host/a) `x = 1`.\n\n```python\nnot = here\n```\n| a | b |\n"
    )
    assert prose_lint.words_of(page) == 8


def test_a_page_is_read_without_its_code(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n- an item\n  that goes on\n\n```python\nnot = read\n```\n| cell | two |\nText `x`.\n"
    )
    assert [prose.text.strip() for prose in prose_lint.page(page)] == [
        "Title",
        "an item that goes on",
        "cell",
        "two",
        "Text `x`.",
    ]


def test_a_source_is_read_for_its_sentences(tmp_path):
    source = tmp_path / "source.py"
    source.write_text(
        '"""A module\'s own."""\n'
        "def _private():\n"
        '    """Nobody reads this docstring in the reference."""\n'
        '    raise ValueError(f"rank {1} cannot be reached by any of the others")\n'
        "def windows():\n"
        '    """A public name.\n\n    Args:\n        first: The first of them.\n    """\n'
    )
    texts = {prose.text for prose in prose_lint.source(source)}
    assert texts == {"rank X cannot be reached by any of the others", "A public name.", "The first of them."}


def test_an_exception_is_one_sentence_of_one_file():
    (finding,) = findings(Prose(HERE, 1, "Buckets are sent as ever."))
    path = str(HERE.relative_to(prose_lint.REPOSITORY))
    assert Allowed(path, "Buckets are", "why").covers(finding)
    assert Allowed(path, "*", "why").covers(finding)
    assert not Allowed(path, "Ranks are", "why").covers(finding)
    assert not Allowed("README.md", "*", "why").covers(finding)


def _plain_rules(tmp_path, text):
    path = tmp_path / "file.py"
    path.write_text(text)
    return [finding.rule for finding in prose_lint.plain_findings(path)]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('"""Who trains the module."""\n', prose_lint.OPENING_RULE),
        ('class A:\n    """What it counts."""\n', prose_lint.OPENING_RULE),
        ('def f():\n    """The number of ranks."""\n', prose_lint.OPENING_RULE),
        ('def _f():\n    """Wait until somebody calls."""\n', "'somebody' (name the actor)"),
        ("x = 1  # nobody reads it\n", "'nobody' (name the actor)"),
        ('def _f():\n    """Return ' + "a word " * 13 + '."""\n', "27 words"),
    ],
)
def test_a_docstring_without_subject_verb_or_actor_is_found(tmp_path, text, rule):
    assert _plain_rules(tmp_path, text) == [rule]


def test_plain_docstrings_are_left_alone(tmp_path):
    function = 'def f():\n    """Send the header.\n\n    Args:\n        of: whose.\n    """  # The agent\n'
    assert _plain_rules(tmp_path, f'"""The agent."""\n\n\n{function}') == []
