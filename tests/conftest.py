"""The longest tests come first, half of them for each of two workers: who runs out of tests then finds short ones."""

import itertools


def pytest_collection_modifyitems(items):
    """Journeys and what is marked slow at the front of both halves of the list; a module's own stay together."""
    long = [item for item in items if _is_long(item)]
    short = [item for item in items if not _is_long(item)]
    groups = {}
    for item in long:
        groups.setdefault(item.nodeid if item.path.name == "test_docs.py" else item.path, []).append(item)
    first, second = (list(itertools.chain(*list(groups.values())[k::2])) for k in (0, 1))
    middle = len(short) // 2
    items[:] = [*first, *short[:middle], *second, *short[middle:]]


def _is_long(item):
    return item.path.parent.name == "journeys" or item.get_closest_marker("slow") is not None
