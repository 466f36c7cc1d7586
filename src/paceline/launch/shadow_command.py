"""`paceline shadow`: finds the job that trains this script on this host, and runs the script as its shadow."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from paceline.elastic.agent_connection import SHADOW, AgentConnection
from paceline.errors import ConfigurationError
from paceline.launch.agent import launch
from paceline.launch.command_line import parse
from paceline.launch.elastic.shadows import PREFIX, name_of

_NAMES = Path("/proc/net/unix")


def follow(
    folder: Path, keep: int, write_every_s: float, words: list[str], note: Callable[[str], None]
) -> None:
    """Run a script as the shadow of the job that trains it here; blocks until the job has ended.

    Args:
        folder: Where it writes checkpoints.
        keep: How many it keeps, at least 1.
        write_every_s: Seconds between two of them.
        words: The script and its arguments, as `paceline run` was given them; before it `-m` for a module.
        note: Called with a line for the user.

    Raises:
        ConfigurationError: No such job trains here, several do, or it does not use `Elastic`.
        LaunchError: The shadow failed; its own message is above.
    """
    if not words:
        raise ConfigurationError(
            "pass the job's script behind --, as in `paceline shadow checkpoints -- train.py`, with the arguments that "
            "`paceline run` was given."
        )
    arguments = parse(["--nproc-per-node", "1", "--hang-after", "0", *words])
    name = _job_of(name_of(arguments), arguments.script)
    line = AgentConnection.to_job(name)
    note("waits for the job's ranks to reach paceline.Elastic")
    if line.hear() is None:
        raise ConfigurationError(
            f"the job of {arguments.script} ended, and its ranks had not reached paceline.Elastic. A shadow follows "
            "what Elastic hands out: iterate over `elastic.steps(loader)`."
        )
    line.close()
    orders = {"folder": str(folder), "keep": keep, "write_every_s": write_every_s, "job": name}
    os.environ[SHADOW] = json.dumps(orders)
    launch(arguments, note)


def _job_of(beginning: str, script: str) -> str:
    """Return the name of the one job whose name begins so."""
    names = [line.split()[-1] for line in _NAMES.read_text().splitlines() if f"@{PREFIX}/" in line]
    jobs = sorted({name[1:] for name in names if name[1:].startswith(f"{PREFIX}/{os.getuid()}/")})
    found = [job for job in jobs if job.startswith(f"{beginning}/")]
    if len(found) == 1:
        return found[0]
    if found:
        launchers = ", ".join(map(_pid_of, found))
        raise ConfigurationError(
            f"{len(found)} jobs train {script} with these arguments on this host (launchers {launchers}). A shadow "
            "follows one: give each job an argument of its own."
        )
    others = [_command_of(_pid_of(job)) for job in jobs]
    hint = f" These do: {'; '.join(others)}." if others else ""
    raise ConfigurationError(
        f"no job under `paceline run --min-ranks` trains {script} with these arguments on this host.{hint} Give the "
        "same words behind -- as behind `paceline run`'s own options."
    )


def _pid_of(job: str) -> str:
    return job.rpartition("/")[2].partition(".")[0]


def _command_of(pid: str) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()[:200]
        )
    return f"process {pid}"
