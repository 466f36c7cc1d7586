"""Numbers kept from step to step for every gradient element, by parameter: what compression left out, velocities.

Rules
1. Within a step they lie as the bucket does, in one tensor, so that a bucket is handled in a few operations.
2. Between steps they belong to parameters: buckets may be cut anew, and a checkpoint knows names only.
3. A step proposes what to keep; `commit` makes it so when the step counts. A step that was aborted or that overflowed
   leaves no trace. That costs a second copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.compression import Layout, accumulation_dtype


@dataclass
class Slot:
    """One bucket's numbers.

    Attributes:
        kept: Shape (N,): what is valid; read only within a step.
        proposed: Shape (N,): what will be valid if the step counts; its contents are undefined before it is written.
        is_proposed: Whether it was written in this step.
    """

    kept: Tensor
    proposed: Tensor
    is_proposed: bool = False


@dataclass(frozen=True)
class _Home:
    """Where a parameter's numbers lie."""

    slot: Slot
    start: int
    stop: int

    @property
    def kept(self) -> Tensor:
        return self.slot.kept[self.start : self.stop]


class Memory:
    """Zero at first, for every parameter."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, ...], Slot] = {}
        self._homes: dict[str, _Home] = {}

    def slot(self, names: tuple[str, ...], layout: Layout) -> Slot:
        """The numbers of a bucket's parameters; to be written to `proposed` in this step."""
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
        """A step begins: forget what the last one proposed in vain."""
        for slot in self._slots.values():
            slot.is_proposed = False

    def withdraw(self, names: Iterable[str]) -> None:
        """Propose for these parameters what is kept: the step counts, but not for them."""
        for name in names:
            if name in self._homes:
                home = self._homes[name]
                home.slot.proposed[home.start : home.stop] = home.kept

    def commit(self) -> None:
        """The step counts."""
        for slot in self._slots.values():
            if slot.is_proposed:
                slot.kept, slot.proposed = slot.proposed, slot.kept

    def multiply(self, factor: float) -> None:
        """Between steps: change the unit."""
        for slot in {id(home.slot): home.slot for home in self._homes.values()}.values():
            slot.kept.mul_(factor)

    def by_name(self) -> dict[str, Tensor]:
        """Copies, shape (n,) each, of what is kept."""
        return {name: home.kept.clone() for name, home in self._homes.items()}

    def load(self, by_name: Mapping[str, Tensor]) -> None:
        """Replace everything by what `by_name` returned; copies it."""
        self._slots = {}
        self._homes = {
            name: _Home(Slot(tensor.clone(), tensor), 0, tensor.numel()) for name, tensor in by_name.items()
        }
