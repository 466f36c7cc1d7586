"""What another package of this repository brings, where it is not installed: named with the line that installs it."""

import re
from unittest import mock

import pytest

from paceline import extras
from paceline.errors import ConfigurationError
from paceline.launch import parse
from paceline.reductions import choose_reduction


def nothing_installed():
    return mock.patch.object(extras, "entry_points", return_value=[])


@pytest.mark.parametrize(
    ("ask", "package", "folder"),
    [
        (lambda _: choose_reduction("adasum"), "reduction='adasum' comes with the package", "adasum"),
        (
            lambda _: choose_reduction("bounded_loss"),
            "reduction='bounded_loss' comes with the package",
            "lossy",
        ),
        (
            lambda _: choose_reduction("parameter_servers"),
            "comes with the package paceline-servers",
            "servers",
        ),
        (lambda script: parse(["--servers=2", script]), "`paceline run --servers` comes with", "servers"),
    ],
)
def test_a_name_whose_package_is_missing_is_answered_with_the_install_line(ask, package, folder, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    with nothing_installed(), pytest.raises(ConfigurationError, match=re.escape(package)) as caught:
        ask(str(script))
    assert f"install it: `pip install ./{folder}`" in str(caught.value)


def test_an_unknown_name_lists_what_is_installed():
    names = "'mean', 'adasum', 'bounded_loss', 'noise_scale', 'parameter_servers' or"
    with pytest.raises(ConfigurationError, match=names):
        choose_reduction("median")
    with nothing_installed(), pytest.raises(ConfigurationError, match=r"Give one of 'mean' or"):
        choose_reduction("median")
