"""The rules of `house_lint.py`: each is broken by a small tree of files, and kept by this repository's form of it."""

from __future__ import annotations

import pytest

from harness import house_lint

TREE = {
    "one/large.py": '"""A room."""\n\nimport os\n\nLIMIT = 1\n\n\ndef public(a, b, c, d, e, f, g, h):\n    return os\n',
    "one/small.py": "class Box:\n    def __init__(self):\n        self._inside = 1\n",
    "two/user.py": "from pack.one.small import Box\n\n\ndef look():\n    return Box()._inside\n",
    "two/__init__.py": '"""See `user`, and `gone`."""\n',
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    for name, text in TREE.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(house_lint, "REPOSITORY", tmp_path)
    return house_lint.sources(["pack"])


def test_lines_of_code_leave_out_docstrings_imports_and_blanks(files):
    assert house_lint.measured(files)["pack/one"] == {"code": 6, "files": 2, "public": 3, "lines": 12}


def test_a_room_over_its_budget_is_named(files):
    rooms = house_lint.measured(files)
    fitting = {name: {"code": 9} for name in (*rooms, "pack")}
    assert list(house_lint.over_budget(rooms, fitting)) == []
    tight = fitting | {"pack/one": {"code": 5}, "pack/three": {"code": 1}}
    over, unknown = house_lint.over_budget(rooms, tight)
    assert over.startswith("pack/one: 6 code, and its budget is 5")
    assert "there is no pack/three" in unknown


def test_a_private_name_of_another_room_is_named(files):
    (found,) = house_lint.private_access(files, [])
    assert found.startswith("pack/two/user.py:5: _inside")
    assert list(house_lint.private_access(files, ["_inside"])) == []


def test_a_function_with_eight_parameters_is_named(files):
    assert [line.split(": ")[1] for line in house_lint.many_parameters(files, [])] == [
        "public has 8 parameters"
    ]
    assert list(house_lint.many_parameters(files, ["pack.one.large:public"])) == []
    assert len(list(house_lint.many_parameters(files, ["pack.one.large:public", "pack.gone:f"]))) == 1


def test_a_small_file_with_one_importer_is_named(files):
    (found,) = house_lint.small_files(files, [])
    assert found.startswith("pack/one/small.py: 3 lines, and only pack.two.user imports it")
    assert list(house_lint.small_files(files, ["pack/one/small.py"])) == []


def test_a_name_in_backticks_that_does_not_exist_is_named(files):
    (found,) = house_lint.unknown_names(files, [])
    assert "`gone`" in found
