"""State that a reduction keeps from step to step: residuals, velocities of momentum correction, and their owner.

Rules of `Memory`
1. Within a step the state has the layout of the bucket, in one tensor, so that a bucket is handled in a few operations.
2. Between steps it belongs to parameters: buckets may be rebuilt, and a checkpoint contains names only.
3. A step writes new state beside the old (`Slot.proposed`), and `commit` swaps the two at its end. So a step that
   failed or overflowed changes nothing. That costs a second copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.device import keep_for_current_streams
from paceline.compression import Layout, accumulation_dtype
from paceline.errors import ConfigurationError


@dataclass(frozen=True)
class Keeper:
    """The owner of a reduction's state: one rank, with one model and its settings."""

    kind: str  # the reduction, with those settings alone that its state depends on
    kept: str  # what the state is, for messages: "what compression had left out of earlier gradients"
    sizes: Mapping[str, int] = field(default_factory=dict)  # numbers of real elements, by parameter
    rank: int = 0
    num_ranks: int = 1  # how many there are

    def words(self) -> dict[str, Any]:
        """Return the owner's description, as a checkpoint has it."""
        return {"kind": self.kind, "rank": self.rank, "num_ranks": self.num_ranks, "sizes": dict(self.sizes)}

    def has_saved(self, state: Mapping[str, Any], strict: bool) -> bool:
        """Return whether `state` was saved by this rank of as many ranks.

        Raises ConfigurationError if it is another reduction's or model's; or, if `strict`, another rank's.
        """
        advice = f"Nothing was loaded. Training may go on without: {self.kept} is then lost, once."
        if state.get("kind") != self.kind:
            raise ConfigurationError(
                f"this is the state of {state.get('kind', 'another kind of reduction')}, not of {self.kind}. {advice}"
            )
        is_own = (state["rank"], state["num_ranks"]) == (self.rank, self.num_ranks)
        if strict and not is_own:
            raise ConfigurationError(
                f"rank {self.rank} of {self.num_ranks} was given the state of rank {state['rank']} of "
                f"{state['num_ranks']}: each rank keeps what is left of its own gradients. Save on every rank, to a "
                f"file of its own; or pass strict=False, to start with nothing left over. {advice}"
            )
        if state["sizes"] != self.sizes:
            other = {*state["sizes"].items()} ^ {*self.sizes.items()}
            names = sorted({name for name, _ in other})
            raise ConfigurationError(
                f"this is the state of another model: {', '.join(names[:5])} differ in size or are missing. {advice}"
            )
        return is_own


def check_one_model(
    reduction: object, known: Mapping[int, str], named_parameters: Mapping[str, Parameter]
) -> None:
    """Raise ConfigurationError if state by parameter, `known` by id, is prepared for a second model."""
    if known and not known.keys() & {id(parameter) for parameter in named_parameters.values()}:
        raise ConfigurationError(
            f"{reduction!r} already reduces another model's gradients and keeps their residuals. "
            "Make one for each model."
        )


RESIDUAL, VELOCITY = "residual", "velocity"
"""Which state a memory holds: its key in a checkpoint."""


@dataclass
class Slot:
    """The state that a reduction keeps for one bucket."""

    kept: Tensor  # shape (N,): the state before this step; not written within a step
    proposed: Tensor  # shape (N,): the state after this step, if it is committed; undefined before
    is_proposed: bool = False  # whether this step writes it


@dataclass(frozen=True)
class _Home:
    """The place of a parameter's state."""

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
                # The old state may be of another stream, and is dropped before this one has copied it.
                keep_for_current_streams([self._homes[name].kept])
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
        homes = self._homes.copy()  # a thread of a lost member's bucket may add some
        # The state is of the stream that compresses, and may be dropped before the current one has copied it.
        keep_for_current_streams([home.kept for home in homes.values()])
        return {name: home.kept.clone() for name, home in homes.items()}

    def copied(self) -> Memory:
        """Return another memory with copies of all state, and of nothing that a step proposes."""
        copy = Memory()
        copy.load(self.by_name())
        return copy

    def load(self, by_name: Mapping[str, Tensor]) -> None:
        """Replace all state by copies of what `by_name` returned."""
        self._slots = {}
        self._homes = {
            name: _Home(Slot(tensor.clone(), tensor), 0, tensor.numel()) for name, tensor in by_name.items()
        }


Memories = Mapping[str, Memory]
"""By the kind of state: `RESIDUAL` or `VELOCITY`."""
