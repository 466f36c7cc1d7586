"""Gradient accumulation in which each micro-batch counts as much as it should, and nothing can be forgotten.

Rules
1. After a window every rank's `.grad` is sum(w g) / sum(w) over all micro-batches of all ranks. Here g is the gradient
   of a micro-batch's mean loss, and w its weight. Ranks may have different numbers of micro-batches, or none.
2. A micro-batch of weight 0 is not run: the mean over its no tokens would be 0/0.
3. Collectives: at the beginning of a window (weights, buffers) and in its last backward. A rank that raises between
   them launches those of that backward, and so tells the other ranks. Where that does not tell them, it waits for
   them, and shows its error meanwhile. If layers wait for all ranks in forward, the other ranks do not get there.
   So this rank is lost to them, as it is where others make up for a lost rank.
4. While accumulating, `.grad` is in units of the current micro-batch's weight. So autograd adds to it without a
   factor. Gradients are rescaled where the weight changes.
"""

from __future__ import annotations

import itertools
import math
import traceback as traceback_module
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Generic, TypeVar

import torch
from typing_extensions import Self

from paceline.comm.device import empty_cache
from paceline.ddp.coordinator import StepCoordinator
from paceline.ddp.step import BackwardPlan
from paceline.ddp.verdict import Status
from paceline.ddp.weights import REFUSED, StepWeights, WeightExchange, checked_weight
from paceline.errors import (
    ConfigurationError,
    PacelineError,
    PeerLostError,
    PeerOutOfMemoryError,
    ProtocolError,
    forget_frames,
    shown_if_it_waits,
)

Batch = TypeVar("Batch")


def windows(batches: Iterable[Batch], steps: int) -> Iterator[list[Batch]]:
    """Cut batches into lists of `steps`, one list an optimizer step; the last one has what is left.

    Args:
        batches: For example a `DataLoader`. A list is read before it is yielded.
        steps: Micro-batches of one step, at least 1.

    Contract:
        Local.

    Raises:
        ConfigurationError: `steps` is not a positive integer.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(f"steps={steps!r}: a window has at least one micro-batch. Pass 1, 2, 3, ...")
    return _windows(iter(batches), steps)


def _windows(batches: Iterator[Batch], steps: int) -> Iterator[list[Batch]]:
    while window := list(itertools.islice(batches, steps)):
        yield window


class Window(Generic[Batch]):
    """One optimizer step's micro-batches: a context, and within it an iterator. Made by `model.accumulate`."""

    def __init__(
        self, steps: StepCoordinator, batches: Sequence[Batch], weight: Callable[[Batch], float] | None
    ) -> None:
        self._steps = steps
        self._batches = batches
        self._weight_of = weight
        self._counted: list[tuple[Batch, float]] = []
        self._owners: list[int] = []  # the logical rank of each, if there are such
        self._exchange: WeightExchange | None = None
        self._place = -1  # of the micro-batch that the loop is at
        self._num_forwards = 0  # in this micro-step
        self._num_backwards = 0
        self._has_synchronized = False  # the last backward began
        self.repeats = False
        """Whether this step was given up, and its samples come again: `continue`. A rank ran out of memory; or, under
        `paceline.Elastic`, one was lost."""

    @property
    def total_weight(self) -> float:
        """Return the sum of all micro-batches' weights over all ranks. Wait for the other ranks."""
        return self._weights().total

    def _weights(self) -> StepWeights:
        if self._exchange is None:
            raise ProtocolError(
                "this window has not begun: write `with model.accumulate(batches) as micro_batches:`."
            )
        return self._steps.weighing.finish(self._exchange)

    @property
    def has_weights(self) -> bool:
        """Return whether micro-batches may count differently."""
        return self._weight_of is not None or self._steps.setting.shares is not None

    # ---- the context

    def __enter__(self) -> Self:
        steps = self._steps
        was_entered = steps.window is not None or self._exchange is not None
        if was_entered or not steps.will_synchronize:
            raise ConfigurationError(
                "accumulate() within another accumulate() or no_sync(), or a window entered twice: a window decides by "
                "itself which backward synchronizes. Make one window for each optimizer step, and leave out no_sync()."
            )
        problem = self._weigh()
        num_micro_steps = len(self._counted) if problem is None else REFUSED
        weight = math.fsum(weight for _, weight in self._counted)
        try:
            self._exchange = steps.open_window(weight, num_micro_steps)
        except Exception as error:
            if not steps.is_recoverable(error):
                raise
            self.repeats = True  # its loop has no turn
            return self
        if problem is not None:
            raise problem
        if steps.waits_in_forward:
            self._check_equal_counts()
        steps.enter_window(self)
        return self

    def _weigh(self) -> Exception | None:
        """Weigh the micro-batches. Return the error to raise once the other ranks have been told."""
        try:
            self._check_arguments()
            self._check_no_gradients()
            weights = self._own_weights()
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must not wait
            return error
        self._counted = [pair for pair in zip(self._batches, weights, strict=True) if pair[1] > 0]
        if self._steps.logical is not None and (shares := self._steps.setting.shares) is not None:
            owners = shares.owners()
            self._owners = [owner for owner, weight in zip(owners, weights, strict=True) if weight > 0]
        return None

    def _check_arguments(self) -> None:
        if self._weight_of is not None and not callable(self._weight_of):
            raise ConfigurationError(
                f"accumulate(weight={self._weight_of!r}): give a function that returns what a micro-batch counts, "
                "such as weight=lambda batch: len(batch)."
            )
        if not hasattr(self._batches, "__len__") or isinstance(self._batches, str):
            raise ConfigurationError(
                f"accumulate({self._batches!r:.60}): give a list of the micro-batches of one step. "
                "paceline.windows(loader, steps) cuts a loader into such lists."
            )

    def _own_weights(self) -> list[float]:
        shares, num_batches = self._steps.setting.shares, len(self._batches)
        if self._weight_of is not None:
            if shares is not None:
                shares.own_weights()  # there is a step
            weigh = self._weight_of
            return [
                checked_weight(weigh(batch), f"micro-batch {place} of {num_batches}")
                for place, batch in enumerate(self._batches)
            ]
        if shares is None:
            return [1.0] * num_batches
        sizes = shares.own_weights()
        if len(sizes) != num_batches:
            raise ConfigurationError(
                f"this window has {num_batches} micro-batches, but the step that steps(loader) handed out has "
                f"{len(sizes)} on this rank. Give accumulate() that list, or weight=."
            )
        return list(map(float, sizes))

    def _check_no_gradients(self) -> None:
        for name, parameter in self._steps.managed.named().items():
            if self._steps.will_drop_gradient(parameter):
                continue
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                gradient = gradient._values()
            if gradient is not None and gradient.count_nonzero() > 0:
                raise ConfigurationError(
                    f"{name} has a gradient from before this window, whose weight is not known. Call "
                    "optimizer.zero_grad() before each window."
                )

    def _check_equal_counts(self) -> None:
        weights = self._weights()
        weights.raise_if_refused(self._steps.membership.rank)
        counts = weights.micro_steps
        if len(set(counts)) > 1:
            raise ConfigurationError(
                f"the ranks' windows have {', '.join(map(str, counts))} micro-batches, but the module has synchronized "
                "batch normalisation, in which every forward waits for all ranks. Give all ranks equally many "
                'micro-batches of positive weight, leave out an epoch\'s last samples by last="drop", or use BatchNorm.'
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            return self._leave(error)
        except Exception as raised:
            if error is not None or not self._is_recoverable(raised):
                raise  # an error of this rank's own is shown
            return True
        finally:
            self._steps.close_window()

    def _leave(self, error: BaseException | None) -> bool:
        """Return whether the error of the `with` has been dealt with."""
        if error is None:
            try:
                if not self.repeats:
                    self._complete()
                    self._steps.complete_window()
            except PeerOutOfMemoryError as told:
                if not self._makes_room(told, told.ranks):
                    raise
        elif isinstance(error, Exception):
            if self.repeats or self._is_recoverable(error):
                return True
            is_full = is_out_of_memory(error)
            if isinstance(error, RuntimeError) and not (is_full or isinstance(error, PacelineError)):
                lost = self._steps.lost_behind(error)  # it may come from a collective of the script's own
                if lost is not None:
                    if self._is_recoverable(lost):
                        return True
                    raise lost from error
            with shown_if_it_waits(error, self._steps.membership.rank):
                ranks = self._give_up(error, Status.OUT_OF_MEMORY if is_full else Status.ABORTED)
            if isinstance(error, PeerOutOfMemoryError):
                return self._makes_room(error, error.ranks)
            return is_full and self._makes_room(error, ranks)
        return False

    def _is_recoverable(self, error: Exception) -> bool:
        if not self._steps.is_recoverable(error):
            return False
        forget_frames(error)  # they keep what was launched over the old group
        self.repeats = True
        return True

    def _makes_room(self, error: Exception, ranks: Sequence[int]) -> bool:
        """Return whether this step is repeated in other shares; the same on every rank. Raises ConfigurationError."""
        shares = self._steps.setting.shares
        if shares is None or not shares.can_make_room or not ranks:
            return False
        traceback_module.clear_frames(error.__traceback__)  # they keep the activations that did not fit
        empty_cache(self._steps.membership.device)
        shares.make_room(ranks)
        self.repeats = True
        return True

    def _complete(self) -> None:
        if self._has_synchronized:
            return
        if not self._counted:
            self._steps.match_window(self._weights())
            return
        done = self._place + (self._num_backwards > 0)
        error = ProtocolError(
            f"the window was left after {max(done, 0)} of {len(self._counted)} micro-batches. The other ranks are "
            "told and this step's gradients dropped everywhere; parameters are untouched. Iterate over all of them, "
            "without break; give a micro-batch that shall not count the weight 0."
        )
        self._give_up(error, Status.ABORTED)
        raise error

    def _give_up(self, error: Exception, status: Status) -> tuple[int, ...]:
        """Tell the other ranks that this one has raised, if they are in this step; returns as `Reducer.give_up`.

        It waits for them only if the step may be repeated. Otherwise the error goes first: the other ranks may be in a
        collective of the forward, where they wait for this rank.
        """
        steps, reducer = self._steps, self._steps.reducer
        if self._has_synchronized and reducer.step.backward is None:
            return ()
        try:
            others_wait = not (reducer.has_failed or self._weights().refusing_ranks)
        except (
            PeerLostError,
            ProtocolError,
        ):  # as the user has been told, or will be by whatever communicates next
            others_wait = False
        if not others_wait:
            reducer.drop_step()
            return ()
        shares = steps.setting.shares
        may_repeat = status is Status.OUT_OF_MEMORY and shares is not None and shares.can_make_room
        if steps.waits_in_forward or (steps.is_made_up_for and not may_repeat):
            steps.leave(error)
            return ()
        return reducer.give_up(status, waits=may_repeat)

    # ---- the loop

    def __iter__(self) -> Iterator[Batch]:
        if self.repeats:
            return
        if self._steps.window is not self or self._place >= 0:
            raise ProtocolError(
                "iterate over a window once, within its `with`: "
                "`with model.accumulate(batches) as micro_batches: for batch in micro_batches: ...`."
            )
        for place, (batch, weight) in enumerate(self._counted):
            self._turn_to(place, weight)
            self._place, self._num_forwards, self._num_backwards = place, 0, 0
            self._steps.let_synchronize(self._is_last())
            yield batch
            if self._num_backwards == 0:
                raise ProtocolError(
                    f"micro-batch {place + 1} of {len(self._counted)} had no backward. Forward and backward of a "
                    "micro-batch both belong into the loop's body; to leave one out give it the weight 0."
                )

    def _is_last(self) -> bool:
        return self._place == len(self._counted) - 1

    def _turn_to(self, place: int, weight: float) -> None:
        """Switch to micro-batch `place`. Put the gradients of the previous logical rank aside."""
        before = self._counted[max(place - 1, 0)][1]
        logical = self._steps.logical
        if logical is None or (place and self._owners[place - 1] == self._owners[place]):
            self._rescale(before / weight)
            return
        if place:
            factor = self._weights().factor(before, logical.num_averaged)
            logical.put_aside(self._steps.managed.parameters, factor)
        shares = self._steps.setting.shares
        assert shares is not None
        logical.go_to(shares.sampler.logical.index(self._owners[place]))
        shares.seed(self._owners[place])

    @torch.no_grad()
    def _rescale(self, factor: float) -> None:
        """Express the gradients accumulated so far in units of the next micro-batch's weight."""
        if factor == 1.0:
            return
        parameters = self._steps.managed.parameters
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        dense = [gradient for gradient in gradients if not gradient.is_sparse]
        if dense:
            torch._foreach_mul_(dense, factor)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(factor)

    def note_forward(self) -> None:
        """Note a forward in which gradients are enabled."""
        self._num_forwards += 1

    def note_backward(self) -> BackwardPlan:
        """Return the plan of a backward that has reached the module, once weights are known.

        Raises:
            ProtocolError: The window has had all its backwards, or this one's forward was outside of the window.
            PeerAbortedError: Another rank could not begin its window.
        """
        where = f"micro-batch {self._place + 1} of {len(self._counted)}"
        if self._num_backwards or self._num_forwards == 0:
            raise ProtocolError(
                f"{where} had {self._num_forwards} forward(s) of the wrapped model and now has backward "
                f"{self._num_backwards + 1}. Each turn of the loop runs forward and one backward of its own "
                "micro-batch; add up several losses before the backward."
            )
        self._num_backwards += 1
        if not self._is_last():
            return BackwardPlan(synchronizes=False)
        if not self._steps.will_synchronize:
            raise ProtocolError(
                f"{where} ran under no_sync(), but its backward has to synchronize. Leave out no_sync() in a window."
            )
        weights = self._weights()
        weights.raise_if_refused(self._steps.membership.rank)
        self._has_synchronized = True
        own = math.fsum(weight for _, weight in self._counted)
        divisor = self._steps.reducer.step.divisor
        return self._steps.weighing.plan(weights, self._counted[self._place][1], own, divisor)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether it says that a device or the host has no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
