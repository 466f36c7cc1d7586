"""Adasum as a reduction of gradients, `DistributedDataParallel(model, reduction="adasum")`, and its connections.

Rules
1. If the caller's group shares memory, Adasum of all its ranks is a collective of that group, on the tensors in place.
   Otherwise, and if it `is_apart`, it has connections of its own, so that its messages never meet other traffic on the
   caller's group. They are memory that all ranks share if they are on one host, else a Gloo group. Both are made from
   c10d's store alone, without `new_group`, which is safe for groups over some of the world's ranks.
2. Their key in the store is random, drawn by rank 0 and broadcast over the caller's group at the first launch. So it
   cannot differ between ranks with a different history, such as a failed constructor on one of them.
3. Everything that blocks runs on a lane (one thread): Adasums are performed in the order of their launch.
4. A tensor of an accelerator is staged through host memory.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm import C10dWork, Chain, Lane, LaneWork, Work, launch_session_name, store_of_job, timeout_of
from paceline.errors import ConfigurationError
from paceline.host.processes import whereabouts
from paceline.process_group import (
    Executor,
    HostVectors,
    flat_of,
    open_transport,
    open_vectors,
    shared_vectors_of,
    write_back,
)
from paceline.reductions import Message, Reduction, StepEnd, real_numel
from paceline.schedules import Topology
from paceline.schedules.flat import circulant
from paceline_adasum.operator import Norms, Segments
from paceline_adasum.over_ranks import AdasumOverRanks, combine_shared
from paceline_adasum.vector_halving import vector_halving

Hosts = Sequence[Sequence[int]] | Literal["auto"] | None
FindTopology = Callable[[Executor, float], Topology]

_HOST_ID_BYTES = 32


class Adasum(Reduction):
    """Adasum of the ranks' gradients, tensor by tensor: where they agree their mean, where they do not their sum.

    Limits first: not linear, so gradients accumulate correctly under `no_sync` only, and a model with sparse gradients
    is refused. The result depends on which rank has which number. Tensors of 16 bits are rounded once for each level of
    the tree. Tensors of an accelerator are staged in host memory (written for it, tested on CPUs only).

    Args:
        hosts: None: Adasum over all ranks. "auto": the mean within each host, Adasum across hosts. Or the hosts, as
            lists of ranks of the process group.

    Attributes:
        orthogonality: |result|^2 / sum of the inputs' |g|^2 in the last step. If P gradients are equal, it is 1/P; if
            they are orthogonal, 1. NaN before the first step, and if nothing was combined by Adasum.
        is_apart: Whether it never uses the caller's group after its first launch. `AdasumOptimizer` sets it where it
            launches within backward, in which the script may use the group in another order on each rank.

    Cost:
        If P is a power of two, each rank sends 2(P-1)/P of the gradients' bytes, in `2 log2 P` rounds. It also takes
        part in `log2 P` small all-reduces of 24 bytes for each tensor. See `vector_halving`.

    Source:
        Maleki et al. 2021, "Scaling distributed training with adaptive summation".
    """

    is_linear = False

    def __init__(self, hosts: Hosts = None) -> None:
        if hosts not in (None, "auto") and not _are_lists_of_ranks(hosts):
            raise ConfigurationError(f'hosts={hosts!r}: give None, "auto" or lists of ranks.')
        self.hosts: Hosts = hosts if hosts is None or isinstance(hosts, str) else tuple(map(tuple, hosts))
        self.orthogonality = math.nan
        self.is_apart = False
        self._connection: AdasumConnection | None = None
        self._prepared_for: ProcessGroup | None = None
        self._lock = threading.Lock()  # `_keep` is called on the lane's thread
        self._norms: list[Norms] = []

    def __repr__(self) -> str:
        hosts = (
            self.hosts if self.hosts is None or isinstance(self.hosts, str) else list(map(list, self.hosts))
        )
        return f"{type(self).__name__}(hosts={hosts!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Keep the settings alone: a copy makes connections of its own."""
        return {"hosts": self.hosts}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        Adasum.__init__(self, state["hosts"])

    def why_not_over(self, process_group: ProcessGroup | None) -> str:
        if process_group is None or self.hosts is None or isinstance(self.hosts, str):
            return ""
        return _why_not_hosts(self.hosts, process_group.size())

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        if why := self.why_not_over(process_group):
            raise ConfigurationError(why)
        for name, parameter in named_parameters.items():
            if not (parameter.is_floating_point() or parameter.is_complex()) or parameter.dtype.itemsize < 2:
                raise ConfigurationError(
                    f"Adasum cannot combine gradients of {name}, which is {parameter.dtype}; it takes floating and "
                    "complex tensors of 16 bits or more. Cast the parameter."
                )
        if process_group is not self._prepared_for:
            self._connection = None  # the other group may have been destroyed
        self._prepared_for = process_group

    def begin_step(self, num_ranks: int, active_ratio: float = 1.0, share: float | None = None) -> float:
        with self._lock:
            self._norms = []
        return active_ratio  # a rank without samples counts as if it were not there

    def launch(self, message: Message) -> Work:
        if message.process_group.size() == 1:
            return Chain()
        segments = Segments(tuple(map(real_numel, message.gradients)))
        is_in_group = self.hosts is None and not self.is_apart
        on_all_vectors = shared_vectors_of(message.process_group) if is_in_group else None
        if on_all_vectors is not None:
            work = on_all_vectors(
                "adasum", message.body, lambda vectors: self._keep(combine_shared(vectors, segments))
            )
            return C10dWork(work)
        if self._connection is None:
            find_topology = None if self.hosts is None else self._find_topology
            self._connection = AdasumConnection(message.process_group, message.flat.device, find_topology)
        return self._connection.launch(message.body, segments, self._keep)

    def end_step(self, ended: StepEnd) -> None:
        self.note_step()

    def note_step(self) -> None:
        """Compute `orthogonality` when all messages of a step have been reduced. Local."""
        with self._lock:
            of_result = sum(norms.of_result for norms in self._norms)
            of_inputs = sum(norms.of_inputs for norms in self._norms)
        self.orthogonality = of_result / of_inputs if of_inputs > 0 else math.nan

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent so far; 0 within one host, where memory is shared."""
        return 0 if self._connection is None else self._connection.bytes_sent

    def _keep(self, norms: Norms) -> None:
        with self._lock:
            self._norms.append(norms)

    def _find_topology(self, executor: Executor, timeout_s: float) -> Topology:
        num_ranks = executor.transport.num_ranks
        if self.hosts is not None and not isinstance(self.hosts, str):
            return _topology_of(self.hosts, num_ranks)
        found = _find_hosts(executor, timeout_s)
        if found.num_hosts == 1 and executor.transport.rank == 0:
            warnings.warn(
                f'Adasum(hosts="auto") found all {num_ranks} ranks on one host: their gradients are averaged, and '
                "nothing is combined by Adasum. Leave hosts out to combine the ranks of one host by Adasum.",
                UserWarning,
                stacklevel=1,
            )
        return found


class AdasumConnection:
    """The transport and the thread of the Adasums over one process group.

    The constructor and `launch` are collective, and neither blocks.

    `find_topology`, a collective, is given an executor and a timeout in seconds. It returns the hosts within which the
    mean is taken. If it is None, all ranks are combined by Adasum.
    """

    def __init__(
        self, process_group: ProcessGroup, device: torch.device, find_topology: FindTopology | None
    ) -> None:
        self.process_group = process_group
        self._find_topology = find_topology
        self._timeout = timeout_of(process_group)
        self._store = store_of_job("Adasum")
        self._session_name = launch_session_name(process_group, device)
        self._combiner: AdasumOverRanks | HostVectors | None = None
        self._lane = Lane(f"paceline adasum lane of rank {process_group.rank()}")
        self._let_go = weakref.finalize(self, self._lane.close, 0.0)

    def launch(self, flat: Tensor, segments: Segments, keep: Callable[[Norms], None]) -> C10dWork:
        """Start replacing `flat` by the Adasum of all ranks' vectors. Collective; does not block.

        `flat` is contiguous, shape (N,), floating. `keep` is called with the norms before the result is done, on the
        lane's thread.
        """

        def perform() -> None:
            values = flat_of(flat)
            combiner = self._connect()
            if isinstance(combiner, AdasumOverRanks):
                keep(combiner.run(values, segments))
            else:
                combiner.on_all("adasum", values, lambda vectors: keep(combine_shared(vectors, segments)))
            write_back(values, flat)

        work = LaneWork(perform, [flat], "adasum")
        self._lane.launch(work, at_once=False)
        return C10dWork(work)

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent so far."""
        combiner = self._combiner
        return combiner.transport.bytes_sent if isinstance(combiner, AdasumOverRanks) else 0

    def _connect(self) -> AdasumOverRanks | HostVectors:
        """Connect to the other ranks at the first use. Collective; runs on the lane's thread."""
        if self._combiner is None:
            store = dist.PrefixStore(f"paceline/adasum/{self._session_name()}", self._store)
            who = store, self.process_group.rank(), self.process_group.size(), self._timeout
            if self._find_topology is None:
                self._combiner = open_vectors(*who)
        if self._combiner is None:
            transport, timeout_s = open_transport(*who), self._timeout.total_seconds()
            topology = Topology.one_rank_a_host(self.process_group.size())
            if self._find_topology is not None:
                topology = self._find_topology(Executor(transport), timeout_s)
            self._combiner = AdasumOverRanks(transport, vector_halving(topology), timeout_s)
        return self._combiner


def _find_hosts(executor: Executor, timeout_s: float) -> Topology:
    """All-gather which host each rank runs on. Collective over the executor's ranks; blocks."""
    num_ranks = executor.transport.num_ranks
    host_ids = torch.zeros(num_ranks, _HOST_ID_BYTES, dtype=torch.uint8)
    host_ids[executor.transport.rank] = torch.frombuffer(bytearray(_host_id()), dtype=torch.uint8)
    executor.run(circulant.all_gather(num_ranks), host_ids.view(-1), None, timeout_s, operation="hosts")
    return _number([bytes(host_id.tolist()) for host_id in host_ids])


def _why_not_hosts(hosts: Sequence[Sequence[int]], num_ranks: int) -> str:
    """Return why these lists of ranks are not the hosts of so many ranks; "" if they are."""
    ranks = sorted(rank for host in hosts for rank in host)
    if ranks == list(range(num_ranks)):
        return ""
    return (
        f"hosts={[list(host) for host in hosts]} names the ranks {ranks}; the process group has "
        f"{num_ranks}. Name each rank from 0 to {num_ranks - 1} (of this group) once."
    )


def _topology_of(hosts: Sequence[Sequence[int]], num_ranks: int) -> Topology:
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    return _number([host_of[rank] for rank in range(num_ranks)])


def _number(names: Sequence[bytes] | Sequence[int]) -> Topology:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Topology(tuple(numbers[name] for name in names))


def _host_id() -> bytes:
    """Return a value that is equal for ranks under one boot of a kernel in one network namespace."""
    try:
        where = whereabouts("net")
    except OSError:
        where = os.uname().nodename
    return hashlib.sha256(where.encode()).digest()


def _are_lists_of_ranks(hosts: object) -> bool:
    lists = hosts if isinstance(hosts, list | tuple) else [None]
    return all(
        isinstance(ranks, list | tuple | range) and all(isinstance(rank, int) for rank in ranks)
        for ranks in lists
    )
