"""A command that a fork runs (`warm.py`) looks from outside like the requested process."""

import contextlib
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness import warm
from harness.terminal import run, started

pytestmark = pytest.mark.processes

PRINTS = "import os, sys; print(__name__, sys.argv, os.environ['X'], os.getcwd()); print('to stderr', file=sys.stderr)"


def test_it_has_its_own_words_environment_folder_and_files(tmp_path):
    done = run(["python", "-c", PRINTS, "a", "b c"], cwd=tmp_path, env={"X": "y"})
    assert done.code == 0, done.err
    assert done.out == f"__main__ ['-c', 'a', 'b c'] y {tmp_path}\n"
    assert done.err == "to stderr\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
    ],
)
def test_it_ends_as_an_interpreter_does(code, expected, tmp_path):
    for cold in (False, True):
        done = run(["python", "-c", code], cwd=tmp_path, cold=cold)
        assert done.code == expected
        assert ("ZeroDivisionError: division by zero" in done.err) == (code == "1 / 0")


def test_torch_is_there_at_once_and_processes_that_it_starts_are_warm_too(tmp_path):
    code = "import sys; known = 'torch' in sys.modules; import subprocess as s; print(known, flush=True)\n"
    again = f"s.run([sys.executable, '-c', {code!r}], check=True)"
    assert run(["python", "-c", code + again], cwd=tmp_path).out == "True\nTrue\n"
    assert run(["python", "-B", "-c", code + again], cwd=tmp_path).out == "True\nTrue\n"
    assert run(["python", "-I", "-c", code], cwd=tmp_path).out == "False\n"
    assert run(["python", "-c", code], cwd=tmp_path, cold=True).out == "False\n"


def test_it_begins_with_what_its_starter_wants_first(tmp_path):
    """A fork imports a `sitecustomize` on PYTHONPATH as a fresh interpreter does.

    `paceline run --replace-ddp` needs it.
    """
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.customized = __name__")
    for cold in (False, True):
        done = run(
            ["python", "-c", "import sys; print(sys.customized)"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path)},
            cold=cold,
        )
        assert done.out == "sitecustomize\n", done.err


# Not one long sleep: Python would not notice an interrupt that comes just before the sleep begins.
WAITS = "import os, time; print(os.getpid(), flush=True); [time.sleep(0.01) for _ in iter(int, 1)]"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_the_fork(number, tmp_path):
    with started(["python", "-c", WAITS], tmp_path) as process:
        fork = int(process.stdout.readline())
        assert fork != process.pid
        with os.fdopen(os.pidfd_open(fork)) as ended:
            process.send_signal(number)
            assert process.wait(timeout=60) == -number
            ready, _, _ = select.select([ended], [], [], 60)
        assert ready


def test_a_handler_of_its_own_runs(tmp_path):
    handles = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); print('ready', flush=True)"
    )
    code = f"{handles}; [time.sleep(0.01) for _ in iter(int, 1)]"
    with started(["python", "-c", code], tmp_path) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=60) == 3


def test_open_files_are_passed_on_by_number_and_closed_where_it_closes_them():
    """Close them in all other processes: a pipe ends while the process that had its other end lives on."""
    (reads, writes), (reads_too, writes_too) = os.pipe(), os.pipe()
    code = f"os.write({writes_too}, b'second'); os.write({writes}, b'first'); os.closerange({writes}, {writes_too} + 1)"
    command = [str(warm.folder() / "python"), "-c", f"import os, time; {code}; time.sleep(600)"]
    with subprocess.Popen(command, pass_fds=[writes, writes_too]) as process:
        os.close(writes)
        os.close(writes_too)
        for end, words in ((reads, b"first"), (reads_too, b"second")):
            with os.fdopen(end, "rb") as file:
                assert file.read() == words
        assert process.poll() is None
        process.kill()


def test_who_is_killed_while_asking_leaves_the_server_to_others(tmp_path):
    for words in (b"", (100).to_bytes(4, "big"), (100).to_bytes(4, "big") + b"{"):
        with socket.socket(socket.AF_UNIX) as asks:
            asks.connect(str(warm.folder() / "socket"))
            asks.sendall(words)
    assert run(["python", "-c", "import sys; print('torch' in sys.modules)"], cwd=tmp_path).out == "True\n"


def test_a_signal_while_it_asks_comes_after_the_request_and_one_too_late_is_dropped():
    """Use a server that reads nothing for a while, so that asking takes as long, and then hears nothing any more."""
    words = ["x" * 100_000] * 5  # more than the socket holds
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        (Path(folder) / "python").write_text((warm.folder() / "python").read_text())
        (Path(folder) / "python").chmod(0o700)
        server.bind(f"{folder}/socket")
        server.listen()
        command = [f"{folder}/python", "-c", "", *words]
        with subprocess.Popen(command) as process, contextlib.ExitStack() as stack:
            stack.callback(process.kill)
            line, _ = server.accept()
            size, fds, _, _ = socket.recv_fds(line, 4, 64)
            select.select([line], [], [])  # it has begun
            process.terminate()
            time.sleep(0.1)  # an interruption would be served by now
            request = line.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
            assert marshal.loads(request)["words"] == ["-c", "", *words]
            assert line.recv(1) == bytes([signal.SIGTERM])
            line.shutdown(socket.SHUT_RD)
            process.terminate()
            time.sleep(0.1)
            line.sendall(bytes([ord("e"), 3]))
            assert process.wait(60) == 3
        for fd in fds:
            os.close(fd)
        line.close()


def test_without_the_server_it_is_a_real_one(tmp_path):
    """The command is slower without the server, and otherwise the same."""
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "python").write_text((warm.folder() / "python").read_text())
    (alone / "python").chmod(0o700)
    (alone / "real").symlink_to(sys.executable)
    assert run([str(alone / "python"), "-c", "print(6 * 7)"], cwd=tmp_path).out == "42\n"
