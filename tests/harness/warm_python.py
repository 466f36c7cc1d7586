"""A Python that starts at once: it asks a server that has torch loaded (`warm.py`) to fork and run its command line.

It is started as `python`, `paceline` or `torchrun` from the server's folder. Its parent sees the requested process:
the same output, exit code or signal. Open files are passed on, and signals reach it. With options or variables that
change the interpreter, or if the server refuses, it becomes a real Python. It has to start in milliseconds, so it
imports little: with `json`, `signal` and `socket` it would take twice as long.
"""

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import array
import fcntl
import marshal
import os
import select
import sys

FOLDER = os.path.dirname(os.path.abspath(sys.argv[0]))
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
MODULES = {"paceline": "paceline", "torchrun": "torch.distributed.run"}
HARMLESS = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}  # variables


def without_byte_code(words: list[str]) -> list[str]:
    """Return the words without -B.

    multiprocessing passes it on where PYTHONDONTWRITEBYTECODE is set. A fork has its modules already.
    """
    return words[1:] if words[:1] == ["-B"] else words


def needs_a_real_one(name: str, words: list[str]) -> bool:
    """Return whether the command line needs a fresh interpreter."""
    if name == "python" and (not words or (words[0].startswith("-") and words[0] not in ("-u", "-c", "-m"))):
        return True
    return any(x.startswith("PYTHON") and x not in HARMLESS for x in os.environ)


def inherited_files() -> list[int]:
    """Return the descriptors that the parent left open for this process, except the first three."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fd > 2 and not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                found.append(fd)
        except OSError:  # the listing's own
            pass
    return found


def become_a_real_one(name: str, words: list[str]) -> None:
    """Continue as the interpreter that runs the tests."""
    real = os.readlink(os.path.join(FOLDER, "real"))
    os.execv(real, [real, *(["-m", MODULES[name]] if name in MODULES else []), *words])


def receive(server: socket.socket) -> bytes:
    """Return the next two bytes from the server, whose socket does not block."""
    select.select([server], [], [])
    return server.recv(2)


def main() -> None:
    """Send the command line and the open files, pass signals on, end as the fork does."""
    name, words = os.path.basename(sys.argv[0]), without_byte_code(sys.argv[1:])
    server = socket.socket(socket.AF_UNIX)
    try:
        if needs_a_real_one(name, words):
            become_a_real_one(name, words)
        server.connect(os.path.join(FOLDER, "socket"))
    except OSError:  # it is gone: then slowly
        become_a_real_one(name, words)
    numbers = [0, 1, 2, *inherited_files()]
    request = marshal.dumps(
        {"name": name, "words": words, "cwd": os.getcwd(), "env": dict(os.environ), "files": numbers}
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # or its byte would be taken for one of the request
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers).tobytes())]
    server.sendmsg([len(request).to_bytes(4, "big")], files)
    server.sendall(request)
    # The interpreter's own handler sends a signal's number, so none is lost that comes just before a call that blocks.
    server.setblocking(False)
    signal.set_wakeup_fd(server.fileno(), warn_on_full_buffer=False)
    for passed in PASSED_ON:
        if signal.getsignal(passed) != signal.SIG_IGN:
            signal.signal(passed, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    answer = receive(server)
    if answer[:1] == b"b":  # begun: the fork has the files, and no process waits for this one to close them
        for fd in numbers[3:]:
            os.close(fd)
        answer = receive(server)
    if answer[:1] == b"r":  # refused
        become_a_real_one(name, words)
    kind, number = answer or bytes([ord("s"), signal.SIGKILL])
    if kind == ord("s"):
        if number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(number)


main()
