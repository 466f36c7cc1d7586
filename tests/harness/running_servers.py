"""Parameter servers for tests: in threads of this process, or processes that can be killed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from paceline_servers.process import listen
from paceline_servers.server import Server


@contextlib.contextmanager
def in_threads(number: int, token: str = "") -> Iterator[list[str]]:
    """Start servers in threads of this process. Return their addresses."""
    addresses, threads, ends = [], [], []
    for _ in range(number):
        listener = listen("127.0.0.1", 0)
        addresses.append(f"127.0.0.1:{listener.getsockname()[1]}")
        server = Server(listener, token)
        mine, theirs = socket.socketpair()
        server.watch(theirs)
        ends += [mine, theirs]
        threads.append(threading.Thread(target=server.run, daemon=True))
        threads[-1].start()
    try:
        yield addresses
    finally:
        for end in ends[::2]:
            end.close()
        for thread in threads:
            thread.join(30.0)
        assert not any(thread.is_alive() for thread in threads), "a server does not end"
        for end in ends[1::2]:
            end.close()


@contextlib.contextmanager
def as_processes(number: int) -> Iterator[tuple[list[str], list[subprocess.Popen[str]]]]:
    """Start servers as processes, which end with the context. Return their addresses and processes."""
    command = [sys.executable, "-m", "paceline_servers", "--until-closed"]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    try:
        yield [process.stdout.readline().strip() for process in started if process.stdout], started
    finally:
        for process in started:
            process.kill()
            process.communicate()
