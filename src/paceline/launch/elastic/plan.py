"""`Plan`: the ranks that train together from now on, as all hosts' agents have decided; and each agent's `Proposal`.

Rules
1. A plan is complete: an agent that has it needs no earlier one.
2. An epoch has at most one plan, the same for every agent at any time. Every message says its epoch.
3. Nothing here reads a clock, opens a socket or is unpickled: JSON, checked when it is read.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from paceline.errors import ProtocolError

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
    """The ranks that one host's agent brings into the next membership: those that have stopped, and those that wait.

    Attributes:
        epoch: The number of the plan that is asked for.
        steps: How many steps each rank of this host has completed that can go on. `NOT_STARTED`: it has just come, and
            takes another's state.
        store: Where this host would open the store of that epoch.
        has_paused: Whether its ranks have left the last membership between two steps, as all ranks then do.
        leaves: Whether this host was told to end, and brings no rank any more.
        can_save: Whether a rank of it that leaves makes a checkpoint, if too few ranks stay.
    """

    epoch: int
    steps: Mapping[Member, int]
    store: Address
    has_paused: bool = False
    leaves: bool = False
    can_save: bool = False


@dataclass(frozen=True)
class Plan:
    """A membership."""

    epoch: int  # its number: larger than that of any plan before
    # The ranks, in the order of their new numbers. Those that were there before come first.
    members: tuple[Member, ...]
    # agents, by name, of which the next plan needs more than half; or half, with the tie-breaker
    voters: tuple[str, ...]
    tie_breaker: str  # one of the voters
    step: int  # how many steps the rank that is furthest has completed
    holder: Member  # that rank: ranks that are behind take its state
    store: Address  # where the ranks meet; of this epoch alone
    num_new: int = 0  # how many members have no state of the training yet

    def __post_init__(self) -> None:
        if self.holder not in self.members or self.tie_breaker not in self.voters:
            raise ProtocolError(
                f"a plan of epoch {self.epoch} names {self.holder} as the holder of the state and {self.tie_breaker!r} "
                f"as the tie-breaker; its members are {self.members}, its voters {self.voters}."
            )

    def to_bytes(self) -> bytes:
        """Return the plan as JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, words: bytes) -> Plan:
        """Return the plan that `to_bytes` wrote. Raises ProtocolError if it is none."""
        try:
            fields: dict[str, Any] = json.loads(words)
            return cls(
                epoch=_whole(fields["epoch"]),
                members=tuple(_member(each) for each in fields["members"]),
                voters=tuple(_text(each) for each in fields["voters"]),
                tie_breaker=_text(fields["tie_breaker"]),
                step=_whole(fields["step"]),
                holder=_member(fields["holder"]),
                store=Address(_text(fields["store"][0]), _whole(fields["store"][1])),
                num_new=_whole(fields["num_new"]),
            )
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ProtocolError(f"{words[:80]!r} is not a plan of a membership: {error!r}") from error


@dataclass(frozen=True)
class Start:
    """The numbers and store with which a host's ranks begin the job, before the first plan; as under torchrun."""

    first_rank: int  # of this host
    num_ranks: int  # of all hosts
    host: int  # this one's number
    num_hosts: int  # of the job
    store: Address | None  # where all of them meet; None: where this host's agent chooses


class Decider(Protocol):
    """The source of plans: the agent alone on one host, a vote among several hosts. The agent polls it."""

    name: str  # of this host's agent, in plans
    is_alone: bool  # whether there is no other host

    def decide(self, proposal: Proposal) -> Plan | None:
        """Return the plan of the proposal's epoch, or of a later one; None: not yet, ask again. Local; never blocks.

        This host's ranks may be missing: they lost touch, and what they hold is old. Raises LaunchError if there never
        is one.
        """

    def why_over(self, epoch: int) -> str | None:
        """Return why this epoch has ended, or None. Local; never blocks.

        Raises LaunchError if training cannot begin.
        """

    def wants_pause(self, epoch: int) -> bool:
        """Return whether its ranks shall leave it between two steps, because ranks of another host come in."""

    def others_ended(self) -> bool:
        """Return whether ranks of another host have ended well. Local."""

    def holds_vote(self) -> bool:
        """Return whether no other host can train on without this one, whose ranks hold the newest state. Local."""

    def ask_for_state(self, take: Callable[[socket.socket], None]) -> bool:
        """Have a rank of another host give its state to one of this host; False: none trains. Local; never blocks.

        `take` is given the socket over which the state comes, on another thread.
        """

    def to_give(self) -> socket.socket | None:
        """Return a connection to a rank of another host that needs a state from here, once each; or None. Local."""

    def may_come_in(self) -> bool:
        """Return whether there is room for ranks of this host that wait. Local."""

    def may_leave(self, epoch: int) -> bool | None:
        """Return whether ranks of this host that have left this epoch may end, and make a checkpoint before. Local.

        None: not yet, because hosts that stay do not know yet that they go on without these ranks.
        """


class OneHost:
    """Decides where there is one host: its agent, at once."""

    is_alone = True

    def __init__(self) -> None:
        self.name = socket.gethostname()

    def decide(self, proposal: Proposal) -> Plan | None:
        """The ranks that were there before, in their order, and those that have come."""
        members = tuple(proposal.steps)
        holder = max(members, key=lambda member: proposal.steps[member])
        return Plan(
            epoch=proposal.epoch,
            members=members,
            voters=(holder.host,),
            tie_breaker=holder.host,
            step=proposal.steps[holder],
            holder=holder,
            store=proposal.store,
            num_new=sum(step == NOT_STARTED for step in proposal.steps.values()),
        )

    def why_over(self, epoch: int) -> str | None:
        return None

    def wants_pause(self, epoch: int) -> bool:
        return False

    def others_ended(self) -> bool:
        return False

    def holds_vote(self) -> bool:
        return True

    def ask_for_state(self, take: Callable[[socket.socket], None]) -> bool:
        return False

    def to_give(self) -> socket.socket | None:
        return None

    def may_come_in(self) -> bool:
        return True

    def may_leave(self, epoch: int) -> bool | None:
        return True  # if too few ranks stay, which the agent counts


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is not text")
    return value


def _member(value: Any) -> Member:
    host, number = value
    return Member(_text(host), _whole(number))
