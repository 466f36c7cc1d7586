"""What the README, the page of benchmarks and the page of claims print is what was measured, by commands that exist."""

from __future__ import annotations

import re
import shlex

import pytest
import typer

from harness.figures import figures_of, numbers_in, rounds_to, tables, value_of
from harness.terminal import REPOSITORY
from paceline.cli.app import app
from paceline.errors import ConfigurationError
from paceline_lab.experiments.registry import EXPERIMENTS

README, BENCHMARKS, CLAIMS, OPTIONS = (
    REPOSITORY / name
    for name in ("README.md", "docs/benchmarks.md", "docs/claims.md", "docs/guide/which-option.md")
)
# What the parser raises for bad usage; typer has moved it between packages.
USAGE_ERROR = typer.BadParameter.__mro__[1]
VERDICTS = {"holds", "holds in part", "refuted", "not yet", "cannot be tested here"}
ALL_CLAIMS = {
    *(f"D{number}" for number in range(1, 9)),
    *("G1-4", "G5", "G6"),
    *(f"H{number}" for number in range(1, 5)),
    *(f"{letter}{number}" for letter in "SAZ" for number in range(1, 4)),
    *(f"L{number}" for number in range(1, 6)),
    *(f"M{number}" for number in range(1, 5)),
}


def _tables(page, first="#"):
    return [table for table in tables(page.read_text()) if table.header[0] == first]


def _figures(page):
    """The tables that print figures, and the one at the end that says where each is."""
    *printing, sources = _tables(page)
    assert sources.header == ["#", "figure", "value of"]
    return printing, sources


@pytest.mark.parametrize("page", [BENCHMARKS, CLAIMS], ids=lambda page: page.stem)
def test_every_figure_is_the_measured_one(page):
    printing, sources = _figures(page)
    where = {}
    for row, figure, source in sources.rows:
        where.setdefault(row, set()).add(figure)
        value = value_of(source.strip("`"))
        assert rounds_to(value, figure), f"{page.name}, row {row}: {figure}, but {source} is {value}"
    printed = {}
    for table in printing:
        for row, figures in figures_of(table).items():
            assert row not in printed, f"{page.name}: two rows are called {row}"
            printed[row] = figures
    assert {row: figures for row, figures in printed.items() if figures} == where


def test_the_readmes_figures_are_the_ten_of_the_page_of_benchmarks():
    (ten,) = _tables(README)
    assert len(ten.rows) <= 10
    assert ten == _tables(BENCHMARKS)[0]
    headline = re.findall(r"^\*\*(.+?)\*\*", README.read_text(), re.MULTILINE)[0]
    assert headline.startswith("A step of a wide MLP"), "figure 4"
    assert numbers_in(headline) == figures_of(ten)["4"]


def test_the_page_of_options_takes_its_figures_from_the_page_of_benchmarks():
    """Each number of a row is a figure of the rows that it names, or the condition under which that was measured."""
    printed = {
        row: figures for table in _figures(BENCHMARKS)[0] for row, figures in figures_of(table).items()
    }
    conditions = {"1", "100", "200", "50", "25", "15"}  # Gbit/s, Mbit/s, MiB, data sets
    rows = [row for table in _tables(OPTIONS, "you see") for row in table.rows]
    assert len(rows) > 15
    for row in rows:
        measured, sources = row[-2], [number.strip() for number in row[-1].split(",") if number.strip()]
        figures = set().union(*(printed[source] for source in sources))
        strays = numbers_in(" ".join(row[:-1])) - figures - conditions
        assert not strays, f"{row[0]}: {strays} are not among figures {sources}"
        assert not sources or numbers_in(measured) & figures, (
            f"{row[0]} names figures {sources} and shows none"
        )


def test_every_claim_has_a_verdict_and_a_command_or_a_reason():
    printing, _ = _figures(CLAIMS)
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for table in printing for row in table.rows}
    assert set(rows) >= ALL_CLAIMS
    for name, row in rows.items():
        assert row["verdict"] in VERDICTS, name
        assert row["here"], name
        untried = row["verdict"] in {"not yet", "cannot be tested here"}
        assert untried or _commands(row["command"]), f"{name} says {row['verdict']} without a command"


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, BENCHMARKS, CLAIMS], ids=lambda page: page.stem)
def test_every_command_exists(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # parsing `--report` makes its folder
    found = [
        command
        for table in _tables(page)
        for row in table.rows
        for command in _commands(dict(zip(table.header, row, strict=True)).get("command", ""))
    ]
    assert found
    for command in found:
        _resolve(shlex.split(command))


@pytest.mark.parametrize(
    "command",
    [
        "paceline bench stop",
        "paceline bench step --speed 3",
        "paceline bench study rank-count",
        "paceline study overlord",
        "paceline study memory --rate 1gbit",
        "python -m pytest tests/oracles/test_nothing.py",
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
    else:
        raise AssertionError(f"no test knows how to look up {words[0]}")


def _take(command, words):
    """Go down the groups by name, then let the command take the other words."""
    while hasattr(command, "commands"):
        assert words[0] in command.commands, words[0]
        named = words[0] in EXPERIMENTS and hasattr(command, "loaded")
        command, words = command.loaded(words[0]) if named else command.commands[words[0]], words[1:]
    command.make_context(command.name, list(words))
