"""The all-reduce between hosts: each rank of a host reduces one share of the message with its counterparts elsewhere.

The ranks of equal place on their hosts form a *column*. Each column reduces its own share, all at the same time, so
every rank of a host works, and each byte crosses the host's link as often as if the host had one rank.

Source:
    Goyal et al. 2017, section 4: reduce within the server, halving-doubling or a ring between servers, broadcast.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ConfigurationError
from paceline.process_group.connections import Gloo
from paceline.process_group.executor import Executor
from paceline.process_group.folds import Fold
from paceline.process_group.path_between_hosts import open_path
from paceline.schedules import SCHEDULES, Choice, Links, Topology, choose
from paceline.transports import Subset
from paceline.transports.c10d import C10dTransport
from paceline.transports.link_probe import find_links

if TYPE_CHECKING:
    from paceline.transports import Transport

CHOICE = "PACELINE_ALLREDUCE"  # environment variable: the name of a schedule, to be used whatever it costs


class AcrossHosts:
    """All-reduces with the ranks of other hosts; broadcasts and gathers, too, where the path is not Gloo's own."""

    def __init__(
        self,
        inner: Gloo,  # a Gloo group over all ranks, used by nobody else at the same time
        store: dist.Store,  # for the path's connections alone
        hosts: tuple[tuple[int, ...], ...],  # the ranks of every host
        index: int,  # this rank's place on its host
        timeout: timedelta,  # for one collective
        wanted: str,  # the path, by `wanted_path`
    ) -> None:
        self._inner, self._store, self._timeout = inner, store, timeout
        self._path: Transport | None = None
        self._hosts, self._index = hosts, index
        host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        self._places = Topology(tuple(host_of[rank] for rank in range(len(host_of))))
        self._columns = Topology.one_rank_a_host(len(hosts))
        self._num_columns = min(len(ranks) for ranks in hosts)
        self._timeout_s = timeout.total_seconds()
        self._column: Executor | None = None
        self._all_ranks: dict[int, Executor] = {}  # by the rank that is the first one there
        self._links: Links | None = None
        self._only: str | None = None
        self._wanted = wanted
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
            self._links = find_links(self._open(), self._places, self._timeout_s)

    def _open(self) -> Transport:
        """The path, opened at the first use. Collective over all ranks of the group."""
        if self._path is None:
            self._path = open_path(self._inner, self._store, self._timeout, self._wanted)
            if self._index < self._num_columns:
                column = [ranks[self._index] for ranks in self._hosts]
                self._column = Executor(Subset(self._path, column))
        return self._path

    def is_by_datagrams(self) -> bool:
        """Whether the path is UDP. Collective over all ranks of the group at the first use."""
        return not isinstance(self._open(), C10dTransport)

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

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Give every rank `root`'s bytes, over this path. Shape (N,), contiguous."""
        self._run("broadcast_tree", flat.view(torch.uint8), root, "broadcast")

    def all_gather(self, flat: Tensor) -> None:
        """Give every rank all ranks' bytes. Shape (P * N,): rank r's are in the r-th of P equal parts."""
        self._run("all_gather_direct", flat.view(torch.uint8), 0, "all-gather")

    def _run(self, name: str, flat: Tensor, first: int, operation: str) -> None:
        ranks = self._inner.size()
        if first not in self._all_ranks:
            members = [(first + rank) % ranks for rank in range(ranks)]
            self._all_ranks[first] = Executor(Subset(self._open(), members))
        schedule = SCHEDULES[name].build(Topology.one_rank_a_host(ranks))
        self._all_ranks[first].run(schedule, flat, None, self._timeout_s, operation=operation)

    def close(self) -> None:
        """Let go of connections of its own. Local."""
        if close := getattr(self._path, "close", None):  # that of datagrams
            close()
