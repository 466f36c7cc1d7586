"""A server's end of sums by datagrams, of which a bounded part may be lost. Opened when ranks ask for it.

Rules
1. Ranks send by TCP the address that their datagrams come from, and the description of each sum. Gradients and their
   sums go by UDP alone.
2. Servers are the first of the group, followed by the ranks in their order. Servers exchange nothing with servers.
3. A sum begins when the first rank has announced it. Its values stay on the network's thread.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np

from paceline.errors import ConfigurationError, PeerLostError, ProtocolError
from paceline_lossy import Bound, Introduction, LossyLink, Sum

_DTYPES = ("float32", "float64")
_MOST_SERVERS, _MOST_PORTS = 1024, 16
# `close` does not wait. The link's thread goes on for a moment, because its peers may need it.
_LINGER_S = 0.0


class DatagramSums:
    """The sums of one session.

    A sum that takes longer than `timeout_s` has failed. Ranks know this host by `address`.
    """

    def __init__(self, num_ranks: int, timeout_s: float, address: str) -> None:
        try:
            socket.inet_pton(socket.AF_INET, address)
        except OSError as error:
            raise ConfigurationError(
                f"datagrams go by IPv4, and ranks reach this parameter server at {address}. Name it by an IPv4 address."
            ) from error
        self._num_ranks = num_ranks
        self._timeout = timedelta(seconds=timeout_s)
        self._address = address
        self._introduction: Introduction | None = None
        self._announced: dict[int, Mapping[str, Any]] = {}
        self._link: LossyLink | None = None
        self._running: dict[int, Sum] = {}

    def join(self, rank: int, words: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Take a rank's announcement. Return the answer to all ranks once all have announced themselves.

        Raises ConfigurationError if the announcements differ or are not possible.
        """
        first = next(iter(self._announced.values()), words)
        for what in ("number", "servers", "ports"):
            if words[what] != first[what]:
                raise ConfigurationError(
                    f"rank {rank} sums by datagrams with {what}={words[what]!r}, and another rank with "
                    f"{what}={first[what]!r}. Pass the same servers and paths on all."
                )
        number, servers, ports = int(words["number"]), int(words["servers"]), int(words["ports"])
        if not 0 <= number < servers <= _MOST_SERVERS or not 1 <= ports <= _MOST_PORTS:
            raise ConfigurationError(
                f"rank {rank} says that this is parameter server {number} of {servers}, and sends by {ports} ports. "
                f"There are at most {_MOST_SERVERS} servers, and {_MOST_PORTS} ports."
            )
        self._announced[rank] = words
        if len(self._announced) < self._num_ranks:
            return None
        self._introduction = Introduction(self._address, int(words["ports"]))
        smallest = min(
            int(each["mtu"]) for each in (self._introduction.announcement, *self._announced.values())
        )
        return self._introduction.announcement | {"mtu": smallest}

    def launch(self, number: int, words: Mapping[str, Any]) -> None:
        """Begin a sum. Called in the order of the numbers."""
        if self._introduction is None:
            raise ProtocolError("a sum by datagrams was announced before all ranks had joined")
        link = self._link or self._open(int(words["payload_bytes"]))
        if words["dtype"] not in _DTYPES:
            raise ProtocolError(f"a sum of {words['dtype']} was announced; {', '.join(_DTYPES)} are summed")
        vector = np.empty(int(words["num_elements"]), words["dtype"])
        self._running[number] = link.launch(vector, Bound(**words["bound"]))

    def _open(self, payload_bytes: int) -> LossyLink:
        assert self._introduction is not None, "all have joined"
        own, num_servers = int(self._announced[0]["number"]), int(self._announced[0]["servers"])
        announced = [None] * num_servers + [self._announced[rank] for rank in range(self._num_ranks)]
        names = [f"parameter server {number}" for number in range(num_servers)]
        names += [f"rank {rank}" for rank in range(self._num_ranks)]
        members = dataclasses.replace(
            self._introduction.members(announced, names), payload_bytes=payload_bytes
        )
        self._link = LossyLink(own, members, self._timeout, num_servers)
        return self._link

    def take_finished(self) -> list[int]:
        """Return the sums done since the last call.

        Raises PeerLostError if a rank's datagrams stay away, and the error of a sum that failed otherwise.
        """
        done = []
        for number, launched in list(self._running.items()):
            try:
                if launched.wait(0):
                    done.append(number)
                    del self._running[number]
            except PeerLostError as error:
                servers = int(self._announced[0]["servers"])
                raise PeerLostError(
                    str(error), error.peer - servers if error.peer is not None else None
                ) from error
        return done

    def close(self) -> None:
        if self._link is not None:
            self._link.close(_LINGER_S)
        elif self._introduction is not None:
            self._introduction.close()
