"""Adasum as a reduction of gradients: `DistributedDataParallel(model, reduction="adasum")`."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.pending import Done, Pending
from paceline.errors import ConfigurationError
from paceline.observe import StepTiming
from paceline.process_group.executor import Executor
from paceline.reductions.adasum.connection import Connection
from paceline.reductions.adasum.hosts import find_hosts, topology_of
from paceline.reductions.adasum.operator import Segments
from paceline.reductions.adasum.performance import Norms
from paceline.reductions.reduction import Message, Reduction, real_numel
from paceline.schedules import Topology

Hosts = Sequence[Sequence[int]] | Literal["auto"] | None


class Adasum(Reduction):
    """Adasum of the ranks' gradients, tensor by tensor: where they agree their mean, where they do not their sum.

    Limits first: not linear, so gradients accumulate right under `no_sync` only, and a model with sparse gradients is
    refused. The result depends on which rank has which number. Tensors of 16 bits are rounded once a level of the
    tree. Tensors of an accelerator are staged in host memory (written for it, tested on CPUs only).

    Args:
        hosts: None: every rank counts by itself. "auto": the mean within each host, Adasum across hosts. Or the hosts
            themselves, as lists of ranks of the process group.

    Attributes:
        orthogonality: |result|^2 / sum of the inputs' |g|^2 in the last step: 1/P where P gradients are equal,
            1 where they are orthogonal. NaN before the first step, and where nothing was combined by Adasum.

    Cost:
        With P a power of two 2(P-1)/P of the gradients' bytes sent by each rank, in 2 log2 P rounds, and log2 P small
        sums of 24 bytes a tensor. See `paceline.schedules.vector_halving`.

    Source:
        Maleki et al. 2021, "Scaling distributed training with adaptive summation".
    """

    is_linear = False

    def __init__(self, hosts: Hosts = None) -> None:
        if isinstance(hosts, str) and hosts != "auto":
            raise ConfigurationError(f'hosts={hosts!r}: give None, "auto" or lists of ranks.')
        self.hosts: Hosts = hosts if hosts is None or isinstance(hosts, str) else tuple(map(tuple, hosts))
        self.orthogonality = math.nan
        self._connection: Connection | None = None
        self._prepared_for: ProcessGroup | None = None
        self._lock = threading.Lock()  # norms come from the lane
        self._norms: list[Norms] = []

    def __repr__(self) -> str:
        hosts = (
            self.hosts if self.hosts is None or isinstance(self.hosts, str) else list(map(list, self.hosts))
        )
        return f"{type(self).__name__}(hosts={hosts!r})"

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes connections of its own."""
        return {"hosts": self.hosts}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        Adasum.__init__(self, state["hosts"])

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        if self.hosts is not None and not isinstance(self.hosts, str):
            topology_of(self.hosts, process_group.size())
        for name, parameter in named_parameters.items():
            if not (parameter.is_floating_point() or parameter.is_complex()) or parameter.dtype.itemsize < 2:
                raise ConfigurationError(
                    f"Adasum cannot combine gradients of {name}, which is {parameter.dtype}; it takes floating and "
                    "complex tensors of 16 bits or more."
                )
        if process_group is not self._prepared_for:
            self._connection = None  # that of a group which may have been destroyed
        self._prepared_for = process_group

    def begin_step(self) -> None:
        with self._lock:
            self._norms = []

    def input_scale(self, num_ranks: int) -> float:
        return 1.0

    def launch(self, message: Message) -> Pending:
        if message.process_group.size() == 1:
            return Done()
        if self._connection is None:
            self._connection = Connection(message.process_group, message.flat.device, self._find_topology)
        sizes = tuple(map(real_numel, message.gradients))
        return self._connection.launch(message.body, Segments(sizes), self._keep)

    def end_step(self, timing: StepTiming) -> None:
        self.note_step()

    def note_step(self) -> None:
        """All messages of a step have been reduced: take stock. Local."""
        with self._lock:
            of_result = sum(norms.of_result for norms in self._norms)
            of_inputs = sum(norms.of_inputs for norms in self._norms)
        self.orthogonality = of_result / of_inputs if of_inputs > 0 else math.nan

    def _keep(self, norms: Norms) -> None:
        with self._lock:
            self._norms.append(norms)

    def _find_topology(self, executor: Executor, timeout_s: float) -> Topology:
        num_ranks = executor.transport.num_ranks
        if self.hosts is None:
            return Topology.one_rank_a_host(num_ranks)
        if not isinstance(self.hosts, str):
            return topology_of(self.hosts, num_ranks)
        found = find_hosts(executor, timeout_s)
        if found.num_hosts == 1 and executor.transport.rank == 0:
            warnings.warn(
                f'Adasum(hosts="auto") found all {num_ranks} ranks on one host: their gradients are averaged, and '
                "nothing is combined by Adasum. Leave hosts out to combine the ranks of one host by Adasum.",
                UserWarning,
                stacklevel=1,
            )
        return found
