"""`GlobalBatch`: how many samples each rank trains in one step, over all micro-steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from paceline.errors import ConfigurationError


@dataclass(frozen=True)
class GlobalBatch:
    """How many samples each rank trains in one step.

    Attributes:
        local: Samples of each rank in one micro-step, by rank; not all the same on unequal machines.
        accumulation: Micro-steps of a step, the same on every rank.

    Raises:
        ConfigurationError: A number is not positive.
    """

    local: tuple[int, ...]
    accumulation: int = 1

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "local", tuple(index(size) for size in self.local))
            object.__setattr__(self, "accumulation", index(self.accumulation))
        except TypeError as error:
            raise ConfigurationError(
                f"local={self.local!r} and accumulation={self.accumulation!r}: samples and micro-steps are whole "
                "numbers. Round them, the same way on every rank."
            ) from error
        if not self.local:
            raise ConfigurationError(
                "local=() names no rank. Give the samples of each rank, such as (32, 32)."
            )
        for rank, size in enumerate(self.local):
            if size <= 0:
                raise ConfigurationError(
                    f"rank {rank} would train {size} samples a micro-step (local={self.local}). Every rank takes part "
                    "in every step: give each at least 1, or leave the rank out of the process group."
                )
        if self.accumulation < 1:
            raise ConfigurationError(
                f"accumulation={self.accumulation} micro-steps make no step. Give 1 for a step a backward."
            )

    @property
    def num_ranks(self) -> int:
        return len(self.local)

    @property
    def micro_size(self) -> int:
        """Samples of one micro-step over all ranks."""
        return sum(self.local)

    @property
    def size(self) -> int:
        """Samples of one step over all ranks."""
        return self.micro_size * self.accumulation

    @property
    def shares(self) -> tuple[float, ...]:
        """Each rank's fraction of the batch."""
        return tuple(size / self.micro_size for size in self.local)

    def cut(self, num_samples: int) -> tuple[int, ...]:
        """Cut `num_samples`, not more than a micro-step's, by the ranks' shares: whole samples that add up.

        Largest remainders first, lower ranks before higher ones; nobody is left without as long as there are as many
        samples as ranks.
        """
        if num_samples == self.micro_size:
            return self.local
        spare = num_samples - self.num_ranks
        if spare < 0:
            return tuple(int(rank < num_samples) for rank in range(self.num_ranks))
        whole = self.micro_size
        floors = [spare * size // whole for size in self.local]
        left = spare - sum(floors)
        by_remainder = sorted(
            range(self.num_ranks), key=lambda rank: (-(spare * self.local[rank] % whole), rank)
        )
        extra = set(by_remainder[:left])
        return tuple(1 + floor + (rank in extra) for rank, floor in enumerate(floors))

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        if len(set(self.local)) == 1:
            words = f"{ranks} x {self.local[0]}"
        elif self.num_ranks <= 8:
            words = f"{ranks} with {' + '.join(map(str, self.local))}"
        else:
            words = f"{ranks} with {min(self.local)} to {max(self.local)}"
        if self.accumulation > 1:
            words += f" x {self.accumulation} micro-steps"
        return f"{words} = {self.size:,} samples"

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, for a checkpoint or JSON."""
        return {"local": list(self.local), "accumulation": self.accumulation}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> GlobalBatch:
        """Make the batch that `as_dict` described."""
        return cls(tuple(state["local"]), int(state["accumulation"]))
