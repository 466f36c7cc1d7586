"""The ranks of one host: which process has which seat, who is in the membership, and where each stands."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.launch.elastic.plan import NOT_STARTED, Member
from paceline.launch.elastic.rank_process import RankProcess


class Phase(enum.Enum):
    """What a process is doing, as far as its agent knows."""

    STARTING = "is starting"
    WAITING = "waits to come in"
    TRAINING = "trains"
    LOST = "was lost"  # or is ending


@dataclass
class Rank:
    """One process."""

    process: RankProcess  # it
    member: Member  # its name in plans
    local_rank: int  # its seat on this host, which a replacement takes
    phase: Phase = Phase.STARTING  # what it is doing
    rank: int = NOT_STARTED  # its number in the membership that it is, or was, in
    step: int | None = None  # steps it has completed, if it has said so since the membership ended
    is_inside: bool = False  # whether it is in its loop over steps
    is_replaying: bool = False  # whether it receives another's state, and has not caught up
    saves: bool = False  # whether it makes a checkpoint, if training cannot go on
    is_silent: bool = False  # whether it has closed its end of the line
    cpu_ticks: int = 0  # that it had used when it was seen to use more
    moved_s: float = field(default_factory=time.monotonic)  # when that was

    @property
    def name(self) -> str:
        """In words."""
        who = f"rank {self.rank}" if self.rank >= 0 else f"a process for local rank {self.local_rank}"
        return f"{who} (pid {self.process.pid})"


class Seats:
    """The processes of a host, in the order of their starts."""

    def __init__(self, num_seats: int) -> None:
        self.num_seats = num_seats
        self._ranks: dict[int, Rank] = {}

    def add(self, rank: Rank) -> None:
        self._ranks[rank.member.number] = rank

    def remove(self, rank: Rank) -> None:
        del self._ranks[rank.member.number]

    def __iter__(self) -> Iterator[Rank]:
        return iter(list(self._ranks.values()))

    def __contains__(self, rank: Rank) -> bool:
        return self._ranks.get(rank.member.number) is rank

    def in_phase(self, *phases: Phase) -> list[Rank]:
        return [rank for rank in self._ranks.values() if rank.phase in phases]

    @property
    def training(self) -> list[Rank]:
        """By their numbers in the membership."""
        return sorted(self.in_phase(Phase.TRAINING), key=lambda rank: rank.rank)

    def is_empty(self, local_rank: int) -> bool:
        """Whether no living process has this seat."""
        return all(each.local_rank != local_rank or each.phase is Phase.LOST for each in self._ranks.values())
