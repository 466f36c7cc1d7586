"""A cluster to test on, and the reason where there can be none."""

from __future__ import annotations

import sys
import types

import pytest

from harness import warm
from paceline_lab.emulation import ClusterSpec, EmulatedCluster
from paceline_lab.errors import UnsupportedError


@pytest.fixture(scope="session")
def _emulation_is_possible():
    """Skips with the product's own words where this machine or user cannot emulate hosts."""
    try:
        with EmulatedCluster(ClusterSpec(hosts=1)):
            return True
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _warm_laboratory(monkeypatch):
    """What makes the hosts imports pyroute2 and builds its tables: half a second, which a warm Python has behind it."""
    python = types.SimpleNamespace(platform=sys.platform, executable=str(warm.folder() / "python"))
    monkeypatch.setattr("paceline_lab.emulation.cluster.sys", python)


@pytest.fixture
def cluster(_emulation_is_possible):
    """Opens clusters from the words of the command line; all are closed at the end."""
    opened = []

    def open_cluster(**words):
        made = EmulatedCluster(ClusterSpec.parse(**words))
        made.__enter__()
        opened.append(made)
        return made

    yield open_cluster
    for made in opened:
        made.__exit__(None, None, None)


@pytest.fixture
def possible(_emulation_is_possible):
    """For tests that start a command which emulates."""
