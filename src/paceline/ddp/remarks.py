"""What a reducer tells its user, each thing once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from paceline.comm.peers import describe


class Remarks:
    """The warnings of one module on one rank."""

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        """Remember who speaks.

        Args:
            rank: This rank.
            names: Of the parameters, by index.
        """
        self._rank = rank
        self._names = names
        self._made: set[str] = set()

    def late_gradients(self) -> None:
        self._warn(
            "late",
            "gradients arrived after their bucket had been reduced (a parameter used twice under reentrant "
            "checkpointing does that). They were reduced again and the result is right, but from now on nothing is "
            "reduced before backward has ended. Pass static_graph=True, if the graph is static, to overlap again.",
        )

    def unused(self, indices: Sequence[int]) -> None:
        self._warn(
            "unused",
            f"this backward did not use {describe(indices, self._names)}. They count as zero on this "
            "rank, so the mean is right; pass find_unused_parameters=True if that is intended.",
        )

    def none_unused(self) -> None:
        self._warn(
            "none unused",
            "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters "
            "in the forward pass. Looking costs a little in every step; leave it out if there never are any.",
        )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._made:
            self._made.add(kind)
            warnings.warn(f"rank {self._rank}: {text}", UserWarning, stacklevel=2)
