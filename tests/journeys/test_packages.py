"""What a release would upload: built from the tree, complete, with the metadata that an index shows."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email.parser import Parser

import pytest

from harness.installed_smoke import BUILT_FROM, PACKAGES, build, twelve_lines
from harness.terminal import REPOSITORY


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("hatchling")
    return build(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def metadata(built):
    return metadata_of(built[1])


def metadata_of(path):
    with zipfile.ZipFile(path) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(wheel.read(name).decode())


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "paceline"])
def test_each_other_package_is_a_wheel_that_needs_this_version_and_adds_to_it(package, metadata, tmp_path):
    _, wheel = build(tmp_path / package, package)
    source = REPOSITORY / PACKAGES[package] / "src"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert f"= {package}" in archive.read(entry_points).decode()
    assert names == {
        str(path.relative_to(source))
        for path in source.glob(f"{package}/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    its = metadata_of(wheel)
    assert its["Version"] == metadata["Version"]
    assert its["Requires-Python"] == metadata["Requires-Python"]
    (needed,) = (text for text in its.get_all("Requires-Dist") if re.match(r"paceline\b(?!-)", text))
    assert needed.endswith(f"=={metadata['Version']}")


@pytest.mark.processes
def test_the_wheel_holds_the_package_and_nothing_else(built):
    source = REPOSITORY / "src"
    ours = {str(path.relative_to(source)) for path in source.glob("paceline/**/*") if path.is_file()}
    ours = {name for name in ours if "__pycache__" not in name}
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert "paceline = paceline.cli:main" in wheel.read(entry_points).decode()
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    pages = {"paceline/cli/pages/glossary.md", "paceline/cli/pages/troubleshooting.md"}
    assert names == ours | pages
    assert "paceline/py.typed" in names
    assert "paceline/integrations/at_start/sitecustomize.py" in names


@pytest.mark.processes
def test_the_sdist_holds_what_the_wheel_is_built_from(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "src/paceline/__init__.py"} <= names
    pages = {"docs/glossary.md", "docs/troubleshooting.md"}  # which the wheel takes from there
    assert {name for name in names if name.startswith(("tests", "docs", "benchmarks"))} == pages


@pytest.mark.processes
def test_an_index_shows_the_python_versions_that_the_readme_says(metadata):
    lowest, highest = re.search(
        r"Python 3\.(\d+) to 3\.(\d+)", (REPOSITORY / "README.md").read_text()
    ).groups()
    said = {f"3.{minor}" for minor in range(int(lowest), int(highest) + 1)}
    classifiers = metadata.get_all("Classifier")
    found = {name.rpartition(" ")[2] for name in classifiers if re.search(r":: 3\.\d+$", name)}
    assert found == said
    assert metadata["Requires-Python"] == f">=3.{lowest}"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert not [name for name in classifiers if name.startswith("License ::")], "the expression says it"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Summary"]
    assert "Data-parallel training on PyTorch" in metadata.get_payload()


@pytest.mark.processes
def test_an_index_shows_no_link_or_picture_that_leads_nowhere(metadata):
    """An index has none of the files beside the README."""
    shown = metadata.get_payload()
    others = [REPOSITORY / folder / "README.md" for folder in PACKAGES.values() if folder != "."]
    for text in (shown, *(path.read_text() for path in others)):
        targets = re.findall(r"\]\(([^)]*)\)", text)
        assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert "Two lines of your loop change:\noutlive a lost rank." in shown, "a link keeps its text"


@pytest.mark.processes
def test_building_leaves_nothing_in_the_tree(built):
    """`pip install .` in a clone builds there."""
    tree = built[0].parent / "tree"
    left = {path.name for path in tree.iterdir()} - {"__pycache__"}  # of hatch_build.py, which git ignores
    assert left == {*BUILT_FROM, "docs"}
    assert not list(tree.rglob("*.egg-info"))


def test_the_smoke_test_of_a_release_runs_the_readmes_lines():
    assert "from paceline import DistributedDataParallel" in twelve_lines()
    compile(twelve_lines(), "train.py", "exec")
