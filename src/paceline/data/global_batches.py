"""`GlobalBatches`: what every way to hand out global batches has in common, whose shares may change between steps.

Rules
1. At most one loop is under way. Another loop, `set_epoch` or `load_state_dict` ends it: what an ended loop still does,
   such as closing its generator, changes nothing.
2. A state says where training stands. At the end of an epoch it says so, and not that the next one begins. Then
   `set_epoch` may name the same epoch, whose loop has no steps left, or the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from paceline.data.epoch_plan import EpochPlan, StepCut
from paceline.data.global_batch import GlobalBatch
from paceline.errors import ConfigurationError, ProtocolError

LAST = ("uneven", "drop")


class GlobalBatches(ABC):
    """One rank's view of global batches that are cut among ranks: what `batch_sampler=` of the model takes.

    Args:
        batch: What one step trains on each rank.
        rank: Whose part; None is this process's rank, 0 without a process group.
        last: What to do when the samples left do not make a whole micro-step.

    Attributes:
        batch: What the steps train that have not been fetched yet.
        given: The batch as it was given: for other numbers of ranks, too.
        rank: Whose part is handed out.
        logical: Whose parts of `batch` this rank trains, one after another: its own, unless it was moved to others'.
        step: What was handed out last; None outside of a loop over steps.
        known_epoch: The epoch that the script has read or set last; None: neither, since this was set to None.
    """

    def __init__(self, batch: GlobalBatch, rank: int | None, last: str) -> None:
        self.given = batch
        self.batch = batch = batch.among(_num_ranks()) if batch.for_any_ranks else batch
        self.rank = _own_rank() if rank is None else rank
        self.logical: Sequence[int] = (self.rank,)
        self.last = last
        self.step: StepCut | None = None
        self.known_epoch: int | None = None
        self._epoch = 0
        self._start = 0  # samples of this epoch that were trained before the iteration that begins here
        self._has_begun = False  # an iteration of this epoch, so that the next one is of the next epoch
        self._is_over = False  # all steps of this epoch were handed out
        self._was_loaded = False  # where this stands, by `load_state_dict`; no epoch was named since
        self._goes_to: int | None = None  # in a loop: where the next step begins, if not behind the last
        self._loop = object()  # which loop is under way; another one as soon as that has ended
        self._plan: EpochPlan
        self._check(batch)

    def _check(self, batch: GlobalBatch) -> None:
        # With more ranks than logical ones, some ranks compute none.
        if not all(0 <= each < batch.num_ranks for each in self.logical):
            raise ConfigurationError(
                f"rank={self.rank} has no part of a batch of {batch}: ranks are 0 to {batch.num_ranks - 1}."
            )
        if self.last not in LAST:
            raise ConfigurationError(
                f"last={self.last!r} is not a way to end an epoch. Give one of {', '.join(map(repr, LAST))}."
            )

    @property
    def epoch(self) -> int:
        """Return the number of the epoch under way, or of the next one."""
        self.known_epoch = self._epoch + (self._is_over and self._has_begun)
        return self.known_epoch

    @property
    def next_loop(self) -> tuple[int, int]:
        """Return the epoch and position at which the next loop begins."""
        return (self._epoch + 1, 0) if self._has_begun else (self._epoch, self._start)

    @property
    @abstractmethod
    def fetched(self) -> int:
        """Return how much of this epoch's order can no longer be cut in another way, in samples over all ranks."""

    @abstractmethod
    def state_dict(self) -> Mapping[str, Any]:
        """Return the progress of training: at least `epoch`, and `position`, the samples of it that were trained."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`. A position that was loaded within that same epoch is kept.

        If that position is the end of the epoch, the next loop has no steps. A loop under way ends.
        """
        if epoch != self._epoch or (self._has_begun and not self._was_loaded):
            self._stand_at(epoch, 0)
        self._has_begun = self._was_loaded = False
        self.known_epoch = epoch
        self._end_loop()

    @abstractmethod
    def _stand_at(self, epoch: int, position: int) -> None:
        """Let the next iteration begin at this position of this epoch."""

    def _end_loop(self) -> None:
        self._loop, self.step, self._goes_to = object(), None, None

    def _check_goes_on(self, loop: object) -> None:
        if self._loop is not loop:
            raise ProtocolError(
                f"rank {self.rank} asked a loop over steps for more after it had been ended by another loop, set_epoch "
                "or load_state_dict. Leave the loop (break) where you do that, and begin a new one."
            )

    def _check_size(self, state: Mapping[str, Any], batch_may_change: bool) -> None:
        if state["batch"] != self.batch.size and not batch_may_change:
            raise ConfigurationError(
                f"the state is of steps of {state['batch']} samples, this batch is {self.batch}. To keep the size on "
                f"other ranks, give GlobalBatch.of({state['batch']}, {self.batch.num_ranks}); to change it, "
                "load_state_dict(state, batch_may_change=True)."
            )

    # ---- shares that change

    def change(self, batch: GlobalBatch, position: int | None = None) -> None:
        """Train `batch` in the steps from `position` of this epoch's order on, and in the epochs after it.

        The position is where a step ends; the same on every rank, and at least every rank's `fetched`. None: this
        rank's own `fetched`, which is right if all ranks fetch equally far ahead. Local; on every rank with equal
        arguments, before the same step. A `DistributedDataParallel` that was given this object compares the ranks'
        shares in every step.

        Raises:
            ConfigurationError: It has another number of ranks, or is larger than the data set.
            ProtocolError: This rank has fetched samples beyond `position`; nothing was changed.
        """
        if batch.num_ranks != self.batch.num_ranks:
            raise ConfigurationError(
                f"a batch of {batch} cannot follow one of {self.batch} within a run. Start again with another number "
                "of ranks from state_dict()."
            )
        self._check(batch)
        at = self.fetched if position is None else position
        if at < self.fetched:
            raise ProtocolError(
                f"rank {self.rank} was to train other shares from sample {at} of epoch {self._epoch} on, but has "
                f"fetched up to {self.fetched}. Change shares between two steps of one loop over steps(loader)."
            )
        self.batch = batch
        self._plan.change(at, batch)

    @property
    def is_repeated(self) -> bool:
        """Return whether the step under way is handed out once more."""
        return self.step is not None and self._goes_to == self.step.position

    def repeat(self, batch: GlobalBatch) -> None:
        """Hand out the samples of the step under way once more, now and from now on in the shares of `batch`.

        Contract:
            Local; in a loop over `steps`, on every rank, for the same step. What the loader has fetched is dropped.
        """
        if self.step is None:
            raise ProtocolError(
                "there is no step to repeat: iterate over steps(loader), which hands them out."
            )
        self._check(batch)
        self._goes_to = self.step.position
        self.batch = batch
        self._plan.change(self.step.position, batch)

    def move(
        self, batch: GlobalBatch, rank: int, epoch: int, position: int, logical: Sequence[int] | None = None
    ) -> None:
        """Train from there on as another rank, or among another number of ranks. What was fetched is dropped.

        In a loop over `steps` the next step begins at this `position` in the order of `epoch`. A model's
        `membership.rebuild` calls this. `batch` are the shares of the ranks that there are now. `logical` says whose
        parts of it this one trains; None: its own. Local; on every rank of the new ones, with equal arguments but
        `rank`. Raises ConfigurationError if they cannot be trained so; nothing was changed.
        """
        before = self.rank, self.logical
        self.rank, self.logical = rank, (rank,) if logical is None else logical
        try:
            self._check(batch)
            self._move(batch, epoch, position)
        except ConfigurationError:
            self.rank, self.logical = before
            raise

    @abstractmethod
    def _move(self, batch: GlobalBatch, epoch: int, position: int) -> None:
        """Move to a batch and position that were checked."""


def check_state(state: Mapping[str, Any], *names: str) -> None:
    """Refuse a state that no `state_dict()` of Paceline has returned."""
    missing = [name for name in names if name not in state]
    if missing:
        raise ConfigurationError(
            f"a state of {', '.join(map(repr, state)) or 'nothing'} lacks {', '.join(map(repr, missing))}. Give what "
            "state_dict() of the same class has returned."
        )


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
