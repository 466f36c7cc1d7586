"""`GlobalBatch`: how many samples each rank trains in one step, over all micro-steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from paceline.errors import ConfigurationError


@dataclass(frozen=True)
class GlobalBatch:
    """The numbers of samples that the ranks train in one step.

    Attributes:
        local: Samples of each rank in one micro-step, by rank; not all the same on unequal machines. A rank with 0
            takes part in every step, with nothing.
        accumulation: Micro-steps of a step: one number for all ranks, or one per rank. So a fast rank can run more
            micro-steps of the same size. A rank that has run all of its own has nothing in the step's further ones.
        for_any_ranks: Whether any number of ranks may train it. A sampler then cuts it among the ranks that there are,
            without larger micro-batches.

    Raises:
        ConfigurationError: A number is negative, or no rank trains anything.
    """

    local: tuple[int, ...]
    accumulation: int | tuple[int, ...] = 1
    for_any_ranks: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "local", tuple(index(size) for size in self.local))
            object.__setattr__(self, "accumulation", _whole(self.accumulation))
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
            if size < 0:
                raise ConfigurationError(
                    f"rank {rank} would train {size} samples a micro-step (local={self.local}). Give it 0 or more."
                )
        if not any(self.local):
            raise ConfigurationError(
                f"local={self.local} trains nothing. Give at least one rank 1 sample or more."
            )
        if isinstance(self.accumulation, tuple):
            if len(self.accumulation) != len(self.local):
                raise ConfigurationError(
                    f"accumulation={self.accumulation} is for {len(self.accumulation)} ranks, local={self.local} for "
                    f"{len(self.local)}. Give one number for all, or one for each."
                )
            if len(set(self.accumulation)) == 1:
                object.__setattr__(self, "accumulation", self.accumulation[0])
        if min(self.micro_steps) < 1:
            raise ConfigurationError(
                f"accumulation={self.accumulation} micro-steps make no step. Give 1 for a step a backward; a rank that "
                "shall train nothing has 0 samples in local."
            )

    @classmethod
    def of(
        cls, size: int, num_ranks: int | None = None, accumulation: int = 1, *, ranks: int | None = None
    ) -> GlobalBatch:
        """Divide a step of `size` samples among ranks, as equally as whole samples allow; lower ranks have one more.

        `num_ranks` is the number of ranks. Instead, `ranks` may give the ranks for which memory is laid out, whatever
        their number is now. Under `paceline.Elastic` these are the logical ranks of `deterministic=True`. Raises
        ConfigurationError for numbers that are not positive, and if `size` is no multiple of the micro-steps.
        """
        if (num_ranks is None) == (ranks is None):
            raise ConfigurationError(
                f"GlobalBatch.of({size}, num_ranks={num_ranks}, ranks={ranks}): give one of them. num_ranks are those "
                "that there are; ranks those for which memory is laid out, whatever number trains."
            )
        if ranks is not None:
            return replace(cls.of(size, ranks, accumulation), for_any_ranks=True)
        assert num_ranks is not None
        if num_ranks < 1 or accumulation < 1 or size < 1 or size % accumulation:
            raise ConfigurationError(
                f"GlobalBatch.of({size}, num_ranks={num_ranks}, accumulation={accumulation}): {size} samples cannot be "
                "divided so. Give positive whole numbers, and a size that is a multiple of accumulation."
            )
        least, more = divmod(size // accumulation, num_ranks)
        return cls(tuple(least + (rank < more) for rank in range(num_ranks)), accumulation)

    def among(self, num_ranks: int) -> GlobalBatch:
        """Cut the samples of a step among another number of ranks, as equally as whole samples allow.

        No rank has more samples in a micro-step than the largest had, so memory suffices: there are more micro-steps.
        With as many ranks as there are it is the same batch.
        """
        if num_ranks == self.num_ranks:
            return self
        largest, size = max(self.local), self.size
        counts = (count for count in range(1, size + 1) if size % count == 0)
        fits = (count for count in counts if -(-(size // count) // num_ranks) <= largest)
        return GlobalBatch.of(size, num_ranks, next(fits))

    @property
    def num_ranks(self) -> int:
        return len(self.local)

    @property
    def micro_steps(self) -> tuple[int, ...]:
        """Return the number of micro-steps of each rank."""
        if isinstance(self.accumulation, tuple):
            return self.accumulation
        return (self.accumulation,) * len(self.local)

    @property
    def num_micro_steps(self) -> int:
        """Return the number of micro-steps in a step: the largest number of any rank."""
        return max(self.micro_steps)

    @property
    def samples(self) -> tuple[int, ...]:
        """Return the number of samples of each rank in one step."""
        return tuple(size * count for size, count in zip(self.local, self.micro_steps, strict=True))

    @property
    def micro_size(self) -> int:
        """Return the samples of the first micro-step over all ranks. Every rank takes part in that one."""
        return sum(self.local)

    @property
    def size(self) -> int:
        """Return the number of samples of one step over all ranks."""
        return sum(self.samples)

    @property
    def shares(self) -> tuple[float, ...]:
        """Return each rank's fraction of the batch."""
        return tuple(count / self.size for count in self.samples)

    def micro_step(self, place: int) -> tuple[int, ...]:
        """Return the number of samples of each rank in micro-step `place` of a step, counted from 0."""
        return tuple(
            size if place < count else 0 for size, count in zip(self.local, self.micro_steps, strict=True)
        )

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        if len(set(self.local)) == 1:
            words = f"{ranks} x {self.local[0]}"
        elif self.num_ranks <= 8:
            words = f"{ranks} with {' + '.join(map(str, self.local))}"
        else:
            words = f"{ranks} with {min(self.local)} to {max(self.local)}"
        if isinstance(self.accumulation, tuple):
            words += f" x {' + '.join(map(str, self.accumulation))} micro-steps"
        elif self.accumulation > 1:
            words += f" x {self.accumulation} micro-steps"
        return f"{words} = {self.size:,} samples"

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, for a checkpoint or JSON."""
        several = self.accumulation
        return {
            "local": list(self.local),
            "accumulation": list(several) if isinstance(several, tuple) else several,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> GlobalBatch:
        """Make the batch that `as_dict` described."""
        several = state["accumulation"]
        return cls(tuple(state["local"]), tuple(several) if isinstance(several, list) else several)


def cut_by(sizes: Sequence[int], num_samples: int) -> tuple[int, ...]:
    """Cut `num_samples` in proportion to `sizes`: whole samples that add up.

    Largest remainders come first, and lower ranks before higher ones. A rank with a size gets a sample as long as
    there are enough for all of them. A rank without a size gets none.
    """
    whole = sum(sizes)
    if num_samples == whole:
        return tuple(sizes)
    takers = [rank for rank, size in enumerate(sizes) if size]
    given = [0] * len(sizes)
    spare = num_samples - len(takers)
    if spare < 0:
        for rank in takers[:num_samples]:
            given[rank] = 1
        return tuple(given)
    for rank in takers:
        given[rank] = 1 + spare * sizes[rank] // whole
    left = num_samples - sum(given)
    by_remainder = sorted(takers, key=lambda rank: (-(spare * sizes[rank] % whole), rank))
    for rank in by_remainder[:left]:
        given[rank] += 1
    return tuple(given)


def cut_among(had: Sequence[int | None], whole: int) -> tuple[int, ...]:
    """Cut `whole` among other ranks by what they `had`; None: new, given the mean. As `cut_by`; ConfigurationError."""
    if whole < len(had):
        raise ConfigurationError(
            f"{whole} samples or micro-steps a step cannot be cut among {len(had)} ranks. Give rebuild(batch=...) a "
            "GlobalBatch that they can have."
        )
    stayed = [size for size in had if size is not None]
    total = sum(stayed)
    if not total:
        return cut_by([1] * len(had), whole)
    return cut_by([total if size is None else size * len(stayed) for size in had], whole)


def _whole(accumulation: Any) -> int | tuple[int, ...]:
    if isinstance(accumulation, Sequence):
        return tuple(index(count) for count in accumulation)
    return index(accumulation)


def num_takers(sizes: Sequence[int]) -> int:
    """Return how many ranks have a share."""
    return sum(size > 0 for size in sizes)
