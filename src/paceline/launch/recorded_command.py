"""Runs any command with its ranks recorded, and says what delays them: while it runs, and at its end.

Rules
1. The command is the user's: its output passes through, its exit code is ours, a signal to us reaches it.
2. Nothing of it outlives us, also if we are killed: the watchdog ends whatever bears this launch's mark.
3. Looking costs at most 1 % of one core's time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.diagnosis import Diagnosis, diagnose
from paceline.errors import ConfigurationError
from paceline.integrations import at_start
from paceline.launch.watchdog import MARK, Watchdog
from paceline.observe import open_metrics, write_metrics
from paceline.observe.run_folder import DETACHED, begin_run
from paceline.observe.run_reading import Run, read_run

_LOOK_S = 2.0  # between two looks, at least
_LOOK_RATIO = 100  # of what a look takes
_POLL_S = 0.2


def run_recorded(
    command: Sequence[str],
    folder: Path | None,
    num_steps: int | None,
    note: Callable[[str], None],
    *,
    is_paused: bool = False,
    is_quiet: bool = False,
    metrics: Path | None = None,
) -> tuple[Diagnosis, int]:
    """Run `record_command` and diagnose. Recording ends after `num_steps`; None: never.

    Returns the diagnosis at its end and the exit code. `note` is called when the cause of delays changes, or when
    something is wrong with the ranks' numbers. Each diagnosis is also written into the file `metrics`.
    Raises ConfigurationError, before anything starts: as `record_command`, or that file cannot be written.
    """
    said: object = None
    health: set[str] = set()

    def export(found: Diagnosis | None) -> None:
        if metrics is not None:
            write_metrics(metrics, open_metrics(diagnosis=found))

    def look(place: Path) -> None:
        nonlocal said
        run = read_run(place)
        diagnosis = diagnose(run)
        export(diagnosis)
        for words in diagnosis.health:
            if words not in health:
                health.add(words)
                note(words)
        found = diagnosis.finding
        what = found and (found.kind, found.rank, found.phase, found.cause)
        if found is not None and what != said:
            note(found.sentence)
        said = what
        if num_steps is not None and _num_common(run) >= num_steps and not (place / DETACHED).exists():
            (place / DETACHED).touch()
            note(f"{num_steps} steps are recorded; the command runs on unrecorded")

    export(None)
    run, code = record_command(command, folder, look, is_paused=is_paused, is_quiet=is_quiet)
    diagnosis = diagnose(run)
    export(diagnosis)
    return diagnosis, code


def record_command(
    command: Sequence[str],
    folder: Path | None,
    look: Callable[[Path], None],
    *,
    is_paused: bool = False,
    is_quiet: bool = False,
) -> tuple[Run, int]:
    """Run a command, recording its ranks; returns the run and the exit code, 128 + a signal's number if that ended it.

    `folder` is new and kept; None: a temporary one. `look` is called now and then with it. `is_paused`: it begins
    unrecorded. `is_quiet`: the command's output goes to stderr. Raises ConfigurationError, before anything starts: no
    such command, or the folder cannot be used.
    """
    if shutil.which(command[0]) is None:
        raise ConfigurationError(
            f"there is no command {command[0]}. Pass one that a shell would run, such as `paceline doctor -- torchrun "
            "train.py`."
        )
    launch_id = uuid.uuid4().hex
    with Watchdog(launch_id) as watchdog:
        place = folder or watchdog.folder / "run"
        begin_run(place, command)
        if is_paused:
            (place / DETACHED).touch()
        environment = {**os.environ, **at_start.recording_environment(place), MARK: launch_id}
        process = subprocess.Popen(command, env=environment, stdout=sys.stderr if is_quiet else None)
        with _signals_passed_on(process):
            _watch(process, place, look)
        run = read_run(place)
    return run, process.returncode if process.returncode >= 0 else 128 - process.returncode


def _watch(process: subprocess.Popen[Any], place: Path, look: Callable[[Path], None]) -> None:
    next_look_s = time.monotonic() + _LOOK_S
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
        began_s = time.monotonic()
        if began_s >= next_look_s:
            look(place)
            next_look_s = began_s + max(_LOOK_S, _LOOK_RATIO * (time.monotonic() - began_s))


def _num_common(run: Run) -> int:
    complete = len(run.ranks) == run.num_ranks
    return min((len(rank.steps) for rank in run.ranks), default=0) if complete else 0


@contextlib.contextmanager
def _signals_passed_on(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Let the command end by itself on Ctrl-C, which it gets too, and on signals that only this process gets."""

    def pass_on(number: int, _: Any) -> None:
        if number != signal.SIGINT:  # the terminal sends that one to both
            process.send_signal(number)

    before = {x: signal.signal(x, pass_on) for x in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
