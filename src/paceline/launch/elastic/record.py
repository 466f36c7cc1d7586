"""The record that outlives the ranks of a job: that it has begun, and that it has ended. Two files in a shared folder.

Rules
1. `born` names the one job that may train. It is linked from a whole file, so it is there with its words or not at all.
   Agents touch it while they train. If none has for `STALE_S`, another job may take its place.
2. A job that is taken for dead is buried under its own name first. The kernel lets one agent do that.
3. `ended` is final: ranks that an engine starts afterwards have nothing to do.
4. Ages are compared with a file that is written now. So the hosts' clocks do not matter.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from pathlib import Path

STALE_S = 30.0
_TOUCH_S, _LOOK_S = 5.0, 0.5


class JobRecord:
    """The record of the job with this name, in a folder that all hosts share."""

    def __init__(self, folder: Path, name: str) -> None:
        self._begin = folder / f"paceline-{name or 'job'}"
        self._born, self.ended = self._file("born"), self._file("ended")
        self._touched_s = self._looked_s = -math.inf
        self._has_ended = False

    def claim(self, job: str) -> bool:
        """Return whether this job may train: no other one has begun. Local; a few file operations."""
        draft = self._file(f"draft-{job}-{os.getpid()}")
        draft.write_text(f"{job} {secrets.token_hex(4)}")
        with contextlib.suppress(OSError):  # another agent was earlier
            holder = self.holder()
            if holder not in ("", job) and draft.stat().st_mtime - self._born.stat().st_mtime > STALE_S:
                os.link(self._born, self._file(f"dead-{holder}"))
                self._born.unlink()
            os.link(draft, self._born)
        draft.unlink(missing_ok=True)
        return self.holder() == job

    def holder(self) -> str:
        """Return the name of the job that may train, or an empty one if none has begun."""
        return self.words().partition(" ")[0]

    def words(self) -> str:
        """Return what `born` says: equal on two hosts of a job only if they share the folder. Empty without it."""
        with contextlib.suppress(OSError):
            return self._born.read_text()
        return ""

    def touch(self) -> None:
        """Say that the job still trains. Called often, acts every few seconds."""
        if time.monotonic() - self._touched_s > _TOUCH_S:
            self._touched_s = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._born)

    def end(self) -> None:
        self.ended.touch()

    def has_ended(self) -> bool:
        """Return whether the job has ended well. Called often, looks twice a second."""
        if not self._has_ended and time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = time.monotonic()
            self._has_ended = self.ended.exists()
        return self._has_ended

    def _file(self, what: str) -> Path:
        return self._begin.with_name(f"{self._begin.name}.{what}")
