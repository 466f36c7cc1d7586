"""Broadcasts the module's buffers (batch-norm statistics), so that all ranks have those of one rank.

Rules
1. They are broadcast before the first forward of a step that will be synchronized, and again with the end of its
   backward, so that evaluation finds the same buffers on all ranks and needs no collective: one rank may run it alone.
   The end brings those of the first rank that has trained in this step: rank 0's share may be nothing, and its
   statistics would stand still for ever. A backward without a forward of its own sends none: they are equal still.
2. Once a step, not before each of its forwards: a rank whose forward or loss raised begins another forward while the
   others are in backward. It then meets them there, where status words tell all of them that it is ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from paceline.comm.collectives import broadcast
from paceline.comm.peers import Peers
from paceline.ddp.membership import Membership
from paceline.reductions import Reduction

BROADCAST_BYTES = 250 * 1024 * 1024


class Broadcast:
    """Rank `source`'s values of some tensors, on their way to all ranks: one message a (dtype, device) and 250 MiB.

    Contract:
        Collective: the same tensors in the same order on every rank. Construction does not wait; `finish` does,
        and then writes the tensors in place, without telling autograd.
    """

    def __init__(self, tensors: Iterable[Tensor], process_group: ProcessGroup, source: int = 0) -> None:
        self._is_source = process_group.rank() == source
        self._parts = []
        for part in _cut(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in part])
            # As pairs of real numbers: torch 2.8's Gloo takes no complex ones.
            sent = torch.view_as_real(flat) if flat.is_complex() else flat
            self._parts.append((part, flat, broadcast(sent, process_group, source)))

    def finish(self, peers: Peers, doing: str) -> None:
        for part, flat, pending in self._parts:
            peers.wait(pending, doing)
            if self._is_source:
                continue
            values = flat.split([tensor.numel() for tensor in part])
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(part)):
                for tensor, value in zip(part, values, strict=True):
                    tensor.copy_(value.view(tensor.shape))


def _cut(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        kind = (tensor.dtype, tensor.device)
        size_bytes = tensor.numel() * tensor.element_size()
        if kind not in by_kind or sizes[kind] + size_bytes > BROADCAST_BYTES:
            by_kind.setdefault(kind, []).append([])
            sizes[kind] = 0
        by_kind[kind][-1].append(tensor.detach())
        sizes[kind] += size_bytes
    return [part for parts in by_kind.values() for part in parts]


@dataclass(frozen=True)
class BufferHook:
    """A user's way of synchronizing buffers."""

    # Takes a state and the buffers by name; returns futures, or None
    hook: Callable[[Any, dict[str, Tensor]], Any]
    state: Any  # handed to it
    runs_before_forward: bool  # else after it

    def run(self, named: dict[str, Tensor]) -> list[torch.futures.Future[Any]]:
        return list(self.hook(self.state, named) or ())


class Buffers:
    """The buffers of one module, but for those `ignored`. They are looked up each time: modules may replace them."""

    def __init__(self, module: Module, ignored: set[str], membership: Membership) -> None:
        self._homes = [(f"{name}." if name else "", child._buffers) for name, child in module.named_modules()]
        self._ignored = ignored
        self._membership = membership
        self.hook: BufferHook | None = None  # synchronizes them instead, if the user registered one

    def named(self) -> dict[str, Tensor]:
        """The synchronized buffers, each once."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for prefix, home in self._homes:
            for name, buffer in home.items():
                if buffer is not None and id(buffer) not in seen and prefix + name not in self._ignored:
                    seen.add(id(buffer))
                    found[prefix + name] = buffer
        return found

    def take_hook(self, hook: BufferHook) -> None:
        """Let it synchronize them from now on. Local."""
        self.hook = hook

    def launch(self, source: int) -> Broadcast | None:
        """Start sending rank `source`'s buffers; None: there is one rank. Collective; does not wait."""
        members = self._membership
        return Broadcast(self.named().values(), members.process_group, source) if members.size > 1 else None

    def finish(self, under_way: Broadcast | None) -> None:
        """Wait for what `launch` started and take it over."""
        if under_way is not None:
            under_way.finish(self._membership.peers, "waiting for the buffers of one rank")

    def synchronize(self, source: int = 0) -> None:
        """Take over rank `source`'s buffers now. Collective; blocks."""
        self.finish(self.launch(source))


class BufferSync:
    """How the buffers are synchronized in one step."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._are_in_line = (
            False  # they were broadcast in this step, outside of `join`; the same on every rank
        )
        self._source = 0  # the first rank with a micro-batch; the same on all ranks
        self._under_way: Broadcast | None = None  # what the end of the step sends
        self._futures: list[torch.futures.Future[Any]] = []  # of the hook; awaited when backward ends

    def bring_in_line(self, source_of: Callable[[], int], is_joined: bool) -> None:
        """Take over a rank's buffers before a forward (rule 2); within `join` before each. Collective; blocks."""
        if is_joined or not self._are_in_line:
            self._buffers.synchronize(source_of())
        self._are_in_line = not is_joined

    def run_hook(self) -> None:
        """Let the user's hook synchronize the buffers; the end of backward waits for what it returns."""
        if self._buffers.hook is not None:
            self._futures += self._buffers.hook.run(self._buffers.named())

    def come_from(self, source: int) -> None:
        """Let the end of the step bring this rank's. Local; the same on every rank."""
        self._source = source

    @property
    def _come_at_end(self) -> bool:
        return self._are_in_line and self._buffers.hook is None

    def launch_at_end(self, reduction: Reduction) -> None:
        """All buckets have been launched: send the buffers behind them, if they come now. Collective; does not wait.

        A reduction that brings no status words may be a hook that is starting collectives: then `finish` sends them.
        """
        if self._come_at_end and reduction.carries_status:
            self._under_way = self._buffers.launch(self._source)

    def finish(self) -> None:
        """All buckets have arrived: bring the buffers, launched already or not. Collective; blocks."""
        if self._come_at_end:
            self._buffers.finish(self._under_way or self._buffers.launch(self._source))
        if self._futures:
            torch.futures.wait_all(self._futures)
