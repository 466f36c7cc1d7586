"""`notebook_launcher`: run a function of a notebook on several ranks, in fresh processes, and return their answers.

Fresh processes, because a fork of a kernel that has computed cannot compute on several threads or on its GPU again.
The function travels by cloudpickle, through a private folder that goes with the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigurationError, PacelineError

_PR_SET_PDEATHSIG = 1


def notebook_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> list[Any]:
    """Call `function(*args)` on every rank, as `paceline run` starts a script, and return what the ranks return.

    The function opens the process group itself, as a script does. What the ranks print appears in the cell. A name
    that the function uses is copied to the ranks; what they change there does not come back.

    Args:
        function: Any function, also one that a cell defines.
        args: Its arguments.
        num_processes: How many ranks; torchrun's `--nproc-per-node`.

    Returns:
        What each rank returned, in the order of ranks.

    Contract:
        Local, for a process that is no rank itself.  Blocks: until every rank has ended.  An interrupt of the cell
        stops them.

    Raises:
        ConfigurationError: cloudpickle is missing, or the function cannot be copied. Nothing was started.
        LaunchError: A rank failed. The message says which; its output is above.
    """
    from paceline.launch.launch_errors import LaunchError  # noqa: PLC0415  the ranks' side does not need it

    if num_processes < 1:
        raise ConfigurationError(
            f"num_processes={num_processes}: notebook_launcher needs at least 1 process."
        )
    cloudpickle = _cloudpickle()
    with tempfile.TemporaryDirectory(prefix="paceline-notebook-") as name:
        folder = Path(name)
        try:
            (folder / "call").write_bytes(cloudpickle.dumps((function, tuple(args))))
        except Exception as error:  # whatever the object's own way of being copied raises
            raise ConfigurationError(
                f"notebook_launcher cannot copy {getattr(function, '__name__', function)!r} to the ranks: {error}. "
                "Make what cannot be copied (a lock, a file, a process group) within the function."
            ) from error
        last_words = _run(folder, num_processes)
        answers = [folder / f"rank{rank}" for rank in range(num_processes)]
        if last_words is not None or not all(answer.exists() for answer in answers):
            raise LaunchError(last_words or "the ranks ended without an answer; their words are above.")
        return [cloudpickle.loads(answer.read_bytes()) for answer in answers]


def _run(folder: Path, num_processes: int) -> str | None:
    """Start the ranks and print what they print; the launcher's last words if it failed."""
    command = [sys.executable, "-u", "-m", __name__, str(folder), str(num_processes)]
    # In this process's group: Jupyter sends its signals to all of it, as a terminal does.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        assert launcher.stdout is not None
        try:
            for line in launcher.stdout:
                sys.stdout.write(line)  # of a notebook: in the output of the cell
                sys.stdout.flush()
        except BaseException:  # KeyboardInterrupt, most of all
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(1)  # it may have been told, too
            launcher.send_signal(signal.SIGINT)
            launcher.wait()
            raise
    if launcher.returncode == 0:
        return None
    last_words = folder / "last_words"
    return (
        last_words.read_text() if last_words.exists() else f"the launcher ended with {launcher.returncode}."
    )


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigurationError(
            "notebook_launcher copies a cell's function by cloudpickle, which is not installed. Nothing was started. "
            "pip install cloudpickle"
        ) from None
    return cloudpickle  # type: ignore[no-any-return]


def _launch(folder: Path, num_processes: str) -> None:
    from paceline.launch import launch, parse  # noqa: PLC0415  torchrun, which the ranks do not need

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # ends with the notebook's process
    try:
        launch(
            parse(["--nproc-per-node", num_processes, "-m", "paceline.launch.notebook", str(folder)]),
            note=lambda line: print(line, flush=True),  # noqa: T201
        )
    except PacelineError as error:
        (folder / "last_words").write_text(str(error))
        sys.exit(1)


def _call(folder: Path) -> None:
    cloudpickle = _cloudpickle()
    function, args = cloudpickle.loads((folder / "call").read_bytes())
    answer = cloudpickle.dumps(function(*args))
    (folder / f"rank{os.environ['RANK']}").write_bytes(answer)


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) == 2:
        _launch(Path(given[0]), given[1])
    else:
        _call(Path(given[0]))
