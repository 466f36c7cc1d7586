"""Tests compare bits, which a fit that does not wait for the compiler finds within rounding only."""

import pytest

from paceline.numba_cache import waiting


@pytest.fixture(scope="session", autouse=True)
def _waits_for_the_compiler():
    with waiting():
        yield
