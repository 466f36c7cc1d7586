"""Marks a reduction's checkpoint with its owner: residuals belong to one rank of a number of ranks, and one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Parameter

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
        """Return what a checkpoint says of its owner."""
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
