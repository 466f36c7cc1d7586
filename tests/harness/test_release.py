"""Refusals of `make release` before it builds, and what it takes from the changelog."""

from __future__ import annotations

import pytest

from harness.release import REPOSITORY, check_commit, notes, version_of

CHANGELOG = (
    "# Changelog\n\n## 0.2.0 (2026-12-01)\n\nnew\n\n### Training\n- x, ([a](docs/a.md),\n  [b](docs/b.md)) and "
    "[a page](docs/c.md) and [pip](https://pip.pypa.io)\n\n## 0.1.0 (unreleased)\n\nold\n"
)


def test_notes_are_the_section_of_that_version_alone():
    assert notes(CHANGELOG, "0.2.0") == (
        "new\n\n### Training\n- x, and a page and [pip](https://pip.pypa.io)\n"
    )


@pytest.mark.parametrize(
    ("version", "says"), [("0.1.0", "calls 0.1.0 unreleased"), ("0.3.0", "no section"), ("0.2", "no section")]
)
def test_a_version_without_notes_is_refused(version, says):
    with pytest.raises(SystemExit, match=says):
        notes(CHANGELOG, version)


def test_only_the_tagged_commit_as_it_is_becomes_a_release():
    check_commit("0.2.0", "v0.2.0\nother\n", "")
    with pytest.raises(SystemExit, match=r"not tagged v0.2.0"):
        check_commit("0.2.0", "v0.2.0rc1\nv0.1.0\n", "")
    with pytest.raises(SystemExit, match=r"Commit or remove these first:\n M README.md"):
        check_commit("0.2.0", "v0.2.0\n", " M README.md\n")


def test_the_source_has_a_version_and_the_changelog_its_section():
    version = version_of((REPOSITORY / "src/paceline/version.py").read_text())
    assert f"\n## {version}" in (REPOSITORY / "CHANGELOG.md").read_text()
    with pytest.raises(SystemExit, match="no __version__"):
        version_of("version = 1")
