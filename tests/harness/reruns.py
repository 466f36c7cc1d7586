"""Runs failed tests marked `clock` again. Each rerun is printed with its failure; more than three fail the run.

Continuous integration (`.ci/run`) also runs other failed tests that start processes once more, by `--reruns 1`.

It also prints each failure as it happens: a run that is ended from outside never comes to its summary.
"""

from __future__ import annotations

import pytest

TRIES = 3  # of a test marked `clock`
MOST_RERUNS = 3  # of all tests together

_reruns: list[tuple[str, str]] = []


class _Failures:
    """Prints each failure at once."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print one failure; its end has the reason."""
        terminal = self._plugins.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line("")
            terminal.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)
            terminal.write_line(report.longreprtext[-4000:])


def pytest_configure(config: pytest.Config) -> None:
    """Print failures in the process that has the terminal, not in its workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests that depend on measured times run again. No other test may ask for it."""
    for item in items:
        if item.get_closest_marker("flaky"):
            raise pytest.UsageError(
                f"{item.nodeid}: only tests marked `clock` are run again, not `flaky` ones"
            )
        if item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=TRIES - 1))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the failure before a rerun."""
    if str(report.outcome) == "rerun":  # of pytest-rerunfailures
        _reruns.append((report.nodeid, report.longreprtext))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that needed too many reruns."""
    if len(_reruns) > MOST_RERUNS and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each rerun with the failure before it."""
    if not _reruns:
        return
    terminalreporter.section(f"{len(_reruns)} reruns (a run fails with more than {MOST_RERUNS})")
    for nodeid, text in _reruns:
        terminalreporter.line(f"{nodeid} was run again; first it failed:", yellow=True)
        terminalreporter.line(text)
