"""Imports modules that take seconds and that only some jobs need. A thread imports one when a rank first needs it."""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigurationError
from paceline_servers.wire import Kind

if TYPE_CHECKING:
    from paceline_servers.datagram_sums import DatagramSums
    from paceline_servers.stepping import SteppedKeys


def _load_stepping() -> Any:
    """Import torch and the module that needs it."""
    return importlib.import_module("paceline_servers.stepping")


def _load_sums() -> Any:
    """Import paceline-lossy, and compile its code."""
    module = importlib.import_module("paceline_servers.datagram_sums")
    importlib.import_module("paceline_lossy").compile_all()
    return module


_NEEDED_FOR: dict[Kind, Callable[[], Any]] = {Kind.SET_UP: _load_stepping, Kind.JOIN: _load_sums}


class LateModules:
    """Imports of a server, on threads. `woken` becomes readable whenever an import has ended."""

    def __init__(self) -> None:
        self._wake, self.woken = socket.socketpair()
        self.woken.setblocking(False)
        self._begun: set[Kind] = set()
        self._ended: set[Kind] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def is_ready_for(self, kind: Kind) -> bool:
        """Return whether the import for this kind of frame has ended, well or not. Begin it if it is new."""
        if kind not in _NEEDED_FOR or kind in self._ended:
            return True
        if kind not in self._begun:
            self._begun.add(kind)
            name = f"paceline imports for {kind.name}"
            threading.Thread(target=self._load, args=(kind,), name=name, daemon=True).start()
        return False

    def _load(self, kind: Kind) -> None:
        try:
            with contextlib.suppress(Exception):  # its user gets the same error, and tells the ranks
                _NEEDED_FOR[kind]()
        finally:
            with self._lock:
                self._ended.add(kind)
                if not self._is_closed:
                    self._wake.sendall(b"x")

    def clear_wakeup(self) -> None:
        """Clear the signal on `woken`."""
        self.woken.recvfrom(64)

    def close(self) -> None:
        """Close both sockets. An import that is under way goes on."""
        with self._lock:
            self._is_closed = True
            self._wake.close()
            self.woken.close()


def make_steps(words: dict[str, Any]) -> SteppedKeys:
    """Return the parameters and the optimizer of this server."""
    steps: SteppedKeys = _load_stepping().SteppedKeys(words)
    return steps


def make_sums(num_ranks: int, timeout_s: float, address: str) -> DatagramSums:
    """Return the sums by datagrams. Raises ConfigurationError if they cannot be done here."""
    try:
        module = _load_sums()
    except ImportError as error:
        raise ConfigurationError(
            f"this parameter server cannot sum by datagrams: {error}. In a clone of Paceline, install it there: "
            "`pip install ./lossy`."
        ) from error
    sums: DatagramSums = module.DatagramSums(num_ranks, timeout_s, address)
    return sums
