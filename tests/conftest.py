"""Which tests are begun first, and which are quick."""

from __future__ import annotations

import itertools

import pytest

LAUNCHING = {"journeys", "emulation", "faults", "bench", "svm"}  # commands, clusters, timeouts, compilers


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests are quick unless something says otherwise."""
    if item.path.parent.name not in LAUNCHING and item.get_closest_marker("slow") is None:
        item.add_marker(pytest.mark.quick)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest tests first on every worker: who runs out of tests then finds short ones.

    Each worker is handed an equal part of the list, in order. A module's long tests stay together, pages of the docs
    apart.
    """
    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    groups: dict[object, list[pytest.Item]] = {}
    short: list[pytest.Item] = []
    for item in items:
        if not _is_long(item):
            short.append(item)
        else:
            groups.setdefault(item.nodeid if item.path.name == "test_docs.py" else item.path, []).append(item)
    ordered: list[pytest.Item] = []
    for worker in range(num_workers):
        size = (len(items) - len(ordered)) // (num_workers - worker)
        long = list(itertools.chain(*list(groups.values())[worker::num_workers]))
        ordered += [*long, *short[: max(size - len(long), 0)]]
        del short[: max(size - len(long), 0)]
    items[:] = [*ordered, *short]


def _is_long(item: pytest.Item) -> bool:
    return item.path.parent.name == "journeys" or item.get_closest_marker("slow") is not None
