"""The price of a schedule: exact numbers of rounds and bytes, and the time that an alpha-beta model predicts.

In a round a host's ranks send w bytes to each other, and b bytes to or from other hosts: the larger of both directions.
One rank sends at most m messages. The model is:

    t = alpha + (m - 1) message_s + max over hosts of max(w / B_within, b / B_between) + folding

alpha is the larger latency of the links in use, B a link's rate. Rounds follow each other; a schedule's time is
their sum. Not in the model: one rank's round starts before another's has ended; congestion beyond a host's link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigurationError
from paceline.schedules.schedule import HEADER_BYTES, Round, Schedule, cut
from paceline.schedules.topology import Link, Links, Topology


@dataclass(frozen=True)
class Price:
    """The price of one collective."""

    rounds: int
    bytes_sent: tuple[int, ...]
    """By each rank, without headers."""
    header_bytes: tuple[int, ...]
    """By each rank, for the headers that go with its first messages."""
    bytes_over_links: tuple[int, ...]
    """Sent by each host to other hosts, without headers."""
    time_s: float

    @property
    def bytes_per_rank(self) -> int:
        """Return the bytes of the rank that sends most."""
        return max(self.bytes_sent)


def price(
    schedule: Schedule,
    message_bytes: int,
    topology: Topology,
    links: Links,
    *,
    element_bytes: int = 1,
    partial_bytes: int | None = None,
) -> Price:
    """Count what `schedule` sends, and predict how long it takes.

    Bytes are exact if `element_bytes` is the size of an element, since elements are not cut. `partial_bytes` is that of
    an element of a partial result on the wire, where it differs. Raises ConfigurationError if the topology has another
    number of ranks, or the message a fraction of an element.
    """
    if topology.num_ranks != schedule.num_ranks:
        raise ConfigurationError(
            f"{schedule.name} is for {schedule.num_ranks} ranks, the topology has {topology}"
        )
    if message_bytes < 0 or message_bytes % element_bytes:
        raise ConfigurationError(f"{message_bytes} bytes are not a number of {element_bytes}-byte elements")
    cuts = cut(message_bytes // element_bytes, schedule.num_blocks)
    counting = _Counting(topology, links, cuts, element_bytes, partial_bytes or element_bytes)
    rounds = zip(schedule.rounds, schedule.partial, schedule.introduces, strict=True)
    time_s = sum(counting.round_s(*round_) for round_ in rounds)
    return Price(
        rounds=len(schedule.rounds),
        bytes_sent=tuple(counting.sent[rank] for rank in range(topology.num_ranks)),
        header_bytes=tuple(counting.headers[rank] for rank in range(topology.num_ranks)),
        bytes_over_links=tuple(counting.over_link[host] for host in range(topology.num_hosts)),
        time_s=time_s,
    )


@dataclass
class _Counting:
    """The sums of bytes and times over the rounds of one schedule."""

    topology: Topology
    links: Links
    cuts: tuple[int, ...]
    element_bytes: int
    partial_bytes: int
    sent: Counter[int] = field(default_factory=Counter)
    headers: Counter[int] = field(default_factory=Counter)
    over_link: Counter[int] = field(default_factory=Counter)

    def round_s(self, transfers: Round, partials: Sequence[bool], introduces: Sequence[bool]) -> float:
        """Count one round, and return how long it takes."""
        within: Counter[int] = Counter()  # bytes inside each host
        out: Counter[int] = Counter()  # from each host
        into: Counter[int] = Counter()  # to each host
        folded: Counter[int] = Counter()  # by each rank
        messages: dict[Link, Counter[int]] = {}  # from each rank, by link
        for t, partial, header in zip(transfers, partials, introduces, strict=True):
            each = self.partial_bytes if partial else self.element_bytes
            size = (self.cuts[t.last] - self.cuts[t.first]) * each
            if not size and not header:
                continue  # nothing is sent for an empty block
            source, target = (self.topology.host_of_rank[rank] for rank in (t.source, t.target))
            self.sent[t.source] += size
            self.headers[t.source] += HEADER_BYTES * header
            link = self.links.within if source == target else self.links.between
            messages.setdefault(link, Counter())[t.source] += (size > 0) + header
            if source == target:
                within[source] += size
            else:
                out[source] += size
                into[target] += size
                self.over_link[source] += size
            if t.fold:
                folded[t.target] += size
        return self._latency_s(messages) + self._sending_s(within, out, into) + self._folding_s(folded)

    def _latency_s(self, messages: dict[Link, Counter[int]]) -> float:
        return max(
            (link.latency_s + (max(count.values()) - 1) * link.message_s for link, count in messages.items()),
            default=0.0,
        )

    def _sending_s(self, within: Counter[int], out: Counter[int], into: Counter[int]) -> float:
        inside = max(within.values(), default=0) / self.links.within.bytes_per_s
        outside = max([*out.values(), *into.values()], default=0) / self.links.between.bytes_per_s
        return max(inside, outside)

    def _folding_s(self, folded: Counter[int]) -> float:
        return max(folded.values(), default=0) * self.links.fold_s_per_byte
