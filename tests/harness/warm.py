"""A server that has torch loaded and forks for every `python`, `paceline` and `torchrun` that a test starts.

Importing torch and the modules that an optimizer needs takes 2.5 s of a processor. Most launches in tests compute for
less than half a second.

Rules
1. A test about a command's effect, and not about a fresh interpreter, takes its commands from `folder()`. They are
   real processes, each with its own command line, environment, signals and exit code (`warm_python.py`). A fork of the
   server does their work. Processes that they start with `sys.executable` are warm, too.
2. A fork enters the namespaces and control groups of the process that asked for it, so it works on emulated hosts.
3. If a fork is not possible, the command becomes a real Python: with options of the interpreter, or without the right
   to enter namespaces.
4. A fork ends with the process that asked for it, and the server with the tests.
5. The workers that pytest-xdist starts are forks, too (`conftest.py`), and so is the process from which ranks of a
   pool are forked (`ranks.py`). So each module that tests import is imported once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import marshal
import os
import random
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import uuid
import weakref
from pathlib import Path
from typing import Any

from harness import huge_pages

PRELOADED = (
    "pytest",
    "hypothesis",
    "hypothesis.strategies",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.utils.data",
    "numba",
    "scipy.sparse",
    "joblib",
    "sklearn.datasets",
    "sklearn.metrics",
    "sklearn.svm",
    "sklearn.utils.estimator_checks",
    "matplotlib.figure",
    "rich.progress",
    "typer._adapters",  # which typer itself imports in every command
    "pyroute2",
    # Not `paceline` alone, which imports its parts when they are first used: then every process would.
    "paceline.cli.app",
    "paceline.ddp",
    "paceline.launch.command_line",
    "paceline_plan",
    "paceline.optim",
    "paceline.process_group.backend",
    "paceline_recipes",
    "paceline_lab.bench.commands",
    "paceline_lab.emulation",
    "paceline_svm.classifier",
    "paceline_svm.single_problem",
)
ALSO = (
    "PACELINE_WARM_IMPORT"  # in a command's environment: a module that the server is to load before it forks
)
_PR_SET_PDEATHSIG = 1
_NAMESPACES = ("user", "net", "uts", "ipc", "pid", "mnt")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_MOST_FILES = 64
_REFUSED = signal.SIGALRM  # what a fork ends with that could not go where its asker is


@functools.cache
def folder() -> Path:
    """Return a folder with `python`, `paceline` and `torchrun`, for the front of a PATH. All workers share it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    made = Path(tempfile.gettempdir(), f"warm-{run or uuid.uuid4().hex}")
    made.mkdir(mode=0o700, exist_ok=True)
    with (made / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the first worker has started the server
        if not (made / "socket").exists():
            _start_server(made)
    return made


def _start_server(made: Path) -> None:
    script = f"#!{sys.executable} -IS\n{Path(__file__).with_name('warm_python.py').read_text()}"
    for name in ("python", "paceline", "torchrun"):
        (made / name).write_text(script)
        (made / name).chmod(0o700)
    with contextlib.suppress(FileExistsError):
        (made / "real").symlink_to(sys.executable)
    with (made / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "harness.warm", str(made), str(os.getpid())],
            cwd=Path(__file__).parents[1],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", (made / "log").read_text()
    server.stdout.close()
    atexit.register(
        setattr, server, "returncode", 0
    )  # or Python complains that it goes on: it has its own end


def serve(folder: Path, owner: int) -> None:
    """Fork a process for every request, until the owner has ended. A request's socket carries signals, and its end."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if "hypothesis" in name.partition(".")[0]:  # or pytest warns in every worker that it is here already
            module.__doc__ = f"{module.__doc__} PYTEST_DONT_REWRITE"
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if finalizer.peek()[1].__module__ == "torch.library":  # it takes back 170 operators at exit, in 40 ms
            finalizer.atexit = False
    _leave_out_what_forks_would_repeat()
    _compile_once()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(128)
    ends, signal_fd = os.pipe()
    os.set_blocking(ends, False)
    os.set_blocking(signal_fd, False)
    signal.set_wakeup_fd(signal_fd)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.freeze()
    huge_pages.take()
    print("ready", flush=True)
    children: dict[int, socket.socket] = {}
    while True:
        waiting: list[Any] = [owner, listener, ends, *children.values()]
        ready, _, _ = select.select(waiting, [], [])
        if owner in ready:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
            return
        if ends in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(ends, 4096)
            _reap(children)
        for pid, line in list(children.items()):
            if line in ready:
                _pass_on(pid, line)
        if listener in ready:
            line, _ = listener.accept()
            try:
                request, fds = _receive(line)
            except EOFError:
                line.close()
                continue
            if also := request["env"].get(ALSO):
                importlib.import_module(also)
            asker = struct.unpack("iii", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                os.close(owner)
                for open_socket in (listener, *children.values()):
                    open_socket.close()
                os.setsid()
                _enter_namespaces(asker, [*fds, line.fileno()])
                line.sendall(b"b\0")
                line.close()
                _become(folder, request, fds)
            for fd in fds:
                os.close(fd)
            children[pid] = line


def _leave_out_what_forks_would_repeat() -> None:
    """Cache work that every fork would repeat.

    Typer makes the tree of commands, for 60 ms. Torch formats stacks, each with the lines of its source.
    `torch.manual_seed` formats three, for a message about a later failure on a device: a tenth of the time of small
    tests. A launch formats eighteen, for the names of its functions in records that are not kept: 0.2 s.
    """
    app, torch = (importlib.import_module(name) for name in ("paceline.cli.app", "torch"))
    app.command_of = functools.cache(app.command_of)  # type: ignore[attr-defined]
    app.command_of(app.app)
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.traceback = types.SimpleNamespace(format_stack=list)
    without_source = types.SimpleNamespace(stack=functools.partial(inspect.stack, 0))
    for name in ("events", "rendezvous.dynamic_rendezvous"):
        importlib.import_module(f"torch.distributed.elastic.{name}").inspect = without_source  # type: ignore[attr-defined]


def _compile_once() -> None:
    """Compile a function, so that forks need not set up numba: 0.2 to 0.35 s in every fork that needs it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("numba").njit(lambda x: x + 1)(1)


def _receive(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request. Raises EOFError if its sender was killed meanwhile."""
    size, fds, _, _ = socket.recv_fds(line, 4, _MOST_FILES)
    rest, num_bytes = b"", int.from_bytes(size, "big")
    while not num_bytes or len(rest) < num_bytes:
        if not (more := line.recv(1 << 16)):
            for fd in fds:
                os.close(fd)
            raise EOFError
        rest += more
    return marshal.loads(rest), fds


def _pass_on(pid: int, line: socket.socket) -> None:
    """Pass signals on to the child. If the requester dies without a word, kill the child and its children."""
    try:
        signals = line.recv(64)
    except OSError:
        signals = b""
    with contextlib.suppress(ProcessLookupError):
        for number in signals:
            os.kill(pid, number)
        if not signals:
            os.killpg(pid, signal.SIGKILL)


def _reap(children: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        line = children.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        kind = "r" if code == -_REFUSED else "s" if code < 0 else "e"
        with line, contextlib.suppress(OSError):
            line.sendall(bytes([ord(kind), abs(code)]))


def _enter_namespaces(pid: int, fds: list[int]) -> None:
    """Enter the namespaces and control groups of the requester, on an emulated host, with the descriptors `fds`."""
    theirs, ours = Path(f"/proc/{pid}/ns"), Path("/proc/self/ns")
    kinds = [kind for kind in _NAMESPACES if (theirs / kind).readlink() != (ours / kind).readlink()]
    if not kinds:
        return
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        for group in set(groups) - set(Path("/proc/self/cgroup").read_text().splitlines()):
            _, controllers, path = group.split(":", 2)
            folder = Path("/sys/fs/cgroup", controllers.removeprefix("name="), path.lstrip("/"))
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        libc, folder = ctypes.CDLL(None, use_errno=True), Path.cwd()
        files = [os.open(theirs / kind, os.O_RDONLY) for kind in kinds]
        is_there = all(libc.setns(file, 0) == 0 for file in files)
        os.chdir(folder)
    except OSError:
        is_there = False
    if not is_there:
        os.kill(os.getpid(), _REFUSED)
    if "pid" not in kinds:
        return
    if child := os.fork():  # only children are in the new process namespace
        for fd in fds:
            os.close(fd)
        _stand_for(child)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stand_for(child: int) -> None:
    """Pass signals on to the child, and end as it does."""
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _: os.kill(child, received))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        if -code in _PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _become(folder: Path, request: dict[str, Any], fds: list[int]) -> None:
    """Turn into what a fresh interpreter is after its start. Then run, and end like it."""
    code = 1
    try:
        # Out of the way first: one may have the number that another is to get.
        apart = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(request["files"]) + 1) for fd in fds]
        for fd in fds:
            os.close(fd)
        for target, fd in zip(request["files"], apart, strict=True):
            os.dup2(fd, target)
            os.close(fd)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.executable = str(folder / "python")
        tempfile.tempdir = None  # it is looked up once
        random.seed()
        sys.modules["numpy"].random.seed()
        torch = sys.modules["torch"]
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
        torch.distributed.set_debug_level_from_env()
        known = set(sys.path)
        added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = [*(path for path in added if path not in known), *sys.path[1:]]
        if any(Path(path, "sitecustomize.py").exists() for path in added):  # it would begin with this
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
        if request["name"] == "python" and "PACELINE_PEERS" in os.environ:  # as `import paceline` does
            importlib.import_module("paceline.elastic.guest").prepare()
        code = _run(request["name"], request["words"])
    finally:
        os._exit(code)


def _run(name: str, words: list[str]) -> int:
    """Return the exit code of a command line, after everything that an interpreter does at its end."""
    try:
        try:
            _start(name, words)
            code = 0
        except SystemExit as left:
            code = _exit_code(left)
        except KeyboardInterrupt:
            traceback.print_exc()
            _flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        _flush()
    return code


def _exit_code(left: SystemExit) -> int:
    if left.code is None:
        return 0
    if isinstance(left.code, int):
        return left.code & 0xFF
    print(left.code, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _start(name: str, words: list[str]) -> None:
    if name == "paceline":
        sys.argv = ["paceline", *words]
        from paceline.cli import main

        main()
    elif name == "torchrun":
        sys.argv = ["torchrun", *words]
        from torch.distributed.run import main as torchrun

        torchrun()
    else:
        if words[0] == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
            words = words[1:]
        if words[0] == "-m":
            sys.path.insert(0, str(Path.cwd()))
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            return
        main_module = sys.modules["__main__"] = types.ModuleType("__main__")
        if words[0] == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *words[2:]]
            code = compile(words[1], "<string>", "exec")
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            sys.argv = words
            main_module.__file__ = words[0]
            code = compile(Path(words[0]).read_bytes(), words[0], "exec")
        exec(code, main_module.__dict__)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), os.pidfd_open(int(sys.argv[2])))
