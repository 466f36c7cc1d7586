"""`Plan`: the ranks that train together from now on, as all hosts' agents have decided; and each agent's `Proposal`.

Rules
1. A plan is complete: an agent that has it needs no earlier one.
2. An epoch has at most one plan, the same for every agent at any time. Every message says its epoch.
3. Nothing here reads a clock or opens a socket.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

NOT_STARTED = -1  # the epoch of a launch before its first plan, and the step of a rank that has just come


class Member(NamedTuple):
    """One process of a rank: a replacement on the same host has another number."""

    host: str  # the name of its agent, which no other agent of the launch has
    number: int  # of its start on that host, from 0


class Address(NamedTuple):
    """The host and port of a listener."""

    host: str
    port: int


@dataclass(frozen=True)
class Proposal:
    """The ranks that one host's agent brings into the next membership: those that have stopped, and those that wait."""

    epoch: int  # the number of the plan that is asked for
    # How many steps each rank of this host has completed that can go on. `NOT_STARTED`: it has just come, and takes
    # another's state.
    steps: Mapping[Member, int]
    store: Address  # where this host would open the store of that epoch
    # Whether its ranks have left the last membership between two steps, as all ranks then do
    has_paused: bool = False
    leaves: bool = False  # whether this host was told to end, and brings no rank any more
    can_save: bool = False  # whether a rank of it that leaves makes a checkpoint, if too few ranks stay
    left: tuple[Member, ...] = ()  # its ranks that were told to end, and have left the last membership


@dataclass(frozen=True)
class Plan:
    """A membership."""

    epoch: int  # its number: larger than that of any plan before
    # The ranks, in the order of their new numbers. Those that were there before come first.
    members: tuple[Member, ...]
    step: int  # how many steps the rank that is furthest has completed; ranks that are behind take its state
    store: Address  # where the ranks meet; of this epoch alone
    num_new: int = 0  # how many members have no state of the training yet
    left: tuple[Member, ...] = ()  # that were told to end, and have left the last membership


@dataclass(frozen=True)
class Start:
    """The numbers and store with which a host's ranks begin the job, before the first plan; as under torchrun."""

    first_rank: int  # of this host
    num_ranks: int  # of all hosts
    host: int  # this one's number
    num_hosts: int  # of the job
    store: Address | None  # where all of them meet; None: where this host's agent chooses


class Decider(ABC):
    """The source of plans, which the agent polls. These are the answers of a host that is alone."""

    name: str  # of this host's agent, in plans
    is_alone = True  # whether there is no other host

    @abstractmethod
    def decide(self, proposal: Proposal) -> Plan | None:
        """Return the plan of the proposal's epoch, or of a later one; None: not yet, ask again. Local; never blocks.

        This host's ranks may be missing: they lost touch, and what they hold is old. Raises LaunchError if there never
        is one.
        """

    def why_over(self, epoch: int) -> str | None:
        """Return why this epoch has ended, or None. Local; never blocks.

        Raises LaunchError if training cannot begin.
        """
        return None

    def wants_pause(self, epoch: int) -> bool:
        """Return whether its ranks shall leave it between two steps, because ranks of another host come in."""
        return False

    def others_ended(self) -> bool:
        """Return whether ranks of another host have ended well. Local."""
        return False

    def holds_vote(self) -> bool:
        """Return whether no other host can train on without this one, whose ranks hold the newest state. Local."""
        return True

    def ask_for_state(self, take: Callable[[socket.socket], object]) -> bool:
        """Have a rank of another host give its state to one of this host; False: none trains. Local; never blocks.

        `take` is given the socket over which the state comes, on another thread.
        """
        return False

    def ask_for_shares(self, epoch: int, take: Callable[[int, socket.socket], bool]) -> None:
        """Have ranks of other hosts give their states to a shadow of this host. Local; never blocks.

        `take` is given each rank's number and a socket, on another thread, as long as this epoch lasts. It returns
        whether the shadow has got that.
        """
        return

    def trainers(self) -> list[Address]:
        """Return where agents of other hosts listen whose ranks train. Local."""
        return []

    def to_give(self) -> tuple[socket.socket, int | None] | None:
        """Return a connection to a process of another host that needs a state from here, once each; or None. Local.

        A shadow asks for that of one rank of this host, whose place is returned as well.
        """
        return None

    def may_come_in(self) -> bool:
        """Return whether there is room for ranks of this host that wait. Local."""
        return True

    def is_spare(self) -> bool:
        """Return whether this host waits because there is no room. Local."""
        return False

    def may_leave(self, epoch: int) -> bool | None:
        """Return whether ranks of this host that have left this epoch may end, and make a checkpoint before. Local.

        None: not yet, because hosts that stay do not know yet that they go on without these ranks.
        """
        return True  # if too few ranks stay, which the agent counts


class OneHost(Decider):
    """Decides where there is one host: its agent, at once."""

    def __init__(self) -> None:
        self.name = socket.gethostname()

    def decide(self, proposal: Proposal) -> Plan | None:
        """Keep the ranks of before in their order, and add those that have come."""
        return Plan(
            epoch=proposal.epoch,
            members=tuple(proposal.steps),
            step=max(proposal.steps.values()),
            store=proposal.store,
            num_new=sum(step == NOT_STARTED for step in proposal.steps.values()),
            left=proposal.left,
        )
