"""`GlobalShuffle`: a batch sampler that divides one random order of the data set, a new one an epoch, among ranks.

Rules
1. The order of an epoch depends on (seed, epoch, number of samples) alone: not on the ranks, so a job that goes on with
   another number of them goes on in the same order.
2. Batch after batch takes the next samples of the order; within a batch, rank after rank takes its part.
3. Every sample is trained once an epoch (`last="drop"`: at most once). None is repeated to even things out.
4. Every rank gets equally many batches, none of them empty: ranks take part in every step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sized

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from paceline.data.global_batch import GlobalBatch
from paceline.errors import ConfigurationError

LAST = ("uneven", "drop")


class GlobalShuffle(Sampler[list[int]]):
    """This rank's part of every micro-step, as indices: the `batch_sampler` of a `DataLoader`.

    Every new iteration is the next epoch, with another order, also if the last one was left early; `set_epoch` is
    there for loops that call it.

    Args:
        dataset: The data set, or its number of samples.
        batch: What one step trains on each rank; `GlobalBatch((32, 32))` or a recipe's `batch`.
        rank: Whose part; None is this process's rank, 0 without a process group.
        seed: Of all orders; the same on every rank.
        last: What to do when the samples left do not make a whole micro-step. "uneven": train them, cut by the ranks'
            shares; if that would leave a rank without, they join the batch before, which is then larger by less than
            one sample a rank. Sizes differ then: `model.accumulate([batch], weight=...)` counts every sample alike.
            "drop": leave them out this epoch.

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
        self.batch = batch
        self.rank = _own_rank() if rank is None else rank
        self.seed = seed
        self.last = last
        self._epoch = 0
        self._start = 0  # samples of this epoch that were trained before the iteration that begins here
        self._num_given = 0  # batches of the iteration under way
        self._has_begun = False  # an iteration of this epoch
        self._check()

    def _check(self) -> None:
        if not 0 <= self.rank < self.batch.num_ranks:
            raise ConfigurationError(
                f"rank={self.rank} has no part of a batch of {self.batch}: ranks are 0 to {self.batch.num_ranks - 1}."
            )
        if self.last not in LAST:
            raise ConfigurationError(
                f"last={self.last!r} is no way to end an epoch. Give one of {', '.join(map(repr, LAST))}."
            )
        least = self.batch.micro_size if self.last == "drop" else self.batch.num_ranks
        if self.num_samples < least:
            raise ConfigurationError(
                f"{self.num_samples} samples do not make one batch: {self.batch} needs at least {least} with "
                f"last={self.last!r}. Use smaller batches or fewer ranks."
            )

    # ---- epochs and positions

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`; a position that was loaded within that same epoch is kept."""
        if epoch != self._epoch or self._has_begun:
            self._epoch, self._start = epoch, 0
        self._num_given, self._has_begun = 0, False

    def state_dict(self, num_batches: int | None = None) -> dict[str, int]:
        """Return where training stands: the same on every rank.

        Args:
            num_batches: How many batches of the iteration under way have been trained. None: as many as were handed
                out, which is right with `num_workers=0`; worker processes of a `DataLoader` fetch ahead.
        """
        done = self._num_given if num_batches is None else num_batches
        position = self._start + sum(sum(sizes) for sizes in self._cuts()[:done])
        return {
            "epoch": self._epoch,
            "position": position,
            "seed": self.seed,
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there: the rest of that epoch's order, whatever the number of ranks was and is.

        Raises:
            ConfigurationError: It is the state of another data set; nothing was changed.
        """
        if state["num_samples"] != self.num_samples:
            raise ConfigurationError(
                f"the state is of a data set of {state['num_samples']} samples, this one has {self.num_samples}: the "
                "order of the epoch would be another. Load it with the data set that it was saved with."
            )
        self._epoch, self._start, self.seed = state["epoch"], state["position"], state["seed"]
        self._num_given, self._has_begun = 0, False
        if not self._cuts():
            self._epoch, self._start = self._epoch + 1, 0

    # ---- batches

    def order(self, epoch: int) -> torch.Tensor:
        """All samples in the order of `epoch`, shape (num_samples,); the same on every rank."""
        # Torch's generator on the CPU looks at 32 bits of its seed, so both numbers must reach all of them.
        digest = hashlib.sha256(f"{self.seed},{epoch}".encode()).digest()
        source = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        return torch.randperm(self.num_samples, generator=source)

    def sizes(self, index: int) -> tuple[int, ...]:
        """How many samples each rank has in batch `index` of the iteration under way."""
        return self._cuts()[index]

    def __len__(self) -> int:
        """Batches of the iteration under way; after it, or before the first one, of the next."""
        cuts = self._cuts()
        is_over = self._has_begun and self._num_given == len(cuts)
        return len(self._cuts(start=0)) if is_over else len(cuts)

    def __iter__(self) -> Iterator[list[int]]:
        if self._has_begun:
            self._epoch, self._start = self._epoch + 1, 0
        self._num_given, self._has_begun = 0, True
        order = self.order(self._epoch)
        position = self._start
        for sizes in self._cuts():
            begin = position + sum(sizes[: self.rank])
            position += sum(sizes)
            self._num_given += 1
            yield order[begin : begin + sizes[self.rank]].tolist()

    def _cuts(self, start: int | None = None) -> list[tuple[int, ...]]:
        """The ranks' numbers of samples, batch by batch, from sample `start` of the order on; None: from this one's."""
        left = self.num_samples - (self._start if start is None else start)
        num_full, remainder = divmod(left, self.batch.micro_size)
        cuts = [self.batch.local] * num_full
        if self.last == "drop" or remainder == 0:
            return cuts
        if remainder >= self.batch.num_ranks:
            return [*cuts, self.batch.cut(remainder)]
        extra = self.batch.cut(remainder)
        if cuts:
            cuts[-1] = tuple(size + more for size, more in zip(cuts[-1], extra, strict=True))
        return cuts


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
