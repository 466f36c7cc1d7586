"""The all-reduce between hosts: each rank of a host reduces one share of the message with its counterparts elsewhere.

The ranks of equal place on their hosts form a *column*. Each column reduces its own share, all at the same time. So
every rank of a host works. Each byte crosses the host's link as often as if the host had one rank.

Source:
    Goyal et al. 2017, section 4: reduce within the server, halving-doubling or a ring between servers, broadcast.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from paceline.errors import ConfigurationError
from paceline.process_group.connections import Gloo
from paceline.process_group.executor import Executor
from paceline.process_group.folds import Fold
from paceline.schedules import SCHEDULES, Choice, Links, Topology, choose
from paceline.transports import Subset
from paceline.transports.c10d import C10dTransport
from paceline.transports.link_probe import find_links

CHOICE = "PACELINE_ALLREDUCE"  # environment variable: the name of a schedule, to be used whatever it costs


class AcrossHosts:
    """Performs all-reduces with the ranks of other hosts."""

    def __init__(
        self,
        inner: Gloo,  # a Gloo group over all ranks, with no other user at the same time
        hosts: tuple[tuple[int, ...], ...],  # the ranks of every host
        index: int,  # this rank's place on its host
        timeout: timedelta,  # for one collective
    ) -> None:
        host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        self._places = Topology(tuple(host_of[rank] for rank in range(len(host_of))))
        self._columns = Topology.one_rank_a_host(len(hosts))
        self._num_columns = min(len(ranks) for ranks in hosts)
        self._timeout_s = timeout.total_seconds()
        self._inner, self._hosts, self._index = inner, hosts, index
        self._column: Executor | None = None  # None: this rank is in no column
        self._links: Links | None = None
        self._only: str | None = None
        self.use(os.environ.get(CHOICE), CHOICE)

    def use(self, name: str | None, set_by: str = "use_schedule") -> None:
        """Take this schedule, None for the cheapest. ConfigurationError, changing nothing, for an unknown."""
        usable = [
            known
            for known, algorithm in SCHEDULES.items()
            if algorithm.operation == "all_reduce" and algorithm.fits(self._columns)
        ]
        if name is not None and name not in usable:
            raise ConfigurationError(
                f"{set_by}: no schedule called {name!r} reduces between hosts; there are {', '.join(usable)}."
            )
        self._only = name

    def prepare(self) -> None:
        """Learn what the links can do, at the first use. Collective over all ranks of the group."""
        if self._links is None:
            # Not before: on one host the Gloo group is opened by what needs it, at its first call.
            transport = C10dTransport(self._inner)
            if self._index < self._num_columns:
                self._column = Executor(Subset(transport, [ranks[self._index] for ranks in self._hosts]))
            self._links = find_links(transport, self._places, self._timeout_s)

    def choose(self, size_bytes: int, itemsize: int) -> Choice:
        """Return the cheapest schedule for a message of all columns together. After `prepare`."""
        assert self._links is not None
        return choose(
            "all_reduce", size_bytes, self._columns, self._links, element_bytes=itemsize, only=self._only
        )

    def all_reduce(self, share: Tensor, fold: Fold) -> None:
        """Replace a column's share by the fold of all hosts' shares; an average is left a sum."""
        assert self._column is not None
        operation = "SUM" if fold.averages else fold.name
        size_bytes = share.numel() * share.element_size() * self._num_columns
        schedule = self.choose(size_bytes, share.element_size()).schedule
        self._column.run(schedule, share, getattr(dist.ReduceOp, operation), self._timeout_s)
