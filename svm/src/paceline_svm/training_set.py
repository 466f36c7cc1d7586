"""The training set of all ranks, of which each rank holds its part: numbering, and checks that fail on all ranks.

Rules
1. Samples are numbered over all ranks: as in the array that every rank passed (`rows="all"`), or rank after rank.
2. What is wrong with one rank's arguments is an error on every rank: no rank waits for one that has raised.
3. A sample whose weight is not positive takes no part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.errors import ConfigurationError
from paceline_svm.sample_forms import (
    DenseSamples,
    GramSamples,
    Samples,
    SparseSamples,
    gather_samples,
    renumbered,
)
from paceline_svm.world import Alone, GroupWorld, World

_T = TypeVar("_T")
ROWS = ("own", "all", "alone")


def world_for(rows: str) -> World:
    """The default process group's ranks, or this process alone where there is none or `rows` says so."""
    return GroupWorld() if rows != "alone" and has_peers() else Alone()


def has_peers() -> bool:
    """Whether the default process group has other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agreed(world: World, check: Callable[[], _T]) -> _T:
    """What `check` returns, once it has succeeded on every rank.

    Raises:
        ConfigurationError: It raised on another rank. Where it raised here, that exception.
    """
    doing = "checking the arguments"
    try:
        result = check()
    except (ValueError, TypeError) as error:
        world.gather_objects(str(error), doing)
        raise
    wrong = {rank: words for rank, words in enumerate(world.gather_objects(None, doing)) if words is not None}
    if wrong:
        rank, words = min(wrong.items())
        raise ConfigurationError(f"rank {rank} cannot fit, so none can: {words}")
    return result


@dataclass(frozen=True)
class TrainingSet:
    """This rank's part, and what everyone knows.

    Attributes:
        world: The ranks.
        samples: This rank's samples, numbered over all ranks.
        targets: Of this rank's samples, shape (N,), float64.
        weights: Of this rank's samples, shape (N,), float64.
        all_ids: Numbers of all ranks' samples, ascending.
        all_targets: In the order of `all_ids`.
        num_rows: Rows that were passed over all ranks, those without weight included.
    """

    world: World
    samples: Samples
    targets: NDArray[np.float64]
    weights: NDArray[np.float64]
    all_ids: NDArray[np.int64]
    all_targets: NDArray[np.float64]
    num_rows: int

    @classmethod
    def gathered(
        cls, world: World, rows: str, X: Any, targets: NDArray[np.float64], weights: NDArray[Any] | None
    ) -> TrainingSet:
        """Number the samples over all ranks.

        Args:
            world: The ranks.
            rows: `own` (each rank passes its own), `all` (each passes all; they are dealt out) or `alone`.
            X: Checked features, dense or CSR; or this rank's rows of a Gram matrix.
            targets: Shape (N,).
            weights: Shape (N,), or None for ones.
        """
        doing = "numbering the samples"
        counts = world.gather(np.array([len(targets)], np.int64), doing).ravel()
        weights = np.ones(len(targets)) if weights is None else np.asarray(weights, np.float64)
        if rows == "all" and world.num_ranks > 1:
            ids = np.arange(world.rank, len(targets), world.num_ranks)
            X, targets, weights = X[ids], targets[ids], weights[ids]
            num_rows = int(counts[0])
        else:
            ids = np.arange(len(targets)) + int(counts[: world.rank].sum())
            num_rows = int(counts.sum())
        used = weights > 0
        if not used.all():
            X, targets, weights, ids = X[used], targets[used], weights[used], ids[used]
        ids = ids.astype(np.int64)
        samples = SparseSamples.of(X, ids) if sp.issparse(X) else DenseSamples.of(X, ids)
        all_ids = np.concatenate(world.gather_uneven(ids, doing))
        all_targets = np.concatenate(world.gather_uneven(targets, doing))
        order = np.argsort(all_ids)
        return cls(world, samples, targets, weights, all_ids[order], all_targets[order], num_rows)

    def part(self, of_all: NDArray[np.bool_], matrix: Samples) -> tuple[NDArray[np.int64], Samples, int]:
        """Some samples as a problem of their own.

        Args:
            of_all: Which of `all_ids`.
            matrix: What the kernel sees of this rank's samples; `samples`, or a form of them.

        Returns:
            Local positions of those that this rank has, those samples numbered from 0 over all ranks, and how many
            there are over all ranks.
        """
        numbers = np.cumsum(of_all) - 1
        place = np.searchsorted(self.all_ids, self.samples.ids)
        mine = np.flatnonzero(of_all[place])
        ids = numbers[place[mine]]
        chosen = matrix.take(mine)
        if isinstance(chosen, GramSamples):
            columns = self.all_ids[of_all]
            return mine, GramSamples(ids, np.ascontiguousarray(chosen.rows[:, columns])), len(columns)
        return mine, renumbered(chosen, ids), int(of_all.sum())

    def subset(self, of_all: NDArray[np.bool_]) -> TrainingSet:
        """Some samples as a training set; they keep their numbers."""
        mine = np.flatnonzero(of_all[np.searchsorted(self.all_ids, self.samples.ids)])
        return dataclasses.replace(
            self,
            samples=self.samples.take(mine),
            targets=self.targets[mine],
            weights=self.weights[mine],
            all_ids=self.all_ids[of_all],
            all_targets=self.all_targets[of_all],
        )

    def everywhere(self, samples: Samples, positions: NDArray[np.int64]) -> Samples:
        """Those of all ranks' samples on every rank, by ascending number.

        Args:
            samples: This rank's.
            positions: Which of them.
        """
        everyone = gather_samples(self.world, samples.take(positions), "exchanging support vectors")
        return everyone.take(np.argsort(everyone.ids))
