"""The decisions of the agents of several hosts: which agents decide next, and which ranks train."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.launch.elastic.plan import NOT_STARTED, Address, Member, Plan

NOWHERE = Address("", 0)


@dataclass(frozen=True)
class AgentInfo:
    """A host's agent. One that lost its memory is another: it comes with another name."""

    name: str  # unique in the job's life
    address: Address = NOWHERE  # where it listens for other agents
    store: Address = NOWHERE  # where the ranks of the next epoch can meet at its host
    start: Address = NOWHERE  # where all ranks meet that the job begins with, if this is its first host
    num_ranks: int = 0  # that the job begins with at its host
    leaves: bool = False  # whether its host was told to end, and brings no rank any more
    can_save: bool = False  # whether a rank of its host that leaves makes a checkpoint, if too few ranks stay
    left: tuple[int, ...] = ()  # ranks of its host, by number, that were told to end and have left
    has_ended: bool = False  # whether its ranks have ended well


@dataclass(frozen=True)
class Candidate:
    """A rank that could train, as its agent reports it."""

    member: Member  # which process
    # of which decision it holds the training's state; `NOT_STARTED` for a rank that is new
    epoch: int = NOT_STARTED
    step: int = NOT_STARTED  # how many steps that state has completed

    @property
    def progress(self) -> tuple[int, int]:
        """Return the epoch and step of its state. Ranks with equal progress hold the same state."""
        return self.epoch, self.step


@dataclass(frozen=True)
class Decision:
    """The decision for one epoch. There is at most one an epoch."""

    epoch: int  # its number
    # the ranks that train, in their order; empty while they are too few to train
    members: tuple[Candidate, ...]
    # The agents that decide on the next one. A live agent is among them although its ranks are out.
    voters: tuple[AgentInfo, ...]
    tie_breaker: str  # the voter with which half of them suffices
    trained: int = NOT_STARTED  # the newest epoch that had members, this one included
    saver: str = ""  # if too few ranks are left: the host whose leaving ranks make a checkpoint
    left: tuple[Member, ...] = ()  # ranks that were told to end, and have left
    # Without members: the hosts that may still have a rank of epoch `trained`. They have not said that they have none.
    keepers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        hosts = {candidate.member.host for candidate in self.members}
        if self.tie_breaker not in self.names or not hosts <= set(self.names):
            raise ValueError("a decision whose tie-breaker or members are of no voter")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the voters' names."""
        return tuple(voter.name for voter in self.voters)

    @property
    def holder(self) -> Candidate:
        """Return the member that is furthest. The others take its state if theirs is older."""
        return max(self.members, key=lambda candidate: candidate.progress)

    def has_quorum(self, names: Iterable[str]) -> bool:
        """Return whether these suffice to decide on the next one: more than half, or half with the tie-breaker."""
        voting = set(names) & set(self.names)
        votes, whole = len(voting), len(self.voters)
        return 2 * votes > whole or (2 * votes == whole and self.tie_breaker in voting)

    def updated(self, candidate: Candidate) -> Candidate:
        """Return what a rank holds once this is decided. None trains before all follow, so equal states stay equal."""
        for member in self.members:
            if member.member == candidate.member and member.progress == self.holder.progress:
                return Candidate(candidate.member, self.epoch, candidate.step)
        return candidate

    def plan(self) -> Plan | None:
        """Return the plan that its ranks are told; None if it has no ranks."""
        if not self.members:
            return None
        stores = {voter.name: voter.store for voter in self.voters}
        return Plan(
            epoch=self.epoch,
            members=tuple(candidate.member for candidate in self.members),
            step=max(self.holder.step, 0),
            store=stores[self.holder.member.host],
            num_new=sum(candidate.step == NOT_STARTED for candidate in self.members),
            left=self.left,
        )
