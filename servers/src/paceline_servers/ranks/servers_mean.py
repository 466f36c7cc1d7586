"""The mean of the ranks' gradients, summed by parameter servers: `reduction=ParameterServers()`.

Rules
1. Buckets leave during backward. Each is cut into pieces of at most about 1 MiB, all keys of a piece on one server. A
   piece is pulled as soon as all ranks have pushed it, so a link carries both directions at once.
2. Servers add up in the order of the ranks, so every rank and every run has the same bits.
3. It has its own connections, made at the first launch. Statuses, buffers and sparse gradients go over the process
   group.
4. With `ServerOptimizer` the answer to a gradient is the stepped parameter (`stepped.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm import Work
from paceline.errors import ConfigurationError
from paceline.reductions import Message, Reduction, StepEnd
from paceline_servers.ranks.server_connections import ServerConnections, supported
from paceline_servers.ranks.stepped import SteppedModel

if TYPE_CHECKING:
    from paceline_lossy import LossyTransport


class ParameterServers(Reduction):
    """The mean of the ranks' gradients, pushed to servers and pulled from them. Any optimizer on the ranks steps it.

    Limits first: it needs processes and links in addition to the ranks'. If every host has a rank and the same link, an
    all-reduce sends as much without them. Gradients of an accelerator are staged through host memory, which was tested
    on CPUs only.

    Args:
        addresses: The servers' addresses, `host:port`; the same on every rank. None: the servers that
            `paceline run --servers` started or was given.

    Cost:
        Each rank sends and receives the gradients once, at the same time. The servers together receive and send them
        once for every rank. Each holds pushes of ranks that are ahead, up to 1 GiB per model; then those ranks wait.

    Source:
        Li et al. 2014, "Scaling distributed machine learning with the parameter server", synchronous, with keys cut by
        bytes; the number of servers: Zou et al. 2017, lemma 3.2 (`paceline plan --servers`).
    """

    needs_all_buckets = True

    def __init__(self, addresses: Sequence[str] | None = None) -> None:
        if isinstance(addresses, str) or (addresses is not None and not addresses):
            raise ConfigurationError(
                f'addresses={addresses!r}: give a list of servers, ["10.0.0.5:7000", "10.0.0.6:7000"], at least one; '
                "or None for those of paceline run --servers."
            )
        self._addresses = None if addresses is None else tuple(addresses)
        self._connection: ServerConnections | None = None
        self._prepared_for: ProcessGroup | None = None
        self._named: Mapping[str, Parameter] = {}
        self.stepped: SteppedModel | None = None
        """The optimizer that the servers step, or None."""

    @property
    def addresses(self) -> Sequence[str] | None:
        """Return the servers' addresses; None for the servers of all ranks' launchers."""
        return self._addresses

    def __repr__(self) -> str:
        return f"ParameterServers(addresses={None if self._addresses is None else list(self._addresses)})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only. A copy makes its own connections."""
        return {"addresses": self._addresses}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        ParameterServers.__init__(self, state["addresses"])

    @property
    def is_linear(self) -> bool:  # type: ignore[override]
        """Return whether gradients may be added afterwards. They may not if the servers have stepped with them."""
        return self.stepped is None

    def why_not_over(self, process_group: ProcessGroup | None) -> str:
        if process_group is None:
            return (
                "ParameterServers needs servers that outlive the ranks they have met, and no launcher restarts "
                "servers. Use the mean."
            )
        if self.stepped is not None:
            return (
                "the servers step an optimizer, whose state they keep for the ranks that they have met, so other ranks "
                "cannot go on with it. Save a checkpoint and start again with the new ranks, or leave out "
                "ServerOptimizer."
            )
        return ""

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        for name, parameter in named_parameters.items():
            real = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
            if real not in supported:
                raise ConfigurationError(
                    f"ParameterServers cannot sum gradients of {name}, which is {real}: they sum "
                    f"{', '.join(sorted(map(str, supported)))}. Cast the parameter, or leave out ParameterServers."
                )
        is_another = list(map(id, named_parameters.values())) != list(map(id, self._named.values()))
        if self.stepped is not None and is_another:
            raise ConfigurationError(
                "the servers step an optimizer, and the parameters that are trained have changed since it was made "
                "(unfrozen?). Make a new model with ParameterServers() and a new ServerOptimizer."
            )
        if process_group is not self._prepared_for or is_another:
            self._connection = None
        self._prepared_for = process_group
        self._named = dict(named_parameters)

    @property
    def named_parameters(self) -> Mapping[str, Parameter]:
        """Return the parameters whose gradients are pushed."""
        return self._named

    def step_by(self, stepped: SteppedModel) -> None:
        """Let the servers step from now on. Called by `ServerOptimizer` before the first step."""
        if self.stepped is not None or self._connection is not None:
            raise ConfigurationError(
                "a ServerOptimizer is made once for a model, before its first backward: servers that have begun "
                "without one, or with another, go on so. For another optimizer wrap the model again, with a new "
                "ParameterServers()."
            )
        self.stepped = stepped

    def connect(self) -> ServerConnections:
        """Return the connections, made at the first use. Collective the first time; does not block."""
        if self._connection is None:
            assert self._prepared_for is not None, "DistributedDataParallel has prepared it"
            parameters = list(self._named.values())

            def on_open(connection: ServerConnections) -> None:
                if self.stepped is not None:
                    self.stepped.set_up(connection)

            self._connection = ServerConnections(
                self._prepared_for, parameters, parameters[0].device, self._addresses, on_open
            )
        return self._connection

    def begin_step(self, num_ranks: int, active_ratio: float = 1.0, share: float | None = None) -> float:
        if self.stepped is not None:
            self.stepped.begin_step()
        return 1.0 / num_ranks

    def launch(self, message: Message) -> Work:
        connection = self.connect()
        if self.stepped is None:
            return connection.launch(message, message.body)
        return self.stepped.launch(connection, message)

    def launch_sparse(
        self, gradient: Tensor, process_group: ProcessGroup, keep: Callable[[Tensor], None]
    ) -> Work:
        if self.stepped is not None:
            raise ConfigurationError(
                "the servers step dense gradients only. Build the embedding with sparse=False, or leave out "
                "ServerOptimizer: ParameterServers() averages sparse gradients over the process group."
            )
        return super().launch_sparse(gradient, process_group, keep)

    def end_step(self, ended: StepEnd) -> None:
        if self.stepped is not None:
            self.stepped.end_step(self._named.values(), ended.unused)

    def open_sums(
        self, process_group: ProcessGroup, device: torch.device, num_ports: int
    ) -> Callable[[ProcessGroup], LossyTransport]:
        """Return the function that makes this rank's transport for `BoundedLoss(servers=)`. Collective."""
        from paceline_servers.ranks.server_sums import over_servers  # noqa: PLC0415  it needs paceline-lossy

        return over_servers(process_group, device, self._addresses, num_ports)

    @property
    def bytes_by_server(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the bytes that this rank has sent to each server and received from it, headers included. Local."""
        if self._connection is None or not self._connection.is_open:
            return (), ()
        return self._connection.link.bytes_sent, self._connection.link.bytes_received
