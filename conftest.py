"""How tests are run: in warm workers, the long ones first. `harness` guards what they start, and reruns."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from harness import byte_code, warm

# An example, and finding one, may take as long as the machine takes for it. They are the same every time, so that what
# one machine finds red is red on others; `--hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile(
    "explore", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("paceline", hypothesis.settings.get_profile("explore"), derandomize=True)
hypothesis.settings.load_profile("paceline")

pytest_plugins = ["harness.start_guard", "harness.reruns"]


def pytest_configure(config: pytest.Config) -> None:
    """A worker is a fork of the warm server, but the interpreters that tests start by its name are fresh ones."""
    if hasattr(config, "workerinput"):
        if (real := Path(sys.executable).with_name("real")).is_symlink():
            sys.executable = str(real.readlink())
    else:
        config.option.testrunuid = os.environ["PYTEST_XDIST_TESTRUNUID"] = uuid.uuid4().hex


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Workers are forks of the server (`warm.py`), which has what they would import: it is imported once."""
    rewriting = threading.Thread(target=byte_code.rewrite_tests, args=(config,))
    rewriting.start()
    byte_code.import_beside_the_server()
    for spec in (spec for spec in specs if spec.popen):
        spec.python = str(warm.folder() / "python")
    rewriting.join()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest tests first on every worker: who runs out of tests then finds short ones.

    Each worker is handed an equal part of the list, in order. A module's long tests stay together; pages of the docs
    are apart; what one package has numba compile stays together: two workers would compile it twice.
    """
    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    groups: dict[object, list[pytest.Item]] = {}
    short: list[pytest.Item] = []
    for item in items:
        if group := _long_group(item):
            groups.setdefault(group, []).append(item)
        else:
            short.append(item)
    ordered: list[pytest.Item] = []
    for worker in range(num_workers):
        size = (len(items) - len(ordered)) // (num_workers - worker)
        long = list(itertools.chain(*list(groups.values())[worker::num_workers]))
        ordered += [*long, *short[: max(size - len(long), 0)]]
        del short[: max(size - len(long), 0)]
    items[:] = [*ordered, *short]


def pytest_collection_finish() -> None:
    """What was imported to collect the tests stays: no collection of garbage need look at it again."""
    gc.freeze()


def _long_group(item: pytest.Item) -> object:
    """What a long test stays together with; None for a short test."""
    slow = item.get_closest_marker("slow")
    if slow and slow.kwargs.get("apart"):
        return item.nodeid
    if item.get_closest_marker("compiles"):
        return item.path.relative_to(item.config.rootpath).parts[0]
    return item.path if slow else None


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As many threads compute as in a rank."""
    import torch  # the server of `warm.py` has it already; the controller needs none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
