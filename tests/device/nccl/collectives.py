"""The collectives, as operations on the host's memory of their tensors (`communicator.Operation`).

Sums are folded in the order of the ranks, so every rank has the same bits; of two ranks they are Gloo's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device.late import host_alias
from device.nccl import moments
from device.nccl.communicator import Operation
from device.nccl.exchange import Exchange

_Fold = Callable[[Tensor, Tensor], Tensor]
_FOLDS: dict[Any, _Fold] = {
    dist.ReduceOp.SUM: operator.add,
    dist.ReduceOp.AVG: operator.add,
    dist.ReduceOp.PRODUCT: operator.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: operator.and_,
    dist.ReduceOp.BOR: operator.or_,
    dist.ReduceOp.BXOR: operator.xor,
}


def fold_of(op: Any) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return what combines the ranks' contributions, in their order.

    Raises:
        ValueError: There is no such reduction.
    """
    found = next((fold for known, fold in _FOLDS.items() if op == known), None)
    if found is None:
        raise ValueError(f"the fake NCCL has no reduction {op}")

    def fold(rows: Sequence[Tensor]) -> Tensor:
        total = functools.reduce(found, rows)
        return total / len(rows) if op == dist.ReduceOp.AVG else total

    return fold


def all_reduce(tensors: Sequence[Tensor], op: Any) -> Operation:
    hosts, fold = [host_alias(t) for t in tensors], fold_of(op)

    def perform(exchange: Exchange, step: str) -> None:
        for i, host in enumerate(hosts):
            host.copy_(fold(_gathered(exchange, step, f"{i}", host)))
        _end(exchange, step, len(hosts))

    return Operation("all_reduce", perform, writes=tensors)


def all_gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Operation:
    """Fill the i-th row of outputs with what each rank gives as its i-th input."""
    into = [[host_alias(o) for o in row] for row in outputs]
    hosts = [host_alias(t) for t in inputs]

    def perform(exchange: Exchange, step: str) -> None:
        for i, (row, host) in enumerate(zip(into, hosts, strict=True)):
            for to, value in zip(row, _gathered(exchange, step, f"{i}", host), strict=True):
                to.copy_(value.view(to.shape))
        _end(exchange, step, len(hosts))

    return Operation("all_gather", perform, inputs, [o for row in outputs for o in row])


def reduce_scatter(outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: Any) -> Operation:
    """Fill the i-th output of each rank with the fold of what the ranks have for it in their i-th row of inputs."""
    hosts = [[host_alias(t) for t in row] for row in inputs]
    into, fold = [host_alias(o) for o in outputs], fold_of(op)

    def perform(exchange: Exchange, step: str) -> None:
        for i, (row, to) in enumerate(zip(hosts, into, strict=True)):
            for to_rank, host in enumerate(row):
                exchange.put(step, f"{i}/{exchange.rank}-{to_rank}", host)
            parts = (exchange.take(step, f"{i}/{r}-{exchange.rank}", to) for r in range(exchange.size))
            to.copy_(fold(list(parts)))
        _end_of_pairs(exchange, step, len(into))

    return Operation("reduce_scatter", perform, [t for row in inputs for t in row], outputs)


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
    """Send the i-th input to rank i, and fill the i-th output with what rank i sends."""
    hosts, into = [host_alias(t) for t in inputs], [host_alias(o) for o in outputs]

    def perform(exchange: Exchange, step: str) -> None:
        for to_rank, host in enumerate(hosts):
            exchange.put(step, f"0/{exchange.rank}-{to_rank}", host)
        for from_rank, to in enumerate(into):
            to.copy_(exchange.take(step, f"0/{from_rank}-{exchange.rank}", to))
        _end_of_pairs(exchange, step, 1)

    return Operation("all_to_all", perform, inputs, outputs)


def broadcast(tensors: Sequence[Tensor], root: int) -> Operation:
    hosts = [host_alias(t) for t in tensors]

    def perform(exchange: Exchange, step: str) -> None:
        for i, host in enumerate(hosts):
            if exchange.rank == root:
                exchange.put(step, f"{i}/{root}", host)
            moments.come(exchange.rank, step, "within")
            if exchange.rank != root:
                host.copy_(exchange.take(step, f"{i}/{root}", host))
        exchange.end(step, [f"{i}/{root}" for i in range(len(hosts))])

    return Operation("broadcast", perform, writes=tensors)


def reduce(tensor: Tensor, root: int, op: Any) -> Operation:
    host, fold = host_alias(tensor), fold_of(op)

    def perform(exchange: Exchange, step: str) -> None:
        exchange.put(step, f"0/{exchange.rank}", host)
        if exchange.rank == root:
            host.copy_(fold([exchange.take(step, f"0/{r}", host) for r in range(exchange.size)]))
        _end(exchange, step, 1)

    return Operation("reduce", perform, writes=[tensor])


def send(tensor: Tensor) -> Operation:
    """To the other rank of a communicator of two."""
    host = host_alias(tensor)

    def perform(exchange: Exchange, step: str) -> None:
        exchange.send(host)

    return Operation("send", perform, reads=[tensor])


def receive(tensor: Tensor) -> Operation:
    """From the other rank of a communicator of two."""
    host = host_alias(tensor)

    def perform(exchange: Exchange, step: str) -> None:
        host.copy_(exchange.receive(host))

    return Operation("recv", perform, writes=[tensor])


def _gathered(exchange: Exchange, step: str, name: str, host: Tensor) -> list[Tensor]:
    exchange.put(step, f"{name}/{exchange.rank}", host)
    moments.come(exchange.rank, step, "within")
    own = host.clone()
    return [
        own if r == exchange.rank else exchange.take(step, f"{name}/{r}", host) for r in range(exchange.size)
    ]


def _end(exchange: Exchange, step: str, num_tensors: int) -> None:
    names = [f"{i}/{rank}" for i in range(num_tensors) for rank in range(exchange.size)]
    exchange.end(step, names)


def _end_of_pairs(exchange: Exchange, step: str, num_tensors: int) -> None:
    ranks = range(exchange.size)
    exchange.end(step, [f"{i}/{a}-{b}" for i in range(num_tensors) for a in ranks for b in ranks])
