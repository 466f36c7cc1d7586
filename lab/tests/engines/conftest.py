"""What the engines' tests share: a folder of a training, and hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine_clusters import Host
from harness.engine_jobs import TrainingFolder
from harness.terminal import environment
from paceline_lab.emulation import ClusterSpec, EmulatedCluster
from paceline_lab.errors import UnsupportedError


@pytest.fixture
def training(tmp_path: Path) -> TrainingFolder:
    return TrainingFolder(tmp_path)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Four hosts with a network between them, which has no way out."""
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(EmulatedCluster(ClusterSpec(hosts=4)))
        except UnsupportedError as error:
            pytest.skip(str(error))
        made = [Host(each, tmp_path) for each in cluster.hosts]
        try:
            yield made
        finally:
            for each in made:
                each.kill_all()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the parameters of a training of one rank that is not disturbed."""
    folder = TrainingFolder(tmp_path_factory.mktemp("undisturbed"))
    folder.let_it_end()
    env = environment(folder.path, cold=True) | {"PACELINE_PEERS": "local", "PACELINE_JOB": "undisturbed"}
    subprocess.run(
        [sys.executable, *folder.command], env=env, check=True, timeout=900, start_new_session=True
    )
    return folder.parameters()
