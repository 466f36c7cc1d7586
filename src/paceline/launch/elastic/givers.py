"""A shadow's connections to the ranks that give it their states, on several hosts.

Rules
1. An agent that is called says which ranks train on its host, in which epoch, and where the agents of the others are
   (`Givers`). Each rank gives over a connection of its own, the share that has its number.
2. A shadow needs all shares of one epoch. If an agent has not heard of that yet, or of its end, it is called again. It
   is asked first, because each connection to a rank costs that rank a thread.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import asdict, dataclass
from typing import Any

from paceline.launch.elastic.links import call_for_state, hear_about
from paceline.launch.elastic.plan import Address

_NO_PLACE = 255  # of a rank: the agent says what it knows, and no more


@dataclass(frozen=True)
class Givers:
    """The ranks of one host that give their states, as its agent says."""

    epoch: int
    ranks: tuple[int, ...]  # their numbers; none: no rank trains there now
    size: int  # how many ranks train on all hosts
    others: tuple[Address, ...]  # where the agents of the other hosts listen
    card: str  # what the ranks have in common

    def as_dict(self) -> dict[str, Any]:
        """Return what `of` takes."""
        return asdict(self)

    @classmethod
    def of(cls, told: dict[str, Any]) -> Givers:
        """Return what an agent has told. Raises ValueError if it is not of this form."""
        try:
            others = tuple(Address(*each) for each in told["others"])
            return cls(**{**told, "ranks": tuple(told["ranks"]), "others": others})
        except (KeyError, TypeError) as error:
            raise ValueError(f"an agent tells a shadow {told!r:.200}") from error


def ask_host(address: Address, token: str) -> Givers:
    """Return what the agent there says. None of its ranks gives yet. Blocks; errors as for `call_host`."""
    with call_for_state(address, token, _NO_PLACE) as end:
        return Givers.of(hear_about(end))


def call_host(
    address: Address, token: str, closes: contextlib.ExitStack
) -> tuple[Givers, dict[int, socket.socket]]:
    """Return what the agent there says, and a connection to each of its ranks, by number.

    Blocks, for some seconds at most. `closes` ends the connections. Raises OSError or ValueError if the agent does not
    answer, or if the membership changes meanwhile.
    """
    first: Givers | None = None
    ends: dict[int, socket.socket] = {}
    while first is None or len(ends) < len(first.ranks):
        end = closes.enter_context(call_for_state(address, token, len(ends)))
        told = Givers.of(hear_about(end))
        first = first or told
        if told != first:
            raise ConnectionResetError("the membership has changed")
        if first.ranks:
            ends[first.ranks[len(ends)]] = end
        else:
            break
    return first, ends


def call_all(
    address: Address, givers: Givers, token: str, closes: contextlib.ExitStack
) -> list[socket.socket]:
    """Return connections to all ranks of a membership, by number, of which the agent at `address` says this.

    No rank gives before all agents agree. Blocks; `closes` and errors as for `call_host`. An error names the agent that
    does not answer.
    """
    told = {address: givers}
    for other in givers.others:
        try:
            told[other] = ask_host(other, token)
        except OSError as error:
            raise OSError(f"{other.host}:{other.port}: {error.strerror or error}") from error
        if told[other].epoch != givers.epoch:
            raise OSError(f"{other.host}:{other.port} is in another membership")
    if sorted(rank for its in told.values() for rank in its.ranks) != [*range(givers.size)]:
        raise OSError("the membership changes")
    ends: dict[int, socket.socket] = {}
    for host, before in told.items():
        its, more = call_host(host, token, closes)
        if (its.epoch, its.ranks) != (before.epoch, before.ranks):
            raise OSError("the membership changes")
        ends.update(more)
    return [ends[rank] for rank in sorted(ends)]
