"""`paceline explain`: messages lead to a passage, passages are of messages, and all of it works without a checkout."""

from __future__ import annotations

import ast
import re
import sys

import pytest

from harness.installed_smoke import build
from harness.terminal import REPOSITORY, paceline, run
from paceline.cli.explain import answers, explain, passages

_FOLDERS = ("src", "adasum/src", "lab/src", "lossy/src", "plan/src", "recipes/src", "servers/src", "svm/src")
# What torch, a shell or a table's head says, not a message of this repository.
_NOT_OURS = {
    "terminate called without an active exception",
    "Watchdog caught collective operation timeout",
}


def _sources():
    return [path for folder in _FOLDERS for path in (REPOSITORY / folder).rglob("*.py")]


def _messages():
    """Every text in the sources, with a blank for each value; for the words of headings."""
    texts = []
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_every_message_that_names_a_passage_leads_to_one():
    pointers = []
    for path in _sources():
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text())
        pointers += re.findall(r"`paceline explain ([a-z][^`]+)`", text)
    assert len(pointers) > 10
    for words in pointers:
        best = answers(words, passages())[:1]
        assert best, words
        assert f" {words} " in f" {best[0].words} ", (words, best[0].heading)


def test_every_heading_is_words_of_a_message():
    said = _messages()
    parts = {
        each.heading: max(re.split(r"\b(?:N|NAME)\b", each.heading), key=len).strip(" ,")
        for each in passages()
        if each.group != "Terms" and each.heading not in _NOT_OURS
    }
    assert len(parts) > 80
    assert [heading for heading, words in parts.items() if words not in said] == [], (
        "no message has these words"
    )


@pytest.mark.parametrize(
    ("asked", "heading"),
    [
        ("was killed by", "was killed by NAME"),
        ("rank 1 of train.py (pid 4242) was killed by SIGKILL", "was killed by NAME"),
        ("port 29500 is in use: another process of this machine listens on it", "port N is in use"),
        ("NaN", "parameters are not finite any more"),
        ("warm-up is longer than training", "is longer than training"),
        ("COLLECTIVE mismatch!", "collective mismatch"),
        ("residual", "payload, residual"),
    ],
)
def test_words_a_message_or_a_term_lead_to_their_passage(asked, heading):
    assert answers(asked, passages())[0].heading == heading


@pytest.mark.parametrize("name", ["ReplicaMismatchError", "ReplicaMismatch"])
def test_an_errors_name_alone_leads_to_all_its_cases(name, capsys):
    explain([name])
    printed = capsys.readouterr().out
    assert all(f"{words}\n\n" in printed for words in ("cannot join the others", "appears not to match"))


@pytest.mark.processes
def test_what_nothing_explains_gets_the_nearest_headings(tmp_path):
    done = paceline("explain", "the", "flux", "capacitor", "is", "longer", cwd=tmp_path)
    assert done.code == 2
    assert "nothing explains 'the flux capacitor is longer'" in done.err
    assert "is longer than training" in done.err


@pytest.mark.processes
def test_without_words_it_lists_the_headings(tmp_path):
    done = paceline("explain", cwd=tmp_path)
    assert done.code == 0
    assert "was killed by NAME" in done.out
    assert done.out.index("Starting ranks") < done.out.index("Networks and tools") < done.out.index("Terms")


@pytest.mark.processes
@pytest.mark.slow
def test_the_wheel_explains_without_the_checkout_and_without_torch(tmp_path):
    _, wheel = build(tmp_path)
    where = tmp_path / "installed"
    assert run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(where)], cwd=tmp_path).code == 0
    script = (
        f"import sys; sys.path.insert(0, {str(where)!r}); from paceline.cli.explain import _PAGES, explain; "
        f"explain(['was', 'killed', 'by']); "
        f"assert str(_PAGES).startswith({str(where)!r}); assert 'torch' not in sys.modules"
    )
    done = run([sys.executable, "-c", script], cwd=tmp_path)
    assert done.code == 0, done.err
    assert "SIGKILL" in done.out
