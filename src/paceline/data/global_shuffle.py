"""`GlobalShuffle`: a batch sampler that divides one random order of the data set, a new one an epoch, among ranks.

Rules
1. The order of an epoch depends on (seed, epoch, number of samples) alone, not on the ranks. So a job that goes on with
   another number of them goes on in the same order.
2. Batch after batch takes the next samples of the order; within a batch, rank after rank takes its part.
3. Every sample is trained once an epoch (`last="drop"`: at most once). None is repeated to even things out.
4. Ranks take part in every step. In a loop over the loader every rank has samples in every micro-step; in a loop over
   `steps` it may have none. So such a loop has as many steps on any number of ranks.
5. Shares change between two steps, the same two on every rank: at a position in the order that no rank's loader has
   reached. So nothing that was fetched ahead has to be fetched again, except to repeat a step that was given up.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sized
from typing import TypeVar

import torch
from torch.utils.data import Sampler

from paceline.data.epoch_plan import EpochPlan, StepCut
from paceline.data.global_batch import GlobalBatch
from paceline.data.global_batches import GlobalBatches, check_state
from paceline.errors import ConfigurationError

Batch = TypeVar("Batch")


class GlobalShuffle(GlobalBatches, Sampler[list[int]]):
    """This rank's part of every micro-step, as indices: the `batch_sampler` of a `DataLoader`.

    Every new iteration is the next epoch, with another order, also if the last one was left early. `set_epoch` is
    there for loops that call it. Iterate over the loader, or over `steps(loader)`, which hands out whole steps. Then
    ranks may have any number of micro-batches, shares may change, and a step may be repeated.

    Args:
        dataset: The data set, or its number of samples.
        batch: What one step trains on each rank; `GlobalBatch((32, 32))` or a recipe's `batch`.
        rank: Whose part; None is this process's rank, 0 without a process group.
        seed: Of all orders; the same on every rank.
        last: What to do when the samples left do not make a whole step. "uneven": train them, cut by the ranks' shares.
            A loop over the loader that would leave a rank without samples has them in the batch before, which is then
            larger by less than one sample per rank. Sizes differ then: `model.accumulate([batch], weight=...)` counts
            every sample alike. "drop": leave them out this epoch.

    Contract:
        Local: no communication. Ranks with equal arguments get disjoint parts of the same order.

    Raises:
        ConfigurationError: There are not enough samples for one batch, or an argument is not possible.

    Source:
        Goyal et al. 2017, section 3, remark 4.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch: GlobalBatch,
        rank: int | None = None,
        seed: int = 0,
        last: str = "uneven",
    ) -> None:
        self.num_samples = dataset if isinstance(dataset, int) else len(dataset)
        self.seed = seed
        super().__init__(batch, rank, last)
        self._num_given = 0  # batches of the iteration under way
        # while in `steps`: from where the loader's next iteration fetches
        self._steps_start: int | None = None
        self._plan_from(0)

    def _stand_at(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._is_over = self._was_loaded = False
        self._plan_from(position)

    def _end_loop(self) -> None:
        super()._end_loop()
        self._num_given, self._steps_start = 0, None

    def _plan_from(self, start: int) -> None:
        self._start = self._fetched = start  # steps from `_fetched` on may still be cut anew
        self._plan = self._make_plan(start, self._epoch)

    def _make_plan(self, start: int, epoch: int) -> EpochPlan:
        return EpochPlan(self.num_samples, self.last == "drop", start, self.batch)

    def _check(self, batch: GlobalBatch) -> None:
        super()._check(batch)
        least = batch.size if self.last == "drop" else sum(size > 0 for size in batch.local)
        if self.num_samples < least:
            raise ConfigurationError(
                f"{self.num_samples} samples do not make one batch: {batch} needs at least {least} with "
                f"last={self.last!r}. Use smaller batches or fewer ranks."
            )

    # ---- epochs and positions

    @property
    def fetched(self) -> int:
        """Return the end of the last step from which this rank's loader has asked for a batch."""
        return max(self._fetched, self._start if self.step is None else self.step.end)

    def state_dict(self, num_batches: int | None = None) -> dict[str, int]:
        """Return where training stands: the same on every rank.

        Args:
            num_batches: How many batches of the iteration under way have been trained. None, in a loop over `steps`:
                up to the step handed out last, whatever workers have fetched ahead. None, otherwise: as many as were
                handed out, which is right with `num_workers=0`.
        """
        if num_batches is None and self.step is not None:
            position = self.step.end if self._goes_to is None else self._goes_to
        else:
            done = self._num_given if num_batches is None else num_batches
            position = self._start + sum(sum(sizes) for sizes in self._cuts()[:done])
        return {
            "epoch": self._epoch,
            "position": position,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "batch": self.batch.size,
        }

    def load_state_dict(self, state: Mapping[str, int], batch_may_change: bool = False) -> None:
        """Restore a state, and go on with the rest of that epoch's order, whatever the number of ranks was and is.

        If `batch_may_change`, steps may have another size than when the state was saved. Raises ConfigurationError for
        the state of another data set or size of steps, or for none at all; nothing was changed.
        """
        check_state(state, "num_samples", "epoch", "seed", "position", "batch")
        if not self._is_own(state):
            raise ConfigurationError(
                "the state is of a TokenShuffle, this is a GlobalShuffle: the order of the epoch would be another. "
                "Load it with the class that it was saved with."
            )
        if state["num_samples"] != self.num_samples:
            raise ConfigurationError(
                f"the state is of a data set of {state['num_samples']} samples, this one has {self.num_samples}: the "
                "order of the epoch would be another. Load it with the data set that it was saved with."
            )
        self._check_size(state, batch_may_change)
        self.seed = state["seed"]
        self._go_to(state["epoch"], state["position"])

    def _go_to(self, epoch: int, position: int) -> None:
        """Let the next loop begin at this position of this epoch, and end the loop under way."""
        self._end_loop()
        self._stand_at(epoch, position)
        self._is_over = self._has_begun = self._plan.step_at(self._start) is None
        self._was_loaded = True

    def _is_own(self, state: Mapping[str, int]) -> bool:
        return "tokens" not in state

    def _move(self, batch: GlobalBatch, epoch: int, position: int) -> None:
        self.batch = batch
        if self.step is None:
            self._go_to(epoch, position)
        else:
            self._epoch, self._goes_to = epoch, position
            self._plan_from(position)

    # ---- batches

    def order(self, epoch: int) -> torch.Tensor:
        """Return all samples in the order of `epoch`, shape (num_samples,); the same on every rank."""
        # Torch's generator on the CPU looks at 32 bits of its seed, so both numbers must reach all of them.
        digest = hashlib.sha256(f"{self.seed},{epoch}".encode()).digest()
        source = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        return torch.randperm(self.num_samples, generator=source)

    def sizes(self, index: int) -> tuple[int, ...]:
        """Return how many samples each rank has in batch `index` of the iteration under way."""
        return self._cuts()[index]

    def __len__(self) -> int:
        """Return the number of batches of the iteration under way, or of the next one, with the present shares."""
        cuts = self._cuts()
        is_over = self._has_begun and self._num_given == len(cuts)
        return len(self._cuts(of_next_epoch=True)) if is_over else len(cuts)

    def _cuts(self, of_next_epoch: bool = False) -> list[tuple[int, ...]]:
        plan = self._make_plan(0, self._epoch + 1) if of_next_epoch else self._plan
        steps = plan.steps(0 if of_next_epoch else self._start, joins=self._steps_start is None)
        return [sizes for step in steps if not self._is_rest(step) for sizes in step.micro_steps]

    def _is_rest(self, step: StepCut) -> bool:
        return step.size < sum(size > 0 for size in self.batch.local)

    def _begin_iteration(self) -> object:
        """Begin an iteration. Return the object that `_loop` remains until another iteration begins."""
        self._end_loop()
        self._stand_at(*self.next_loop)
        self._has_begun = True
        return self._loop

    def __iter__(self) -> Iterator[list[int]]:
        is_plain = self._steps_start is None
        if is_plain:
            self._begin_iteration()
        loop = self._loop
        start = self._start if self._steps_start is None else self._steps_start
        order = self.order(self._epoch)
        for step in self._plan.steps(start, joins=is_plain):
            if is_plain:
                if self._is_rest(step):
                    return
                self._check_all_ranks_have_some(step)
            elif not step.parts(*self.logical):
                return  # `steps` begins another iteration once this rank has a share
            for begin, size in step.parts(*self.logical):
                if self._loop is loop:
                    self._fetched = step.end
                    self._num_given += 1
                yield order[begin : begin + size].tolist()

    def _check_all_ranks_have_some(self, step: StepCut) -> None:
        for sizes in step.micro_steps:
            if not all(sizes):
                raise ConfigurationError(
                    f"rank {sizes.index(0)} has no samples in a micro-step of {self.batch}, and a loop over the loader "
                    "gives every rank equally many batches. Iterate over steps(loader), and over each of its lists "
                    "within model.accumulate."
                )

    def steps(self, loader: Iterable[Batch]) -> Generator[list[Batch], None, None]:
        """Yield the steps of the next epoch, or of the rest of a loaded one. Each is a list of this rank's batches.

        A list is empty where this rank has no share. Not to be iterated over in two places at a time.

        Args:
            loader: A `DataLoader` with this sampler; its workers may be persistent, and may fetch ahead.

        Raises:
            ConfigurationError: The loader has another batch sampler.
        """
        given = getattr(loader, "batch_sampler", self)
        if given is not self:
            raise ConfigurationError(
                f"steps(loader): the loader has {type(given).__name__} as its batch sampler. Make it with "
                "DataLoader(dataset, batch_sampler=...) and this very sampler."
            )
        return self._hand_out(loader)

    def _hand_out(self, loader: Iterable[Batch]) -> Generator[list[Batch], None, None]:
        loop = self._begin_iteration()
        position = self._start
        batches: Iterator[Batch] = iter(())
        try:
            while (step := self._plan.step_at(position)) is not None:
                self._steps_start = position
                num_own = len(step.parts(*self.logical))
                mine: list[Batch] = list(itertools.islice(batches, num_own))
                if len(mine) < num_own:  # it ended where this rank had no share
                    drawn = torch.get_rng_state()
                    batches = iter(loader)  # draws the seed of workers
                    if position:  # an undisturbed run draws one only as an epoch begins, and dropout follows
                        torch.set_rng_state(drawn)
                    mine = list(itertools.islice(batches, num_own))
                self.step = step
                yield mine
                self._check_goes_on(loop)
                position = step.end
                if self._goes_to is not None:
                    position, self._goes_to, batches = self._goes_to, None, iter(())
                    self._fetched = position
        finally:
            if self._loop is loop:
                if self.step is not None:
                    position = self.step.end if self._goes_to is None else self._goes_to
                self._start, self._is_over = position, self._plan.step_at(position) is None
                self._end_loop()
