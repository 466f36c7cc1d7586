"""What the README, benchmarks, claims and guides print is what was measured, by commands that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex

import pytest
import typer

from harness import refresh_figures
from harness.figures import figures_of, numbers_in, rounds_to, stored_rows, tables, value_of
from harness.terminal import REPOSITORY
from paceline.cli.app import app
from paceline.errors import ConfigurationError
from paceline_lab.experiments.registry import EXPERIMENTS

README, BENCHMARKS, MORE, CLAIMS, OPTIONS = (
    REPOSITORY / name
    for name in (
        "README.md",
        "docs/benchmarks.md",
        "docs/notebook/benchmarks.md",
        "docs/notebook/claims.md",
        "docs/options.md",
    )
)
PRINTING = [README, BENCHMARKS, MORE, CLAIMS]
OTHERS = [
    page
    for folder in ("guide", "notebook")
    for page in sorted((OPTIONS.parent / folder).glob("*.md"))
    if "\n| # |" in page.read_text() and page not in PRINTING
]
# Pages of the notebook that are about more than one study.
NO_STUDIES = {"accelerators", "benchmarks", "claims", "tests"}
STORED = stored_rows()
# What the parser raises for bad usage; typer has moved it between packages.
USAGE_ERROR = typer.BadParameter.__mro__[1]
VERDICTS = {"holds", "holds in part", "refuted", "not yet", "cannot be tested here"}
# How a claim was tried, and the verdicts that follow from it at most: what was only simulated does not hold.
UNTRIED = {"not yet", "cannot be tested here"}
MODELS_ONLY = {"simulated"}
NO_LONGER_RUN = "stored, no longer run"
HOW = {"proved", "real", "emulated", "in one process", *MODELS_ONLY}
NUM_CLAIMS = {"D": 13, "G": 10, "H": 9, "S": 7, "A": 7, "Z": 5, "L": 11, "M": 5}
ALL_CLAIMS = {
    *(f"{letter}{number}" for letter, most in NUM_CLAIMS.items() for number in range(1, most + 1)),
    "G1-4",
} - {"G1", "G2", "G3", "G4"}


def _tables(page, first="#"):
    return [table for table in tables(page.read_text()) if table.header[0] == first]


def _printed(page):
    """The figures of a page's tables, by the names of their rows; several rows of a page may have one name."""
    printed = {}
    for table in _tables(page):
        for row, figures in figures_of(table).items():
            printed.setdefault(row, set()).update(figures)
    return printed


@pytest.mark.parametrize("row", STORED)
def test_every_figure_is_the_measured_one(row):
    for figure, source in STORED[row].figures:
        value = value_of(source)
        assert rounds_to(value, figure), f"figures.json, row {row}: {figure}, but {source} is {value}"


@pytest.mark.parametrize("page", PRINTING + OTHERS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_prints_only_figures_whose_samples_are_known(page):
    printed = _printed(page)
    assert printed
    for row, figures in printed.items():
        assert row in STORED, f"{page.name}: {row} is no row of figures.json"
        strays = figures - STORED[row].printed
        assert not strays, f"{page.name}, row {row}: {strays} are not in figures.json"


def test_what_is_said_of_a_row_is_what_its_row_holds():
    """A line of prose that names rows, as `(row 7)`, has no other figures than theirs, and a few conditions."""
    conditions = {"1", "2", "16", "95", "5"}  # Gbit/s, hosts, %
    lines = [line for line in BENCHMARKS.read_text().splitlines() if re.search(r"\(rows? \d", line)]
    assert len(lines) > 5
    for line in lines:
        named = set(re.findall(r"\d+", " ".join(re.findall(r"\(rows? ([^)]*)\)", line))))
        strays = numbers_in(re.sub(r"\(?rows? [^)]*\)|[Rr]ow \d+", "", line)) - conditions
        assert strays <= set().union(*(STORED[row].printed for row in named)), line


def test_a_study_in_the_notebook_begins_with_its_picture():
    for page in sorted((OPTIONS.parent / "notebook").glob("*.md")):
        if page.stem not in NO_STUDIES:
            first = page.read_text().split("\n\n")[1]
            assert re.fullmatch(r"!\[[^\]]+\]\(\.\./\.\./lab/results/[\w.-]+\.svg\)", first), (
                f"{page.name}: {first}"
            )


def test_every_known_figure_is_printed():
    everywhere = {}
    for page in PRINTING + OTHERS:
        for row, figures in _printed(page).items():
            everywhere.setdefault(row, set()).update(figures)
    assert {row: figures for row, figures in everywhere.items() if figures} == {
        name: row.printed for name, row in STORED.items() if row.printed
    }


def test_the_readme_shows_ten_figures_at_most_and_no_other_in_bold():
    printed = _printed(README)
    assert len(printed) <= 10
    bold = " ".join(re.findall(r"^\*\*(.+?)\*\*", README.read_text(), re.MULTILINE))
    assert numbers_in(bold) <= set().union(*printed.values())


def test_the_page_of_options_takes_its_figures_from_the_stored_ones():
    """Each number of a row is a figure of the rows that it names, or the condition under which that was measured."""
    conditions = {"1", "100", "200", "50", "25", "15"}  # Gbit/s, Mbit/s, MiB, data sets
    rows = [row for table in _tables(OPTIONS, "you see") for row in table.rows]
    assert len(rows) > 15
    for row in rows:
        measured, sources = row[-2], [number.strip() for number in row[-1].split(",") if number.strip()]
        figures = set().union(*(STORED[source].printed for source in sources))
        strays = numbers_in(" ".join(row[:-1])) - figures - conditions
        assert not strays, f"{row[0]}: {strays} are not among figures {sources}"
        assert not sources or numbers_in(measured) & figures, (
            f"{row[0]} names figures {sources} and shows none"
        )


def test_every_claim_has_a_verdict_and_a_command_or_a_reason():
    judged = [table for table in _tables(CLAIMS) if "verdict" in table.header]
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for table in judged for row in table.rows}
    assert set(rows) == ALL_CLAIMS
    for name, row in rows.items():
        assert row["verdict"] in VERDICTS, name
        assert row["result"], name
        assert row["verdict"] in UNTRIED or STORED[name].commands, (
            f"{name} says {row['verdict']} without a command"
        )


def test_a_verdict_follows_from_how_the_claim_was_tried():
    judged = [table for table in _tables(CLAIMS) if "verdict" in table.header]
    for table in judged:
        for name, _, _, how, _, verdict in table.rows:
            if how == "\u2013":
                assert verdict in UNTRIED, f"{name} {verdict}, and was not tried"
                continue
            means = set(how.split(", "))
            assert means <= HOW, f"{name}: {how}"
            assert verdict != "not yet", f"{name} was tried: {how}"
            assert verdict != "holds" or not means <= MODELS_ONLY, f"{name} was only simulated"


@pytest.mark.lab
def test_every_command_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # parsing `--report` makes its folder
    for name, row in STORED.items():
        assert row.commands or not row.figures, f"figures.json, row {name} has no command"
        for command in row.commands:
            assert command == NO_LONGER_RUN or _resolve(shlex.split(command)) is None


@pytest.mark.parametrize("page", PRINTING, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_of_a_table_is_one_of_its_rows(page):
    for table in _tables(page):
        for row in table.rows:
            shown = dict(zip(table.header, row, strict=True)).get("command", "")
            strays = set(_commands(shown)) - set(STORED[row[0]].commands)
            assert not strays, f"{page.name}, row {row[0]}: {strays} are not in figures.json"
    known = {command for row in STORED.values() for command in row.commands}
    said = set(re.findall(r"`(paceline (?:study|bench) [^`]*)`", page.read_text()))
    assert page is README or said <= known, said - known


@pytest.mark.parametrize(
    "command",
    [
        "paceline bench stop",
        "paceline bench step --speed 3",
        "paceline bench study rank-count",
        "paceline study overlord",
        "paceline study memory --rate 1gbit",
        "python -m pytest tests/oracles/test_nothing.py",
        "python -m device.elastic.nothing",
        "make coffee",
    ],
)
def test_a_command_that_does_not_exist_is_caught(command):
    with pytest.raises((USAGE_ERROR, ConfigurationError, ImportError, AssertionError)):
        _resolve(shlex.split(command))


def test_a_figure_that_was_not_measured_is_caught():
    assert rounds_to(0.0464, "0.046")
    assert not rounds_to(0.9148, "0.92")
    assert not rounds_to(1.005058, "1.00")
    with pytest.raises(KeyError):
        value_of("overhead > tiny/before_forward > nobody > backward_s")
    (table,) = tables("| # | here |\n|---|---|\n| A | `x 3` 4 ranks \u00d78, 1,024 ms |\n")
    assert figures_of(table) == {"A": {"4", "1,024"}}


def _commands(cell):
    return [code for code in re.findall(r"`([^`]+)`", cell) if " " in code and not code.startswith("--")]


def _resolve(words):
    """Find the command and let it take its options, without running it."""
    if words[0] == "paceline":
        _take(typer.main.get_command(app), words[1:])
    elif words[:3] == ["python", "-m", "pytest"]:
        assert words[3:], "tests are named"
        for path in words[3:]:
            assert (REPOSITORY / path).exists(), path
    elif words[:2] == ["python", "-m"]:  # a program of the tests' folder
        assert importlib.util.find_spec(words[2]) is not None
    else:
        raise AssertionError(f"no test knows how to look up {words[0]}")


def _take(command, words):
    """Go down the groups by name, then let the command take the other words."""
    while hasattr(command, "commands"):
        assert words[0] in command.commands, words[0]
        named = words[0] in EXPERIMENTS and hasattr(command, "loaded")
        command, words = command.loaded(words[0]) if named else command.commands[words[0]], words[1:]
    command.make_context(command.name, list(words))


@pytest.fixture
def refreshed(tmp_path, monkeypatch):
    """Refreshes a row of a folder of its own; returns its page and its figures afterwards."""
    monkeypatch.setattr(refresh_figures, "RESULTS", tmp_path)
    monkeypatch.setattr(refresh_figures, "REPOSITORY", tmp_path)
    monkeypatch.setattr(refresh_figures, "PAGES", ("page.md",))

    def refresh(figures, *lines):
        (tmp_path / "figures.json").write_text(json.dumps({"D5": {"figures": figures}}))
        page = tmp_path / "page.md"
        page.write_text("\n".join(("| # | measured | here |", "|---|---|---|", *lines, "")))
        refresh_figures.main(["D5"])
        return page.read_text().splitlines()[2:], json.loads((tmp_path / "figures.json").read_text())["D5"][
            "figures"
        ]

    return refresh


TEN, TWENTY = '10 * of("guidelines > all algorithms, 16 MiB > X") / 8', '20 + of("fuzz > num_programs") * 0'


def test_figures_are_refreshed_where_a_page_prints_them(refreshed):
    page, figures = refreshed([["7", TEN]], "| D5 | 7 | `7` 7 |", "| D6 | | 7 |")
    assert page == ["| D5 | 7 | `7` 10 |", "| D6 | | 7 |"]
    assert figures == [["10", TEN]]


def test_a_page_may_print_some_figures_of_a_row_in_any_order(refreshed):
    figures = [["7", TEN], ["8", TWENTY]]
    assert refreshed(figures, "| D5 | | 8, 7, 8 |")[0] == ["| D5 | | 20, 10, 20 |"]
    assert refreshed(figures, "| D5 | | 8 |")[0] == ["| D5 | | 20 |"]
    assert refreshed([["7", TEN], ["7", TWENTY]], "| D5 | | 7, 7 |")[0] == ["| D5 | | 10, 20 |"]


def test_a_figure_that_may_be_one_of_two_is_not_refreshed(refreshed):
    with pytest.raises(SystemExit, match="D5: a page prints 7, which is 2 different figures now"):
        refreshed([["7", TEN], ["7", TWENTY]], "| D5 | | 7 |")
    with pytest.raises(SystemExit, match="D5: a page prints 9, which is 0 different figures now"):
        refreshed([["7", TEN]], "| D5 | | 9 |")
    with pytest.raises(SystemExit, match="D5: no page prints its figures"):
        refreshed([["7", TEN]], "| D6 | | 7 |")
