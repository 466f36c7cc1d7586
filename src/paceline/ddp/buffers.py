"""Broadcasts the module's buffers (batch-norm statistics), so that all ranks have those of one rank.

Rules
1. They are broadcast before the first forward of a step that will be synchronized, and again with the end of its
   backward, so that evaluation finds the same buffers on all ranks and needs no collective: one rank may run it alone.
   The end brings those of the first rank that has trained in this step: rank 0's share may be nothing, and its
   statistics would stand still for ever. A backward without a forward of its own sends none: they are equal still.
2. Once a step, not before each of its forwards: a rank whose forward or loss raised begins another forward while the
   others are in backward. It then meets them there, where status words tell all of them that it is ahead.
3. A forward may change a buffer's shape or dtype, make one, or drop one, and on one rank only. So what is sent has the
   shapes on which the ranks have agreed last. A rank with others sends zeros for them, and its status words say so.
   Then all ranks compare what they have, and raise, or go on with that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from paceline.comm.collectives import broadcast
from paceline.comm.peers import Peers
from paceline.ddp.membership import Membership
from paceline.ddp.replicas import Description, verify
from paceline.observe import spans
from paceline.reductions import Reduction

BROADCAST_BYTES = 250 * 1024 * 1024


class Broadcast:
    """Rank `source`'s values of some tensors, on their way to all ranks: one message for each of `parts`.

    Contract:
        Collective: the same parts in the same order on every rank. Construction does not wait; `finish` does,
        and then writes the tensors in place, without telling autograd.
    """

    def __init__(self, parts: Iterable[list[Tensor]], process_group: ProcessGroup, source: int = 0) -> None:
        self._is_source = process_group.rank() == source
        self._parts = []
        for part in parts:
            with torch.no_grad():
                flat = torch.cat([tensor.reshape(-1) for tensor in part])
            # As bytes, which every backend takes: Gloo has no complex, float8 and most unsigned dtypes.
            self._parts.append((part, flat, broadcast(flat.view(torch.uint8), process_group, source)))

    def finish(self, peers: Peers, doing: str) -> None:
        for part, flat, pending in self._parts:
            peers.wait(pending, doing)
            if self._is_source:
                continue
            values = flat.split([tensor.numel() for tensor in part])
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(part)):
                for tensor, value in zip(part, values, strict=True):
                    tensor.copy_(value.view(tensor.shape))


def parts_of(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Cut tensors into messages, by their indices: one a (dtype, device) and 250 MiB. Empty tensors are in none."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        kind = (tensor.dtype, tensor.device)
        size_bytes = tensor.numel() * tensor.element_size()
        if kind not in by_kind or sizes[kind] + size_bytes > BROADCAST_BYTES:
            by_kind.setdefault(kind, []).append([])
            sizes[kind] = 0
        by_kind[kind][-1].append(index)
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


_Layout = Mapping[str, tuple[torch.Size, torch.dtype, torch.device]]
"""What buffers there are, by name."""

_MISMATCH_REMEDY = (
    "A buffer has changed since the model was wrapped; one rank's are given to all. Keep its shape and dtype the same "
    "on every rank. Or leave it out: name it in _ddp_params_and_buffers_to_ignore, or pass forward_sync_buffers=False. "
    "The gradients of this step were dropped on every rank; parameters are untouched."
)


class Buffers:
    """The buffers of one module, but for those `ignored`. They are looked up each time: modules may replace them."""

    def __init__(self, module: Module, ignored: set[str], membership: Membership) -> None:
        self._homes = [(f"{name}." if name else "", child._buffers) for name, child in module.named_modules()]
        self._ignored = ignored
        self._membership = membership
        self._agreed: _Layout | None = None  # what all ranks had when they compared last (rule 3)
        self._parts: list[list[str]] = []  # their names, cut into messages
        self.hook: BufferHook | None = None  # synchronizes them instead, if the user registered one
        self._holds_indices_back = False

    def named(self) -> dict[str, Tensor]:
        """Return the synchronized buffers by name, each once."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for prefix, home in self._homes:
            for name, buffer in home.items():
                if buffer is not None and id(buffer) not in seen and prefix + name not in self._ignored:
                    seen.add(id(buffer))
                    found[prefix + name] = buffer
        return found

    def set_hook(self, hook: BufferHook) -> None:
        """Let this hook synchronize the buffers from now on. Local."""
        self.hook = hook

    # ---- their shapes, on all ranks

    def exist(self) -> bool:
        """Return whether there are any, as far as the ranks have agreed. Local; the same on every rank."""
        return bool(self.named() if self._agreed is None else self._agreed)

    def hold_indices_back(self) -> None:
        """Send buffers of integers only with the end of a step, behind which a device votes on them. Local."""
        self._holds_indices_back = True

    def take_layout(self) -> None:
        """Store that all ranks have the same buffers as this rank has now. Local."""
        named = self.named()
        names, tensors = sorted(named), [named[name] for name in sorted(named)]
        self._agreed = _layout(named)
        self._parts = [[names[index] for index in part] for part in parts_of(tensors)]

    def agree(self) -> None:
        """Compare the ranks' buffers, and send them in these shapes from now on. Collective; blocks.

        Raises ReplicaMismatchError, the same on every rank, if a buffer's shape, dtype or existence differs.
        """
        members = self._membership
        if members.size > 1:
            named = sorted(self.named().items())
            facts = tuple((f"buffer {name}", f"sizes {list(it.shape)}, {it.dtype}") for name, it in named)
            group, peers, device = members.process_group, members.peers, members.device
            verify(Description(facts), group, peers, device, remedy=_MISMATCH_REMEDY)
        self.take_layout()

    def have_changed(self) -> bool:
        """Return whether this rank's are not those on which the ranks agreed last. Local."""
        return _layout(self.named()) != self._agreed

    # ---- sending

    def launch(self, source: int, before_forward: bool = False) -> Broadcast | None:
        """Start sending rank `source`'s buffers; None: nothing to send. Collective; waits for a copy's `agree` only."""
        if self._agreed is None:
            self.agree()
        members = self._membership
        if not self._parts or members.size == 1:
            return None
        sent, floats = self._sent(), before_forward and self._holds_indices_back
        parts = [[sent[name] for name in part] for part in self._parts]
        parts = [part for part in parts if not (floats and holds_indices(part[0]))]
        return Broadcast(parts, members.process_group, source) if parts else None

    def _sent(self) -> dict[str, Tensor]:
        """Return the buffers on which the ranks agreed last; zeros for those that this rank lacks (rule 3)."""
        named, agreed = self.named(), self._agreed or {}
        layout = _layout(named)
        if layout == agreed:
            return named
        return {
            name: named[name] if layout.get(name) == kind else _zeros(*kind) for name, kind in agreed.items()
        }

    def finish(self, under_way: Broadcast | None) -> None:
        """Wait for the broadcast that `launch` started, and copy the values."""
        if under_way is not None:
            under_way.finish(self._membership.peers, "waiting for the buffers of one rank")

    def synchronize(self, source: int = 0, before_forward: bool = False) -> None:
        """Take over rank `source`'s buffers now. Collective; blocks."""
        self.finish(self.launch(source, before_forward))


def holds_indices(tensor: Tensor) -> bool:
    """Return whether a tensor's values may be used as indices, so that wrong ones can end the process."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _layout(named: Mapping[str, Tensor]) -> _Layout:
    return {name: (buffer.shape, buffer.dtype, buffer.device) for name, buffer in named.items()}


class BufferSync:
    """The synchronization of the buffers in one step."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        # They were broadcast in this step, outside of `join`; the same on every rank
        self._are_in_line = False
        self._are_watched = False  # likewise, or within `join`: their shapes have to stay the same
        self._source = 0  # the first rank with a micro-batch; the same on all ranks
        self._under_way: Broadcast | None = None  # what the end of the step sends
        self._futures: list[torch.futures.Future[Any]] = []  # of the hook; awaited when backward ends

    def broadcast_once(self, source_of: Callable[[], int], is_joined: bool) -> None:
        """Take over a rank's buffers before a forward (rule 2); within `join` before each. Collective; blocks."""
        if self._buffers.exist() and (is_joined or not self._are_in_line):
            began_s = time.perf_counter()
            self._buffers.synchronize(source_of(), before_forward=True)
            spans.note("waiting", began_s, time.perf_counter())
        self._are_in_line, self._are_watched = not is_joined, True

    def run_hook(self) -> None:
        """Let the user's hook synchronize the buffers; the end of backward waits for what it returns."""
        if self._buffers.hook is not None:
            self._futures += self._buffers.hook.run(self._buffers.named())

    def set_source(self, source: int) -> None:
        """Set the rank whose buffers are broadcast at the end of the step. Local; the same on every rank."""
        self._source = source

    @property
    def _at_end(self) -> bool:
        return self._are_in_line and self._buffers.hook is None and self._buffers.exist()

    def have_changed(self) -> bool:
        """Return whether this step synchronizes the buffers, and this rank's have other shapes than agreed. Local."""
        return self._are_watched and self._buffers.have_changed()

    def follow_change(self) -> None:
        """Compare the ranks' buffers, because some rank's shapes have changed. Collective; raises as `agree`."""
        self._buffers.agree()
        if self._at_end:
            self._buffers.synchronize(self._source)

    def launch_at_end(self, reduction: Reduction) -> None:
        """Send the buffers if they come now. Called after the last bucket's launch. Collective; does not wait.

        A reduction that brings no status words may be a hook that is starting collectives: then `finish` sends them.
        """
        if self._at_end and reduction.carries_status:
            self._under_way = self._buffers.launch(self._source)

    def finish(self) -> None:
        """Receive the buffers, launched already or not. Called when all buckets have arrived. Collective; blocks."""
        if self._at_end:
            self._buffers.finish(self._under_way or self._buffers.launch(self._source))
        if self._futures:
            torch.futures.wait_all(self._futures)
