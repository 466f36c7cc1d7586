"""Every code block of the documentation does what the page says.

How a page is run, top to bottom, in a folder of its own that has the `examples`:
    ```python title="NAME"   is written to NAME; with PATH::NAME in the title it is that function of the source
    ```python                is run by itself
    ```console               each `$ ` line is run by bash; the lines under it must be in its output, in that order.
                             They are real output: a number matches any number, a time any time, a path in /tmp any
                             path. `make` is only asked whether it could
    ```text, ```diff         is prose
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

import pytest

from harness.included_source import current, is_included
from harness.terminal import REPOSITORY, TORCHS_ABORT, Finished, run
from paceline_lab.emulation import ClusterSpec, EmulatedCluster
from paceline_lab.errors import UnsupportedError

PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
_ROOTS = (
    REPOSITORY / "src" / "paceline",
    *(REPOSITORY / name / "src" for name in ("adasum", "lab", "lossy", "plan", "recipes", "servers", "svm")),
    REPOSITORY,
)
_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    title: str | None
    text: str


def _name(page):
    return str(page.relative_to(REPOSITORY))


_REAL = [page for page in PAGES if re.match(r"README|docs/(guide|index|explain)", _name(page))]

# Some of these train or simulate for minutes; the others take from ten to forty seconds.
_LONG = [
    REPOSITORY / "docs" / name
    for name in (
        "guide/bench.md",
        "guide/bounded-loss.md",
        "guide/collective-timeout.md",
        "guide/demo.md",
        "guide/svm.md",
        "guide/unequal-machines.md",
        "notebook/large-batches.md",
        "notebook/papers.md",
    )
]
_RUN_PAGES = [pytest.param(page, marks=[pytest.mark.lab] * (page in _LONG), id=_name(page)) for page in PAGES]


def _blocks(page):
    content = page.read_text()
    for match in _FENCE.finditer(content):
        language, options, text = match.groups()
        title = re.search(r'title="([^"]+)"', options)
        yield Block(content[: match.start()].count("\n") + 1, language, title[1] if title else None, text)


def _commands(text):
    """Pairs of a command and the lines that are shown under it."""
    pairs = []
    for line in text.splitlines():
        if line.startswith("$ "):
            pairs.append((line[2:], []))
        else:
            pairs[-1][1].append(line)
    return pairs


# What another run prints differently, and what it may print instead. The first that matches is taken.
_NUMBER = r"[+-]?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?"
_VARIABLE = {
    r"/tmp/[\w./-]*\w": r"/[\w./-]*\w",
    rf"{_NUMBER} ?(?:ns|[uµ]s|ms|s|min|h)\b": rf"{_NUMBER} ?(?:ns|[uµ]s|ms|s|min|h)\b",
    _NUMBER: _NUMBER,
    r"[-─━═]{3,}": r"[-─━═]{3,}",  # a table's line is as long as its numbers
    r"\s+": r"\s+",
}
_ANY_VARIABLE = re.compile("|".join(f"({printed})" for printed in _VARIABLE))


def _masked(text):
    """A regular expression for `text` as another run prints it: with other numbers, times and temporary paths."""
    parts, end = [], 0
    for match in _ANY_VARIABLE.finditer(text):
        parts += [re.escape(text[end : match.start()]), list(_VARIABLE.values())[match.lastindex - 1]]
        end = match.end()
    return "".join([*parts, re.escape(text[end:])])


def _pattern(lines):
    """A regular expression that finds the lines in that order; leading and trailing blanks do not count."""
    parts = [r".*?".join(_masked(piece) for piece in line.strip().split("...")) for line in lines]
    return re.compile(r"[\s\S]*?".join(part for part in parts if part != ".*?"))


def _anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _run_console(command: str, folder) -> Finished:
    """Run a line of a console block; once more if torch's Gloo aborted at exit, as it now and then does."""
    asked = re.sub("^make ", f"make -n -C {shlex.quote(str(REPOSITORY))} ", command)
    done = run(["bash", "-o", "pipefail", "-c", asked], cwd=folder)
    if done.code != 0 and TORCHS_ABORT in done.err:
        done = run(["bash", "-o", "pipefail", "-c", asked], cwd=folder)
    return done


def _skip_without_namespaces():
    """With the product's own words where this machine or user cannot emulate hosts."""
    try:
        with EmulatedCluster(ClusterSpec(hosts=1)):
            return
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.slow(apart=True)
@pytest.mark.processes
@pytest.mark.timeout(400)  # a page may hold a dozen launches
@pytest.mark.parametrize("page", _RUN_PAGES)
def test_every_block_does_what_the_page_says(page, tmp_path, monkeypatch):
    if page.name in ("emulate.md", "emulation.md"):
        _skip_without_namespaces()
    if page.name == "ray.md":
        pytest.importorskip("ray", reason="ray is not installed: make test-newest")
        monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # its sockets' paths have at most 107 bytes
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    for block in _blocks(page):
        where = f"{_name(page)}:{block.line}"
        if is_included(block.title):
            assert block.text == current(block.title, block.text), (
                f"{where}: python tests/harness/included_source.py"
            )
        elif block.title is not None:
            (tmp_path / block.title).write_text(block.text)
        elif block.language == "python":
            done = run(["python", "-c", block.text], cwd=tmp_path)
            assert done.code == 0, f"{where}\n{done.err}"
        elif block.language == "console":
            for command, shown in _commands(block.text):
                done = _run_console(command, tmp_path)
                said = done.out + done.err
                assert done.code == 0, f"{where}: {command}\n{said}"
                # What it prints to the two streams has no order between them.
                together = (done.out + done.err, done.err + done.out)
                assert any(_pattern(shown).search(both) for both in together), f"{where}: {command}\n{said}"
        else:
            assert block.language in ("text", "diff"), f"{where}: a block that nothing executes"


@pytest.mark.parametrize("page", _REAL, ids=_name)
def test_output_is_as_it_was_printed(page):
    """Nothing is left out within a line. A whole line may be: those that are shown keep their order."""
    shown = [
        line
        for block in _blocks(page)
        if block.language == "console"
        for _, shown in _commands(block.text)
        for line in shown
    ]
    assert not [line for line in shown if "..." in line]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_leads_somewhere(page):
    for link in _LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{_name(page)} links to {link}"
        if anchor:
            assert anchor in _anchors(target), f"{_name(page)} links to {link}"


def test_every_message_that_points_into_the_docs_points_at_a_heading():
    sources = [
        path
        for folder in (
            "src",
            "adasum/src",
            "lab/src",
            "lossy/src",
            "plan/src",
            "recipes/src",
            "servers/src",
            "svm/src",
        )
        for path in (REPOSITORY / folder).rglob("*.py")
    ]
    for source in sorted(sources):
        # A message may be broken over several lines of source.
        text = re.sub(r'"\s*\n\s*f?"', "", source.read_text())
        for page, anchor in re.findall(r"(docs/[\w/-]+\.md)#([\w-]+)", text):
            assert anchor in _anchors(REPOSITORY / page), f"{_name(source)} points at {page}#{anchor}"


def test_where_x_is_decided_is_a_file():
    """Each file that the architecture's table names for a question, or for something to add, is there."""
    page = (REPOSITORY / "docs/architecture.md").read_text()
    section = page[page.index("## Where is X decided?") : page.index("## Forward overlap")]
    paths = re.findall(r"`([\w/]+\.\w+)`", section)
    assert len(paths) > 20
    missing = [path for path in paths if not any((root / path).is_file() for root in _ROOTS)]
    assert not missing, f"docs/architecture.md names {missing}"


def test_the_glossary_gives_a_word_one_meaning():
    rows = re.findall(r"^\| ([^|]+) \|", (REPOSITORY / "docs/glossary.md").read_text(), re.MULTILINE)
    words = [word for row in rows if row != "word" for word in row.split(", ")]
    assert len(words) == len(set(words)), sorted(word for word in set(words) if words.count(word) > 1)


def test_pre_commit_runs_what_make_check_runs():
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)[1]
    hooks = re.findall(r"entry: (.*)", (REPOSITORY / ".pre-commit-config.yaml").read_text())
    assert hooks == [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]


def test_the_long_pages_exist():
    assert set(_LONG) <= set(PAGES)


def test_a_page_that_lies_is_caught():
    """The patterns are strict: order and content count."""
    assert _pattern(["a ... c", "...", "d"]).search("a b c\nx\nd\n")
    assert not _pattern(["d", "a"]).search("a\nd\n")
    assert not _pattern(["a ... c"]).search("a\nc\n")
    assert not _pattern(["True"]).search("False\n")
    assert _pattern(["step  12.5 ms, rank 1, -3e-05"]).search("step 1.02 s, rank 0, 7.1\n")
    assert not _pattern(["12.5 ms"]).search("ms")
    assert not _pattern(["12.5 ms"]).search("12.5 MB")
    assert _pattern(["saved in /tmp/a1/report, as asked"]).search("saved in /var/x/report, as asked\n")
    assert not _pattern(["saved in /tmp/a1/report, as asked"]).search("saved in , as asked\n")
    here = "tests/journeys/test_docs.py::_name"
    assert current(here, "") == "def _name(page):\n    return str(page.relative_to(REPOSITORY))\n"
    assert current(f"{here}, in part", "return str(page.relative_to(REPOSITORY))\n").startswith("return ")
    for title, text in [(f"{here}less", ""), (f"{here}, in part", "a line that is not there\n")]:
        with pytest.raises(LookupError):
            current(title, text)
