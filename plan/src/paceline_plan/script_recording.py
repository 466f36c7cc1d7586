"""Runs a training script for some steps in a process of its own, and returns the workload that it is.

That process runs this module, too: `python -m paceline_plan.script_recording TRACE NUM_STEPS SCRIPT ARGUMENTS...`
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import ConfigurationError, PacelineError
from paceline.given import check_output
from paceline.launch.watchdog import MARK, Watchdog
from paceline_plan.workload import NUM_WARM_UP, RecordedWorkload

_MOST_STEPS = 1_000_000
_MOST_SCRATCH_BYTES = 2**30
_OF_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_")


class RecordingError(PacelineError, RuntimeError):
    """A script could not be recorded; nothing of it runs any more."""


def record_script(
    script: Path, arguments: Sequence[str], num_steps: int, *, scratch: bool = False
) -> RecordedWorkload:
    """Run a script as one rank until it has trained `num_steps` after the warm-up; its output goes to stderr.

    It is stopped as if it had called `sys.exit()` within `optimizer.step()`. `scratch`: in a copy of this folder.
    Raises ConfigurationError if there is no such script or it never trained a step, RecordingError if it failed.
    """
    if not script.is_file():
        raise ConfigurationError(
            f"there is no script {script}. Pass a Python file, or a workload that was recorded."
        )
    if not 1 <= num_steps <= _MOST_STEPS:
        raise ConfigurationError(f"--steps {num_steps} is not a number of steps. Pass 1 to {_MOST_STEPS:,}.")
    launch_id = uuid.uuid4().hex
    with Watchdog(launch_id) as watchdog:
        trace = watchdog.folder / "trace.jsonl"
        words = [sys.executable, "-m", "paceline_plan.script_recording"]
        place = _copied(Path.cwd(), watchdog.folder / "scratch") if scratch else Path.cwd()
        own = script
        if scratch and script.resolve().is_relative_to(Path.cwd().resolve()):
            own = script.resolve().relative_to(Path.cwd().resolve())
        words += [str(trace), str(num_steps), str(own), *arguments]
        where = (
            "a copy of this folder"
            if scratch
            else f"{place}; it may overwrite files there, such as checkpoints"
        )
        advice = "" if scratch else ". --scratch runs it in a copy"
        print(
            f"paceline plan: running {script} for {num_steps + NUM_WARM_UP} steps in {where}{advice}.",
            file=sys.stderr,
            flush=True,
        )
        with _one_rank() as environment:
            code = subprocess.run(
                words, env=environment | {MARK: launch_id}, stdout=sys.stderr, check=False, cwd=place
            ).returncode
        seen = _seen(trace)
        if code != 0:
            raise RecordingError(
                f"{script} ended with exit code {code} after {seen.get('num_steps', 0)} steps; its own output is "
                "above. Make it run by itself first."
            )
        if not seen.get("num_steps"):
            raise ConfigurationError(
                f"{script} ended without a training step: {seen.get('num_forwards', 0)} forward passes of a module "
                "with trainable parameters, no backward with an optimizer's step after it. There is nothing to plan."
            )
        return RecordedWorkload.load(trace)


def record_into(
    out: Path, script: Path, arguments: Sequence[str], num_steps: int, *, scratch: bool = False
) -> RecordedWorkload:
    """Record a script and save the workload; ConfigurationError before the script runs if `out` cannot be written."""
    check_output(out, "--out")
    found = record_script(script, arguments, num_steps, scratch=scratch)
    found.save(out)
    return found


def _copied(folder: Path, into: Path) -> Path:
    """Copy a folder, links to folders as links, without hidden ones. Raises ConfigurationError if too large."""
    files: list[Path] = []
    links: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        links += [path for name in folders if (path := Path(root, name)).is_symlink()]
        files += [path for name in names if (path := Path(root, name)).is_file()]
        size_bytes = sum(path.stat().st_size for path in files)
        if size_bytes > _MOST_SCRATCH_BYTES:
            raise ConfigurationError(
                f"--scratch copies at most {_MOST_SCRATCH_BYTES / 2**30:g} GiB, and {folder} holds more. Run in a "
                "folder with the script alone, and give it its data by absolute path or by a link to their folder."
            )
    into.mkdir()
    for path in links:
        place = into / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path.resolve())
    for path in files:
        place = into / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)
    return into


def _seen(trace: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads(Path(f"{trace}.seen").read_text())
    except (OSError, ValueError):
        return {}
    return found


@contextlib.contextmanager
def _one_rank() -> Iterator[dict[str, str]]:
    """Yield an environment in which a script written for torchrun forms a group of one. Its port stays reserved."""
    # A launcher's, if this runs as a rank: with torchrun's the script would look for the agent's store.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with socket.socket() as holder:
        # Bound, so that no other process is given the port. With the option a store may listen there.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = str(holder.getsockname()[1])
        yield {**outside, **rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def main(words: Sequence[str]) -> None:
    """Run the script in a process of its own, and end it once enough steps are recorded."""
    from paceline_plan.workload_recording import record_workload  # noqa: PLC0415  imports torch

    trace, num_steps, script, *arguments = words
    recording = record_workload(trace, int(num_steps), Path(script).stem)

    def end() -> None:
        raise SystemExit(0)  # so that the script's own clean-up runs

    recording.when_done(end)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)  # as if python had been given the script
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        seen = {"num_forwards": recording.num_forwards, "num_steps": recording.num_steps}
        Path(f"{trace}.seen").write_text(json.dumps(seen))
        recording.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
