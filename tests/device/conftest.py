"""Begins the build of the device when its tests have been collected, beside the tests before them.

Removes what its ranks have left at the end.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
from pathlib import Path

import pytest

from device import ranks
from device.late import build


def pytest_collection_finish(session: pytest.Session) -> None:
    """In one process of a run; those that come to a test of the device meanwhile wait for it."""
    of_a_worker = getattr(session.config, "workerinput", None)
    if session.config.option.collectonly or (of_a_worker and of_a_worker["workerid"] != "gw0"):
        return
    here = Path(__file__).parent
    if not any(here in item.path.parents for item in session.items):
        return
    if build.missing() is None and not build.is_built():
        building = subprocess.Popen([sys.executable, "-m", "device.late.build"], cwd=here.parent)
        atexit.register(building.terminate)


def pytest_sessionfinish() -> None:
    ranks.remove_folder()
