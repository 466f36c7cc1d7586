"""Which ranks are on one host, as far as a mean within it is meant to be cheap: the same kernel and network."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import torch

from paceline.errors import ConfigurationError
from paceline.host.processes import whereabouts
from paceline.process_group.executor import Executor
from paceline.schedules import Topology, circulant

_CARD_BYTES = 32


def find_hosts(executor: Executor, timeout_s: float) -> Topology:
    """Ask every rank where it runs.

    Contract:
        Collective over the executor's ranks.  Blocks: yes.  Afterwards: the same answer on all ranks.
    """
    num_ranks = executor.transport.num_ranks
    cards = torch.zeros(num_ranks, _CARD_BYTES, dtype=torch.uint8)
    cards[executor.transport.rank] = torch.frombuffer(bytearray(_card()), dtype=torch.uint8)
    executor.run(circulant.all_gather(num_ranks), cards.view(-1), None, timeout_s, operation="hosts")
    return _number([bytes(card.tolist()) for card in cards])


def topology_of(hosts: Sequence[Sequence[int]], num_ranks: int) -> Topology:
    """The topology that a caller has written down.

    Raises:
        ConfigurationError: Not every rank from 0 to `num_ranks` - 1 is on exactly one host.
    """
    ranks = [rank for host in hosts for rank in host]
    if sorted(ranks) != list(range(num_ranks)):
        raise ConfigurationError(
            f"hosts={[list(host) for host in hosts]} names the ranks {sorted(ranks)}; the process group has "
            f"{num_ranks}. Name each rank from 0 to {num_ranks - 1} (of this group) once."
        )
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    return _number([host_of[rank] for rank in range(num_ranks)])


def _number(names: Sequence[bytes] | Sequence[int]) -> Topology:
    """Hosts in the order of their first ranks."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Topology(tuple(numbers[name] for name in names))


def _card() -> bytes:
    """Equal for ranks of one host: the same boot of a kernel, and the same network namespace."""
    try:
        where = whereabouts("net")
    except OSError:
        where = os.uname().nodename
    return hashlib.sha256(where.encode()).digest()
