"""The connections that a group makes by itself: Gloo on an interface that all ranks can reach, or shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.forked import keep_when_forked
from paceline.comm.given_up import aside
from paceline.errors import ConfigurationError, PeerLostError
from paceline.host.addresses import LOOPBACK, own_address_towards
from paceline.process_group.executor import Executor
from paceline.process_group.folds import Fold, bytes_of
from paceline.process_group.host_collectives import HostVectors
from paceline.schedules import SCHEDULES, Choice, Links, Topology, choose
from paceline.transports import Subset, Transport
from paceline.transports.link_probe import find_links
from paceline.transports.shared_memory import join_host
from paceline.transports.transport import C10dTransport

Gloo = Any  # a ProcessGroupGloo; torch's stubs know none of its methods

INTERFACE = "GLOO_SOCKET_IFNAME"  # Gloo's variable: the network interface to use


def address_towards(num_hosts: int) -> str:
    """Return this host's address on the route to the master. It is "" if unknown, or if GLOO_SOCKET_IFNAME decides."""
    if os.environ.get(INTERFACE):
        return ""
    if num_hosts == 1:
        return LOOPBACK
    return own_address_towards(os.environ.get("MASTER_ADDR", ""))


def make_gloo(
    store: dist.Store, rank: int, size: int, timeout: timedelta, address: str, connects_now: bool = False
) -> Gloo:
    """Make a Gloo group that listens on `address` ("": where Gloo thinks best).

    It connects two ranks when first used, which blocks until both use it; or all at once, which blocks until all come.
    """
    gloo: Any = dist.ProcessGroupGloo
    options: Any = timeout
    if address:
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=address, lazy_init=not connects_now)]

    def make() -> Gloo:
        made = gloo(store, rank, size, options)
        if connects_now:  # a rank that closes it before all have connected takes that from the others
            made.barrier(dist.BarrierOptions()).wait()
        return made

    try:
        made = aside(make)
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {rank} could not connect to all {size} ranks of a new group: one has ended or cannot be reached. "
            f"The backend said: {error}"
        ) from error
    keep_when_forked(made)
    return made


class OpenedWhenUsed:
    """A Gloo group that `make` opens when something of it is first used: collective then, and blocks."""

    def __init__(self, make: Callable[[], Gloo]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if "_made" not in vars(self):
            self._made = self._make()
        return getattr(self._made, name)


def open_vectors(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> HostVectors | None:
    """Let ranks see each other's vectors in memory of their own. Returns None if they are not all on one host.

    Nothing else uses `store`. Collective; blocks until every rank has come.
    """
    host = join_host(dist.PrefixStore("memory", store), rank, num_ranks, timeout)
    return HostVectors(host, timeout.total_seconds()) if host.is_only_one else None


def open_transport(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> Transport:
    """Connect the ranks for messages of a reduction's own. Collective; blocks until every rank has come."""
    address = address_towards(num_ranks)
    return C10dTransport(make_gloo(dist.PrefixStore("gloo", store), rank, num_ranks, timeout, address))


CHOICE = "PACELINE_ALLREDUCE"  # environment variable: the name of a schedule, to be used whatever it costs


class AcrossHosts:
    """Performs all-reduces with the ranks of other hosts, after Goyal et al. 2017, section 4.

    The ranks of equal place on their hosts form a *column*. Each column reduces its own share, all at the same time. So
    each byte crosses the host's link as often as if the host had one rank.
    """

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
        self._transport: Transport | None = None  # among the ranks of the column
        self._links: Links | None = None
        self._only: str | None = None
        self.use(os.environ.get(CHOICE), CHOICE)

    def use(self, name: str | None, set_by: str = "use_schedule") -> None:
        """Use this schedule, or the cheapest one for None. Raises ConfigurationError if there is no such schedule."""
        usable = [known for known, algorithm in SCHEDULES.items() if algorithm.fits(self._columns)]
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

    @property
    def columns(self) -> list[tuple[int, ...]]:
        """Return each column's ranks, by host; none if hosts have one rank each, or are of unequal size."""
        sizes = {*map(len, self._hosts)}
        return list(zip(*self._hosts, strict=True)) if len(sizes) == 1 and sizes != {1} else []

    def exchange(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Send each rank of this column a row, by host, and return theirs: 1-D, of one length. Collective; blocks."""
        if self._transport is None:
            self._transport = Subset(C10dTransport(self._inner), self.columns[self._index])
        others = [host for host in range(len(rows)) if host != self._transport.rank]
        received = [torch.empty_like(row) if host in others else row for host, row in enumerate(rows)]
        sends, receives = ([(host, bytes_of(each[host])) for host in others] for each in (rows, received))
        self._transport.exchange(sends, receives, self._timeout_s)
        return received

    def choose(self, size_bytes: int, itemsize: int) -> Choice:
        """Return the cheapest schedule for a message of all columns together. After `prepare`."""
        assert self._links is not None
        return choose(size_bytes, self._columns, self._links, element_bytes=itemsize, only=self._only)

    def all_reduce(self, share: Tensor, fold: Fold) -> None:
        """Replace a column's share by the fold of all hosts' shares; an average is left a sum, unless it widens."""
        assert self._column is not None
        operation = "SUM" if fold.averages and not fold.widens else fold.name
        schedule = self.choose(share.nbytes * self._num_columns, share.itemsize).schedule
        self._column.run(schedule, share, getattr(dist.ReduceOp, operation), self._timeout_s)
