"""A rank's report on its share of a step: its place in the data and its time. It travels with the step's weights.

Rules
1. Every rank gets every rank's report in the step's weight exchange, before the step's last backward. So all find the
   same mistakes and decide on the same shares, from the same numbers, in the same step.
2. A report on work is of an earlier step, whose end is known. Waiting for other ranks is no work.
3. Shares change behind what any rank's loader has fetched.
"""

from __future__ import annotations

import copy
import hashlib
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from paceline.comm.device import seed_generators
from paceline.data import Balance, GlobalBatch, GlobalBatches, StepCut, StepWork
from paceline.data.global_batch import cut_among
from paceline.errors import ConfigurationError, ProtocolError
from paceline.observe import StepTiming
from paceline.observe.device_times import DeviceClock

_LEAST_PLANNED_RATIO = 0.75  # of a share in tokens, that a step must have to be measured


@dataclass(frozen=True)
class _Report:
    """One rank's, as numbers that float64 holds exactly, but for the last."""

    trains: float = 0.0  # 1.0; 0.0: it takes no part in the loop any more, and the rest means nothing
    epoch: float = 0.0  # of the step that begins
    position: float = 0.0  # where in the epoch's order it begins
    digest: float = 0.0  # of how it is cut
    fetched: float = 0.0  # how far into the order the loader has gone
    # What this rank trained in the step that `work_s` is of, samples or tokens; 0: not known.
    num_samples: float = 0.0
    work_s: float = 0.0  # how long that took
    pauses: float = 0.0  # 1.0: it was asked to leave the membership behind this step, and so all do


NO_REPORT = astuple(_Report())


@dataclass(frozen=True)
class DataPosition:
    """A rank's place in the data and its share of a step, in whole numbers. New members tell each other theirs."""

    epoch: int = 0  # of the next step
    position: int = 0  # samples of it before that step
    local: int = 0  # samples of this rank in a micro-step; where micro-steps move, of any that has some
    micro_steps: int = 0  # micro-steps of this rank
    micro_size: int = 0  # samples of a micro-step over all ranks
    num_micro_steps: int = 0  # micro-steps of all ranks together
    moves_micro_steps: int = 0  # whether ranks differ in their number, not in their size; 0 or 1
    limit: int = 0  # the samples of a micro-batch that this rank can hold; 0: not known

    def batch_among(self, had: Sequence[DataPosition | None]) -> GlobalBatch:
        """Cut the global batch among these ranks by former shares; None: a new rank. Raises ConfigurationError."""
        if self.moves_micro_steps:
            counts = cut_among([None if it is None else it.micro_steps for it in had], self.num_micro_steps)
            sizes = tuple(self.local if count else 0 for count in counts)
            return GlobalBatch(sizes, tuple(max(1, count) for count in counts))
        sizes = cut_among([None if it is None else it.local for it in had], self.micro_size)
        return GlobalBatch(sizes, self.micro_steps)


class StepShares:
    """Connects one wrapped module with the sampler of its batches, and with the balance of their shares.

    Without a `balance` shares change only if the user changes them. Ranks are those of the group over which gradients
    are reduced. Raises ConfigurationError if the sampler is for other ranks, or its shares cannot be balanced.
    """

    def __init__(
        self, sampler: GlobalBatches, balance: Balance | None, rank: int, num_ranks: int, device: torch.device
    ) -> None:
        if (sampler.rank, sampler.batch.num_ranks) != (rank, num_ranks):
            raise ConfigurationError(
                f"batch_sampler is for rank {sampler.rank} of {sampler.batch.num_ranks}, but this is rank {rank} of "
                f"{num_ranks}. Give its GlobalBatch one number a rank of the process group."
            )
        self.sampler = sampler
        self.balance = balance
        self.begin(rank, num_ranks, device)

    def begin(self, rank: int, num_ranks: int, device: torch.device) -> None:
        """Begin, also as a copy that another rank has made: its sampler hands out this rank's samples then."""
        sampler, batch = self.sampler, self.sampler.batch
        if (sampler.rank, batch.num_ranks) != (rank, num_ranks):
            state = sampler.state_dict()
            batch = batch if batch.num_ranks == num_ranks else GlobalBatch.of(batch.size, num_ranks)
            sampler.move(batch, rank, state["epoch"], state["position"])
        if self.balance is not None:
            self.balance.begin(batch, tells=rank == 0)
        self._rank, self._device = rank, device
        self._reported: StepCut | None = None  # the step that `_words` are of
        self._reported_in = 0  # epoch
        self._reported_after = 0  # steps that have ended well
        self._words = NO_REPORT
        self._is_asked_to_pause: Callable[[], bool] = bool
        self.pauses = False
        """Whether all ranks have agreed to leave the membership behind the step under way."""
        self._clock = _HostClock() if device.type == "cpu" else _DeviceClock(device)

    # ---- copies, before `begin`

    def __getstate__(self) -> dict[str, Any]:
        return {"sampler": self.sampler, "balance": self.balance}

    def __deepcopy__(self, memo: dict[int, Any]) -> StepShares:
        """Return shares of the same sampler, which the loader has; of its copy if that was made before."""
        other = StepShares.__new__(StepShares)
        other.sampler = memo.get(id(self.sampler), self.sampler)
        other.balance = copy.deepcopy(self.balance, memo)
        return other

    # ---- weights

    def own_weights(self) -> list[int]:
        """Return the weights of this rank's micro-batches in the step. Raises ConfigurationError if there is none."""
        if self.sampler.step is None:
            raise ConfigurationError(
                "the model has a batch_sampler, but this step did not come from it. Iterate over "
                "batch_sampler.steps(loader), which says which step is trained."
            )
        return self.sampler.step.weights(*self.sampler.logical)

    def owners(self) -> list[int]:
        """Return the logical rank of each of this rank's micro-batches in the step under way."""
        assert self.sampler.step is not None
        return self.sampler.step.owners(*self.sampler.logical)

    def seed(self, owner: int) -> None:
        """Let what is drawn now, also on the device, depend on the step and the logical rank alone. Local."""
        assert self.sampler.step is not None
        words = (
            f"{self.sampler.state_dict()['seed']},{self.sampler.epoch},{self.sampler.step.position},{owner}"
        )
        seed = int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big")
        seed_generators(seed, self._device)

    # ---- reports

    def report(self, last: StepTiming | None) -> tuple[float, ...]:
        """Return this rank's report on the step that begins after the good step `last`, and start its clock. Local."""
        step = self.sampler.step
        if step is None:
            return NO_REPORT
        if step is self._reported:
            return self._words
        self._reported, self._reported_in = step, self.sampler.epoch
        self._reported_after = 0 if last is None else last.step
        work = self._clock.work(last)
        self._clock.begin(*_work_of(step, self.sampler.logical))
        self._words = astuple(
            _Report(
                1.0,
                float(self.sampler.epoch),
                float(step.position),
                float(zlib.crc32(repr((step.micro_steps, step.tokens)).encode())),
                float(self.sampler.fetched),
                float(work.num_samples),
                work.seconds,
                float(self._is_asked_to_pause()),
            )
        )
        return self._words

    def pause_when(self, is_asked: Callable[[], bool]) -> None:
        """Ask in each step whether this rank wants all to leave the membership behind it. Local."""
        self._is_asked_to_pause = is_asked

    def waited(self, seconds: float) -> None:
        """Store that this rank has waited for other ranks in the step under way."""
        self._clock.waited_s += seconds

    def backward_begins(self) -> None:
        """Note that the step's last backward has reached the module."""
        self._clock.expect_end()

    def take(self, reports: Sequence[Sequence[float]]) -> None:
        """Compare all ranks' words, and decide, the same on every rank. Raises ProtocolError if steps differ."""
        rows = [_Report(*words) for words in reports]
        if not all(row.trains for row in rows):
            return
        self.pauses = self.pauses or any(row.pauses for row in rows)
        first = rows[0]
        for rank, row in enumerate(rows):
            if (row.epoch, row.position, row.digest) != (first.epoch, first.position, first.digest):
                same_place = (row.epoch, row.position) == (first.epoch, first.position)
                raise ProtocolError(
                    f"rank {self._rank}: the ranks do not train the same global batch. Rank {rank} is at sample "
                    f"{row.position:.0f} of epoch {row.epoch:.0f}, rank 0 at {first.position:.0f} of epoch "
                    f"{first.epoch:.0f}{', in other shares' if same_place else ''}. Give all ranks the same seed, "
                    "GlobalBatch and changes of it, and let them leave loops over steps(loader) at the same step."
                )
        if self.balance is not None:
            work = [StepWork(int(row.num_samples), row.work_s) for row in rows]
            batch = self.balance.observe(self.sampler.batch, work)
            if batch is not None:
                self.sampler.change(batch, position=int(max(row.fetched for row in rows)))

    def make_room(self, ranks: Sequence[int]) -> None:
        """Train the step again in other shares, as these ranks ran out of memory. Local. Or ConfigurationError."""
        assert self.balance is not None
        assert self.sampler.step is not None
        self._clock.forget()
        self.sampler.repeat(self.balance.out_of_memory(self.sampler.batch, self.sampler.step, ranks))

    # ---- other members

    def data_position(self, last: StepTiming | None) -> DataPosition:
        """Return where this rank's data stand after the good step `last`; one not trained comes again. Local."""
        sampler, batch, rank = self.sampler, self.sampler.batch, self._rank
        state = sampler.state_dict()
        epoch, position = state["epoch"], state["position"]
        if state.get("is_over") or (sampler.step is None and sampler.epoch != epoch):
            epoch, position = epoch + 1, 0
        reported = self._reported
        if sampler.step is not None and sampler.step is not reported:
            position = sampler.step.position  # handed out, and not begun
        elif reported is not None and (0 if last is None else last.step) == self._reported_after:
            behind = (self._reported_in, reported.end), (self._reported_in + 1, 0)
            if (epoch, position) in behind:  # else the sampler has gone elsewhere since
                epoch, position = self._reported_in, reported.position
        by_micro_steps = isinstance(batch.accumulation, tuple)
        if self.balance is not None:
            by_micro_steps = self.balance.move == "micro-steps"
        counts = batch.micro_steps
        if by_micro_steps:
            counts = tuple(count if size else 0 for size, count in zip(batch.local, counts, strict=True))
        return DataPosition(
            epoch,
            position,
            max(batch.local) if by_micro_steps else sum(batch.local[each] for each in sampler.logical),
            sum(counts[each] for each in sampler.logical),
            batch.micro_size,
            sum(counts),
            int(by_micro_steps),
            (self.balance.limit_of(rank) if self.balance is not None else None) or 0,
        )

    def follow(self, batch: GlobalBatch, rank: int, told: DataPosition, limits: Sequence[int]) -> None:
        """Train these shares as `rank` from where one has `told` to. Local, on all. ConfigurationError: too large."""
        if self.balance is not None:
            batch = self.balance.begin_again(batch, [limit or None for limit in limits], tells=rank == 0)
        self.sampler.move(batch, rank, told.epoch, told.position)
        self._rank, self._reported, self._words, self.pauses = rank, None, NO_REPORT, False
        self._clock.forget()

    @property
    def can_make_room(self) -> bool:
        """Return whether a step that did not fit into memory is repeated in other shares."""
        return self.balance is not None and self.sampler.step is not None


def _work_of(step: StepCut, ranks: Sequence[int]) -> tuple[int, float]:
    """Return the samples that the time of these logical ranks is reported for, and by how much they exceed the trained.

    Where shares are of tokens, it is for the tokens of the rank's share, not for those of its whole sequences. So
    steps can be compared. A step that is far from its share, as the last one of an epoch, is reported as not known.
    """
    if step.planned is None or step.tokens is None:
        return sum(step.samples[rank] for rank in ranks), 1.0
    planned = sum(step.planned[rank] for rank in ranks)
    own = sum(tokens[rank] for tokens in step.tokens for rank in ranks)
    is_typical = _LEAST_PLANNED_RATIO * planned < own
    return (planned, planned / own) if is_typical else (0, 1.0)


class _HostClock:
    """Measures work from the end of a step to the end of the next backward: loading, forward, loss, backward."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._num_samples, self._factor = 0, 1.0
        self._began_s: float | None = None
        self._last_step = -1

    def begin(self, num_samples: int, factor: float) -> None:
        """Begin a step. Its time, times `factor`, will be reported for `num_samples`."""
        self._num_samples, self._factor, self.waited_s = num_samples, factor, 0.0

    def expect_end(self) -> None:
        """Wait for nothing: the reducer records when backward ends."""

    def work(self, last: StepTiming | None) -> StepWork:
        """Return the last step's times, if they were not reported yet and its start is known."""
        if last is None or last.step == self._last_step:
            self.forget()
            return StepWork(0, 0.0)
        ended_s = last.started_s + last.backward_s
        began_s, self._began_s = self._began_s, ended_s + last.exposed_s
        self._last_step = last.step
        if began_s is None:
            return StepWork(0, 0.0)
        return StepWork(self._num_samples, max(ended_s - began_s - self.waited_s, 1e-9) * self._factor)

    def forget(self) -> None:
        """Forget the step under way, which was given up."""
        self._began_s = None


class _DeviceClock:
    """Measures work by events on the device: from a step's first forward to the end of its last backward.

    The host runs ahead of the device, so a step is reported when the device has come past it, one or two steps later.
    """

    def __init__(self, device: torch.device) -> None:
        self.waited_s = 0.0  # the device does not see it
        self._clock = DeviceClock(device)
        self._under_way: tuple[int, float, torch.Event] | None = None
        self._ended: deque[tuple[int, float, torch.Event, torch.Event]] = deque()

    def begin(self, num_samples: int, factor: float) -> None:
        self._under_way = num_samples, factor, self._clock.mark()

    def expect_end(self) -> None:
        # Callbacks run in order: this one before the reducer's, which lets the device wait for communication.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if self._under_way is not None:
            self._ended.append((*self._under_way, self._clock.mark()))
        self._under_way = None

    def work(self, _: StepTiming | None) -> StepWork:
        if not (self._ended and self._clock.is_past(self._ended[0][-1])):
            return StepWork(0, 0.0)
        num_samples, factor, began, ended = self._ended.popleft()
        return StepWork(num_samples, max(self._clock.between_s(began, ended), 1e-9) * factor)

    def forget(self) -> None:
        self._under_way = None
