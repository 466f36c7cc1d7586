"""The longest tests come first: whoever runs out of tests then finds short ones to take over."""


def pytest_collection_modifyitems(items):
    """Journeys and what is marked slow before all others."""
    items.sort(key=lambda item: item.path.parent.name != "journeys" and not item.get_closest_marker("slow"))
