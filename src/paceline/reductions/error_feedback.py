"""State of error feedback: residuals, or velocities of momentum correction, for every gradient element.

Rules
1. Within a step the state has the layout of the bucket, in one tensor, so that a bucket is handled in a few operations.
2. Between steps it belongs to parameters: buckets may be rebuilt, and a checkpoint contains names only.
3. A step writes new state beside the old (`Slot.proposed`), and `commit` swaps the two at its end. So a step that
   failed or overflowed changes nothing. That costs a second copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.compression import Layout, accumulation_dtype

RESIDUAL, VELOCITY = "residual", "velocity"
"""Which state a memory holds: its key in a checkpoint."""


@dataclass
class Slot:
    """The state of one bucket."""

    kept: Tensor  # shape (N,): the state before this step; not written within a step
    proposed: Tensor  # shape (N,): the state after this step, if it is committed; undefined before
    is_proposed: bool = False  # whether this step writes it


@dataclass(frozen=True)
class _Home:
    """Where the state of a parameter lies."""

    slot: Slot
    start: int
    stop: int

    @property
    def kept(self) -> Tensor:
        return self.slot.kept[self.start : self.stop]


class Memory:
    """A store of one number for every gradient element: zero at first, kept from step to step by parameter."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, ...], Slot] = {}
        self._homes: dict[str, _Home] = {}

    def slot(self, names: tuple[str, ...], layout: Layout) -> Slot:
        """Return the state of a bucket's parameters. The caller must write all of `proposed` in this step."""
        if names not in self._slots:
            self._slots[names] = self._gather(names, layout)
            alive = {id(home.slot) for home in self._homes.values()}
            self._slots = {key: slot for key, slot in self._slots.items() if id(slot) in alive}
        slot = self._slots[names]
        slot.is_proposed = True
        return slot

    def _gather(self, names: tuple[str, ...], layout: Layout) -> Slot:
        kept = torch.zeros(layout.num_elements, dtype=accumulation_dtype(layout.dtype), device=layout.device)
        slot, start = Slot(kept, torch.empty_like(kept)), 0
        for name, size in zip(names, layout.sizes, strict=True):
            if name in self._homes:
                kept[start : start + size].copy_(self._homes[name].kept)
            self._homes[name] = _Home(slot, start, start + size)
            start += size
        return slot

    def begin(self) -> None:
        """Begin a step, dropping what an uncommitted one wrote."""
        for slot in self._slots.values():
            slot.is_proposed = False

    def restore(self, names: Iterable[str]) -> None:
        """Keep the state of these parameters as it was before this step. Before `commit`."""
        for name in names:
            home = self._homes.get(name)
            if home is not None and home.slot.is_proposed:
                home.slot.proposed[home.start : home.stop] = home.kept

    def commit(self) -> None:
        """End a step: make what it wrote the state."""
        for slot in self._slots.values():
            if slot.is_proposed:
                slot.kept, slot.proposed = slot.proposed, slot.kept

    def multiply(self, factor: float) -> None:
        """Multiply all state, between steps: for a new loss scale."""
        for slot in {id(home.slot): home.slot for home in self._homes.values()}.values():
            slot.kept.mul_(factor)

    def by_name(self) -> dict[str, Tensor]:
        """Return copies of the state of every parameter, shape (n,) each."""
        return {name: home.kept.clone() for name, home in self._homes.items()}

    def load(self, by_name: Mapping[str, Tensor]) -> None:
        """Replace all state by copies of what `by_name` returned."""
        self._slots = {}
        self._homes = {
            name: _Home(Slot(tensor.clone(), tensor), 0, tensor.numel()) for name, tensor in by_name.items()
        }
