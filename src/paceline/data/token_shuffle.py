"""`TokenShuffle`: global batches of a number of tokens, of sequences of about equal length, divided among ranks.

Rules
1. The batches of an epoch and their order depend on (seed, epoch, lengths, tokens of a step) alone. Neither the ranks
   nor their shares matter. So a job that goes on with other shares or ranks trains the same batches in the same order.
2. Shares are of tokens. A rank's part is whole sequences, next to each other in the batch, whose tokens come nearest.
3. A step's batch is made once. Its padding depends on how it is cut among the ranks.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from paceline.data.epoch_plan import EpochPlan, StepCut
from paceline.data.global_batch import GlobalBatch, num_takers
from paceline.data.global_batches import GlobalBatches, check_state
from paceline.data.global_shuffle import GlobalShuffle
from paceline.errors import ConfigurationError

_SORTED_BATCHES = 50  # sequences of about so many batches are sorted by length together


class TokenShuffle(GlobalShuffle):
    """This rank's part of every step, as indices, where a step is a number of tokens instead of samples.

    The sequences of an epoch are shuffled, sorted by length within parts of about fifty batches, and filled into
    batches. Then the batches are shuffled. Sequences of a batch are about equally long, so there is little padding.
    Iterate over `steps(loader)`; what else `GlobalShuffle` can do is the same here, changes of shares and restarts
    included.

    Limits: Tokens of a step, with padding, are at most the budget and mostly a little fewer. A rank's part is within
    half a sequence of its share. The budget is a part of the order, so `change` may move shares only.

    Args:
        lengths: Tokens of each sample, at least 1; what its mean loss is the mean of, if you do not say otherwise by
            `model.accumulate(batches, weight=...)`.
        batch: Tokens that each rank trains in a micro-step: `GlobalBatch((4096, 4096, 2048))`.
        rank, seed: As of `GlobalShuffle`.

    Contract:
        As of `GlobalShuffle`.

    Raises:
        ConfigurationError: A sample has more tokens than a step, or none.
    """

    def __init__(
        self, lengths: Sequence[int], batch: GlobalBatch, rank: int | None = None, seed: int = 0
    ) -> None:
        try:
            self.lengths = torch.as_tensor(lengths, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:  # NaN, text, None
            raise ConfigurationError(
                f"lengths= are the tokens of each sample, whole numbers: {error}."
            ) from error
        if not len(self.lengths) or int(self.lengths.min()) < 1:
            raise ConfigurationError(
                "lengths= are the tokens of each sample, at least 1 of each. Leave out samples without tokens."
            )
        self._size = batch.size
        self._digest = int.from_bytes(hashlib.sha256(self.lengths.numpy().tobytes()).digest()[:6], "big")
        self._made: tuple[tuple[int, int], torch.Tensor, list[int]] | None = None
        super().__init__(len(self.lengths), batch, rank, seed)

    def _check(self, batch: GlobalBatch) -> None:
        GlobalBatches._check(self, batch)  # what a shuffle asks for besides is about samples
        if batch.size != self._size:
            raise ConfigurationError(
                f"The token budget cannot change from {self._size} to {batch.size} within an epoch, because it "
                "determines the batches. Change the shares only, or create a new TokenShuffle for the next epoch."
            )
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > batch.size:
            raise ConfigurationError(
                f"sample {longest} has {self.lengths[longest]} tokens, a step {batch.size}. Cut it, or raise the "
                "budget."
            )

    def state_dict(self, num_batches: int | None = None) -> dict[str, int]:
        """Return the state of `GlobalShuffle`, with a digest of the tokens of all samples."""
        return super().state_dict(num_batches) | {"tokens": self._digest}

    def load_state_dict(self, state: Mapping[str, int], batch_may_change: bool = False) -> None:
        """Restore a state, whatever the number of ranks was and is. The budget of tokens may not change.

        Raises ConfigurationError for the state of another data set or budget; nothing was changed.
        """
        check_state(state, "batch", "tokens")
        if state["batch"] != self._size or batch_may_change:
            raise ConfigurationError(
                f"the state is of steps of {state['batch']} tokens, these have {self._size}: the batches would be "
                f"others. Give GlobalBatch.of({state['batch']}, {self.batch.num_ranks}), for example, and leave out "
                "batch_may_change."
            )
        if state["tokens"] != self._digest:
            raise ConfigurationError(
                "the state is of samples with other lengths= than these: the batches would be others. Load it with the "
                "data set that it was saved with."
            )
        super().load_state_dict(state)

    def _is_own(self, state: Mapping[str, int]) -> bool:
        return "tokens" in state

    def order(self, epoch: int) -> torch.Tensor:
        """Return all samples in the order of `epoch`, batch after batch, shape (num_samples,); equal on all ranks."""
        return self._make(epoch)[0]

    def _make_plan(self, start: int, epoch: int) -> EpochPlan:
        order, ends = self._make(epoch)
        return _TokenPlan(self.lengths[order].tolist(), ends, start, self.batch)

    def _make(self, epoch: int) -> tuple[torch.Tensor, list[int]]:
        """Return the order of an epoch, and where in it batches end."""
        if self._made is None or self._made[0] != (self.seed, epoch):
            shuffled = super().order(epoch)
            batches = list(self._batches(self._sort_parts(shuffled)))
            # Any permutation that follows from the epoch's.
            ranking = shuffled[shuffled < len(batches)].tolist()
            order = torch.tensor([sample for place in ranking for sample in batches[place]])
            ends = list(accumulate(len(batches[place]) for place in ranking))
            self._made = (self.seed, epoch), order, ends
        return self._made[1:]

    def _sort_parts(self, shuffled: torch.Tensor) -> Iterator[int]:
        """Sort parts by length, up and down in turn, so that their ends fit together."""
        typical = max(1, round(self._size / self.lengths.double().mean().item()))
        for place, part in enumerate(shuffled.split(_SORTED_BATCHES * typical)):
            by_length = self.lengths[part].argsort(stable=True, descending=place % 2 == 1)
            yield from part[by_length].tolist()

    def _batches(self, samples: Iterator[int]) -> Iterator[list[int]]:
        """Fill batches: the longest length times their number is at most the budget."""
        lengths = self.lengths.tolist()
        batch: list[int] = []
        longest = 0
        for sample in samples:
            longest = max(longest, lengths[sample])
            if longest * (len(batch) + 1) > self._size:
                yield batch
                batch, longest = [], lengths[sample]
            batch.append(sample)
        yield batch

    def _is_rest(self, step: StepCut) -> bool:
        return False

    def __iter__(self) -> Iterator[list[int]]:
        if self._steps_start is None:
            raise ConfigurationError(
                "a loop over the loader gives every rank one batch a step, and a rank may have no whole sequence in "
                "one. Iterate over steps(loader), and over each of its lists within model.accumulate."
            )
        return super().__iter__()


class _TokenPlan(EpochPlan):
    """Cuts batches that are made by the tokens of their samples; batches end at `ends`, in samples."""

    def __init__(self, lengths: Sequence[int], ends: Sequence[int], start: int, batch: GlobalBatch) -> None:
        super().__init__(len(lengths), False, start, batch)
        self._lengths, self._ends = lengths, ends

    def step_at(self, position: int, joins: bool = False) -> StepCut | None:
        """Return the step that begins there; None if the epoch is over. No loop over a loader is possible here."""
        if position >= self.num_samples:
            return None
        batch = self.batch_at(position)
        end = self._ends[bisect.bisect_right(self._ends, position)]
        lengths = self._lengths[position:end]
        wanted = [batch.micro_step(place) for place in range(batch.num_micro_steps)]
        counts = cut_by_tokens(lengths, [tokens for sizes in wanted for tokens in sizes])
        sums = list(accumulate(lengths, initial=0))
        ends = list(accumulate(counts, initial=0))
        tokens = [sums[stop] - sums[start] for start, stop in pairwise(ends)]
        ranks = batch.num_ranks
        rows = range(0, len(counts), ranks)
        return StepCut(
            position,
            tuple(tuple(counts[at : at + ranks]) for at in rows),
            tuple(tuple(tokens[at : at + ranks]) for at in rows),
            batch.samples,
        )


def cut_by_tokens(lengths: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Cut samples, in their order, into parts whose tokens come nearest to the proportions `wanted`.

    Returns the number of samples of each part: none where none is asked for, otherwise at least one, as long as there
    are enough.
    """
    sums = list(accumulate(lengths))
    whole, later = sum(wanted), num_takers(tuple(wanted))
    counts, start, so_far = [], 0, 0
    for part in wanted:
        stop = start
        if part:
            later -= 1
            so_far += part
            goal = sums[-1] * so_far / whole
            stop = bisect.bisect_left(sums, goal)  # the sample in which the goal lies
            if stop < len(sums) and sums[stop] - goal <= goal - (sums[stop - 1] if stop else 0):
                stop += 1
            stop = max(min(stop, len(lengths) - later), min(start + 1, len(lengths)))
        counts.append(stop - start)
        start = stop
    return counts
