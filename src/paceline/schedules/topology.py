"""The topology: each rank's host, and the latency and rate of the links within and between hosts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.errors import ConfigurationError

_LINKS = re.compile(r"within=(\S+)\s+between=(\S+)")


@dataclass(frozen=True)
class Topology:
    """The host of each rank; hosts are numbered 0 to H-1 in any order."""

    host_of_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        hosts = set(self.host_of_rank)
        if not hosts or hosts != set(range(len(hosts))):
            raise ConfigurationError(
                f"host_of_rank is {self.host_of_rank}; every rank has a host, numbered from 0 without gaps"
            )

    @classmethod
    def one_host(cls, num_ranks: int) -> Topology:
        return cls((0,) * num_ranks)

    @classmethod
    def one_rank_a_host(cls, num_ranks: int) -> Topology:
        return cls(tuple(range(num_ranks)))

    @property
    def num_ranks(self) -> int:
        return len(self.host_of_rank)

    @property
    def num_hosts(self) -> int:
        return len(self.ranks_of_host)

    @cached_property
    def ranks_of_host(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each host in ascending order; a rank's place in it is its local index."""
        ranks: list[list[int]] = [[] for _ in set(self.host_of_rank)]
        for rank, host in enumerate(self.host_of_rank):
            ranks[host].append(rank)
        return tuple(map(tuple, ranks))

    def __str__(self) -> str:
        if self.num_hosts == 1:
            return f"{self.num_ranks} ranks on one host"
        sizes = {len(ranks) for ranks in self.ranks_of_host}
        each = f" x {sizes.pop()}" if len(sizes) == 1 else ""
        return f"{self.num_ranks} ranks on {self.num_hosts} hosts{each}"


@dataclass(frozen=True)
class Link:
    """A connection of a host, shared by all its ranks, which sends and receives at the same time."""

    latency_s: float
    """From the start of a round to the arrival of an empty message, when every rank sends one."""
    bytes_per_s: float
    """All ranks of a host together, when all send."""
    message_s: float = 0.0
    """What each further message of a rank in the same round costs it."""

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or min(self.latency_s, self.message_s) < 0 or math.isnan(self.latency_s):
            raise ConfigurationError(f"{self}: the rate must be above 0, and the times at least 0.")


@dataclass(frozen=True)
class Links:
    """The link inside a host, the link of a host to all others, and what folding costs a rank."""

    within: Link
    between: Link
    fold_s_per_byte: float = 0.0

    def to_numbers(self) -> list[float]:
        """Return all numbers as one list, for messages."""
        links = (self.within, self.between)
        return [x for link in links for x in (link.latency_s, link.bytes_per_s, link.message_s)] + [
            self.fold_s_per_byte
        ]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Links:
        return cls(Link(*numbers[:3]), Link(*numbers[3:6]), numbers[6])

    @classmethod
    def parse(cls, text: str) -> Links:
        """Read "within=2e-5/4e9/1e-5 between=1e-4/125e6": latency (s), rate (bytes per s), s per further message."""
        match = _LINKS.fullmatch(text.strip())
        try:
            if match is None:
                raise ValueError(text)  # noqa: TRY301 - one message for both
            within, between = (Link(*map(float, numbers.split("/"))) for numbers in match.groups())
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"links {text!r}: expected latency (s), rate (bytes per s) and perhaps that of a further message (s) "
                "of both links, as in 'within=2e-5/4e9/1e-5 between=1e-4/125e6'"
            ) from error
        return cls(within, between)
