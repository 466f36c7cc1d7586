"""Broadcasts the module's buffers (batch-norm statistics), so that all ranks have those of one rank.

Rules
1. They are broadcast before the first forward of a step that will be synchronized, and again with the end of its
   backward, so that evaluation finds the same buffers on all ranks and needs no collective: one rank may run it alone.
   The end brings those of the first rank that has trained in this step: rank 0's share may be nothing, and its
   statistics would stand still for ever.
2. Once a step, not before each of its forwards: a rank whose forward or loss raised begins another forward while the
   others are in backward. It then meets them there, where status words tell all of them that it is ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
        self._under_way: Broadcast | None = None
        self.hook: BufferHook | None = None  # synchronizes them instead, if the user registered one
        self._are_in_line = False  # they were broadcast since the last synchronized backward (rule 2)
        self._come_at_end = False  # the end of the next synchronized backward brings those of `_source`
        self._source = 0  # the first rank with a micro-batch in the step under way; the same on all ranks
        self._futures: list[torch.futures.Future[Any]] = []  # of the hook; awaited when backward ends

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

    def launch(self, source: int = 0) -> None:
        """Start sending rank `source`'s buffers. Collective; does not wait."""
        if self._membership.size > 1:
            self._under_way = Broadcast(self.named().values(), self._membership.process_group, source)

    def finish(self) -> None:
        """Wait for what `launch` started and take it over."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.finish(self._membership.peers, "waiting for the buffers of one rank")

    # ---- the end of a backward

    def note_backward(self) -> None:
        """A synchronized backward has ended: before the next forward they are brought in line again. Local."""
        self._are_in_line = False

    def launch_at_end(self, reduction: Reduction) -> None:
        """All buckets have been launched: send the buffers behind them, if they come now. Collective; does not wait.

        A reduction that brings no status words may be a hook that is starting collectives: then `end_step` sends them.
        """
        if self._come_at_end and reduction.carries_status:
            self.launch(self._source)

    def end_step(self) -> None:
        """All buckets have arrived: bring the buffers, launched already or not. Collective; blocks."""
        if self._come_at_end or self._futures:
            self._bring()

    def _bring(self) -> None:
        if self._come_at_end and self._under_way is None:
            self.launch(self._source)
        self.finish()
        torch.futures.wait_all(self._futures)
        self._futures = []

    def come_at_end(self, wanted: bool) -> None:
        """Whether the end of the next synchronized backward brings them. Local; the same on every rank."""
        self._come_at_end = wanted

    def come_from(self, source: int) -> None:
        """Whose they are then: the first rank's that has trained in this step. Local; the same on every rank."""
        self._source = source

    @contextmanager
    def staying(self) -> Iterator[None]:
        """What ends within brings none: the backward of a forward that is still open will."""
        come_at_end, self._come_at_end = self._come_at_end, False
        yield
        self._come_at_end = come_at_end

    def forget_step(self) -> None:
        """The step under way is given up, with what was sent of it. Local; the same on every rank."""
        self._under_way, self._futures = None, []
        self._are_in_line = self._come_at_end = False
        self._source = 0

    # ---- before a forward

    def take_hook(self, hook: BufferHook) -> None:
        """Let it synchronize them from now on. Local."""
        self.hook = hook

    def bring_in_line(self, source_of: Callable[[], int], again: bool) -> None:
        """Take over a rank's buffers (rule 2); `again`: also if all had the same before. Collective; blocks."""
        if again or not self._are_in_line:
            self.synchronize(source_of())
            self._are_in_line = True

    def run_hook(self) -> None:
        """Let the user's hook synchronize the buffers; the end of backward waits for what it returns."""
        if self.hook is not None:
            self._futures += self.hook.run(self.named())

    def synchronize(self, source: int = 0) -> None:
        """Take over rank `source`'s buffers now. Collective; blocks."""
        self.launch(source)
        self.finish()
