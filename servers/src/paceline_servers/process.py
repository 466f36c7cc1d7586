"""The process of a parameter server, for `paceline run --servers` and `paceline serve`.

It writes one line, the address that it listens on, and serves until a signal stops it. With `--until-closed` the end
of its standard input stops it, too, which the kernel closes however its launcher ends.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import sys
from types import FrameType

from paceline.comm import TOKEN
from paceline.errors import ConfigurationError
from paceline.host.addresses import LOOPBACK
from paceline_servers.server import Server

_BACKLOG = 1024


def main() -> None:
    """Parse the launcher's arguments, and serve."""
    parser = argparse.ArgumentParser(prog="python -m paceline_servers")
    parser.add_argument("--address", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--until-closed", action="store_true")
    options = parser.parse_args()
    try:
        serve(listen(options.address, options.port), until_closed=options.until_closed)
    except ConfigurationError as error:
        sys.exit(str(error))


def serve(listener: socket.socket, *, until_closed: bool = False) -> None:
    """Write the address of the listener to standard output, and serve. Blocks until it is stopped."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    sys.stdout.write(f"{_shown(listener)}\n")
    sys.stdout.flush()
    server = Server(listener, os.environ.get(TOKEN, ""))
    if until_closed:
        server.watch(sys.stdin)
    server.run()


def serve_on(place: str) -> None:
    """Serve on an address as typed, such as `10.0.0.5:7000`. Make a token if there is none. Blocks.

    Raises ConfigurationError if it is no address of this machine.
    """
    host, colon, port = place.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(
            f"--listen {place} is not an address. Name an address of this machine and a port: --listen 10.0.0.5:7000"
        )
    listener = listen(host, int(port))
    if not os.environ.get(TOKEN):
        os.environ[TOKEN] = secrets.token_hex(16)
        sys.stderr.write(
            "paceline serve: only ranks that know this token are let in. Give it to them, and to the job's other "
            f"servers:\n  {TOKEN}={os.environ[TOKEN]} paceline run --servers {_shown(listener)} train.py\n"
        )
    serve(listener)


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket on one address. Raises ConfigurationError if that is not possible."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # for the address `::`, which means every address
    takes_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=takes_both
        )
    except OSError as error:
        raise ConfigurationError(
            f"a parameter server cannot listen on {address}, port {port}: {error.strerror or error}. Name an address "
            "of this machine, and a port that is free (0 takes any)."
        ) from error


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
