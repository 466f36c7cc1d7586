"""A run folder: the records that every rank of a job writes. `run_reading` reads it. No torch.

    RUN/run.json           who runs what: one `RunHeader`
    RUN/rank3.jsonl        rank 3's lines: a `RankHeader`, then a `StepRecord` a step, and now and then others
    RUN/rank3.before.jsonl its lines of before, once there were many

Rules
1. A line is one write and is whole or cut off: a job that is killed leaves all steps but the one under way.
2. A rank writes its own file and reads none. Nothing here communicates, and nothing here ends a training: a rank that
   cannot write any more says so once and goes on without.
3. A folder belongs to one run. Lines of another one, which shares the folder by mistake, are left out and counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.errors import ConfigurationError
from paceline.given import parse_json
from paceline.observe.run_lines import made, to_line
from paceline.observe.run_records import Labels, RankHeader, Record, RunHeader
from paceline.version import __version__

RUN_FORMAT, RUN_VERSION = "paceline run", 1
MOST_BYTES = 16 * 2**20
"""Of one file of a rank; a rank has two at most."""
VARIABLE = "PACELINE_RECORD"
"""In the ranks' environment: the run folder that they record into."""
DETACHED = "detached"
"""A file in the folder: while it is there, ranks count their steps, and record none."""
_HEADER = "run.json"


def begin_run(folder: Path, command: Sequence[str]) -> RunHeader:
    """Make a run folder and its header. Raises ConfigurationError if it holds a run or cannot be made."""
    header = RunHeader(uuid.uuid4().hex, tuple(command), time.time(), __version__)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _HEADER).open("x") as file:
            json.dump({"format": RUN_FORMAT, "version": RUN_VERSION, **asdict(header)}, file)
    except FileExistsError as error:
        raise ConfigurationError(
            f"{folder} holds a run already, or is a file. One folder is for one run: pass another, or remove it."
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"the run folder {folder} cannot be written ({error.strerror}). Pass another one."
        ) from error
    return header


def header_of(folder: Path) -> RunHeader:
    """Return the header of the run in a folder. Raises ConfigurationError if this version reads none there."""
    try:
        found = parse_json((folder / _HEADER).read_bytes())
        is_run, version = found["format"] == RUN_FORMAT, found["version"]
        header = made(RunHeader, found) if is_run and version == RUN_VERSION else None
    except (OSError, ValueError, KeyError, TypeError):
        is_run, version, header = False, 0, None
    if not is_run:
        raise ConfigurationError(
            f"there is no run in {folder}: its {_HEADER} is missing or not whole. Pass a folder that "
            "`paceline doctor --record FOLDER -- COMMAND` has written."
        )
    if header is None:
        raise ConfigurationError(
            f"the run in {folder} is of version {version}, from Paceline {found.get('paceline')}; this is Paceline "
            f"{__version__}, which reads version {RUN_VERSION}. Read it with the version that wrote it."
        )
    return header


class RankWriter:
    """The writer of one rank's lines. Local. Only its constructor raises."""

    def __init__(self, folder: Path, header: RankHeader, most_bytes: int = MOST_BYTES) -> None:
        self._path = folder / f"rank{header.rank}.jsonl"
        self._most_bytes = most_bytes
        self._header, self._labels = header, Labels(())
        self._file = -1
        self._left_bytes = 0
        self._open()

    def write(self, record: Record) -> None:
        """Append a line. Begin a new file if the present one has become too long."""
        if self._file < 0:
            return
        line = to_line(record)
        if isinstance(record, Labels):
            self._labels = record
        if len(line) > self._left_bytes:
            self.close()
            try:
                self._path.replace(self._path.with_name(f"{self._path.stem}.before.jsonl"))
            except OSError as error:
                self._give_up(error)
                return
            self._open()
        self._append(line)

    def close(self) -> None:
        """Write no more. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _open(self) -> None:
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._left_bytes = self._most_bytes - os.fstat(self._file).st_size
        except OSError as error:
            self._give_up(error)
            return
        first = to_line(self._header)  # a life before may have been cut off in mid-line
        self._append(first if self._left_bytes == self._most_bytes else b"\n" + first)
        if self._labels.names:
            self._append(to_line(self._labels))

    def _append(self, line: bytes) -> None:
        if self._file < 0:
            return
        try:
            os.write(self._file, line)
            self._left_bytes -= len(line)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.close()
        sys.stderr.write(
            f"paceline: rank {self._header.rank} cannot write {self._path} ({error.strerror}); it trains on, and "
            "records no more.\n"
        )
