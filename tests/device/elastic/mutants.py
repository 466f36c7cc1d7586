"""What may be left out of elastic training on a device, one at a time: a suite that does not notice tests nothing."""

# ruff: noqa: ARG005  what stands in for a method takes its arguments
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.comm import device_vote
from paceline.comm.device import AsyncValue
from paceline.comm.device_steps import DeviceSteps
from paceline.comm.device_vote import DeviceExit, DeviceVote
from paceline.elastic import replay, rollback
from paceline.elastic.elastic import Elastic
from paceline.elastic.rollback import Rollback
from paceline.reductions import kept_state

_replaced: list[tuple[Any, str, object]] = []


def _no_abort() -> None:
    _put(DeviceExit, "abort", lambda self: None)


def _own_count() -> None:
    """The host trusts the number of steps that it has launched."""

    def num_good(self: DeviceVote) -> int:
        return self._num_cast

    _put(DeviceVote, "num_good", num_good)


def _old_count() -> None:
    """The host takes a count that has arrived before."""

    def end(self: DeviceSteps) -> int | None:
        vote, self._vote = self._vote, None
        self.has_kept_up(10**6)
        return None if vote is None else self.num_known

    _put(DeviceSteps, "end", end)


def _no_mask() -> None:
    _put(DeviceSteps, "_mask", lambda self, *_: None)


def _no_vote() -> None:
    """Each rank looks at its own word alone."""

    @torch.no_grad()
    def cast(self: DeviceVote) -> AsyncValue:
        self._num_cast += 1
        self._vote.copy_(self._word, non_blocking=True)
        self._ok.mul_(self._vote)
        self._count.add_(self._ok)
        self.is_good.copy_(self._ok)
        self.found_inf.copy_(1 - self._ok)
        return AsyncValue(self._count)

    _put(DeviceVote, "cast", cast)


def _guessable() -> None:
    _put(device_vote, "_number", lambda words, num_ranks: 1)


def _not_of_the_step() -> None:
    number = device_vote._number
    _put(device_vote, "_number", lambda words, num_ranks: number(words.rpartition("/")[0], num_ranks))


def _never_withdrawn() -> None:
    _put(DeviceExit, "withdraw", lambda self: None)


def _not_sticky() -> None:
    cast = DeviceVote.cast

    def forgetful(self: DeviceVote) -> AsyncValue:
        self._ok.fill_(1)
        return cast(self)

    _put(DeviceVote, "cast", forgetful)


def _one_note() -> None:
    note = Rollback.note
    _put(Rollback, "note", lambda self, position, num_known=None: note(self, position))
    undo = Rollback.undo
    _put(Rollback, "undo", lambda self, step=None: undo(self))


def _buffers_stay() -> None:
    undo = Rollback.undo

    def without(self: Rollback, step: int | None = None) -> Any:
        for note in self._notes:
            note.buffers = {}
        return undo(self, step)

    _put(Rollback, "undo", without)


def _old_group() -> None:
    """Votes go on over the group of the first membership."""
    begin, first = DeviceVote.__init__, []

    def over_the_first(self: DeviceVote, leave: DeviceExit, group: Any, *rest: Any) -> None:
        first.append(group)
        begin(self, leave, first[0], *rest)

    _put(DeviceVote, "__init__", over_the_first)


def _end_without_device() -> None:
    has_kept_up = Elastic._has_kept_up
    _put(Elastic, "_has_kept_up", lambda self, lead=None: True if lead == 0 else has_kept_up(self, lead))


def _made_state_stays() -> None:
    """It stays as memory that no kernel has written: here not a number, as fresh memory is often 0."""
    undo = Rollback.undo

    def without(self: Rollback, step: int | None = None) -> Any:
        before = [dict(each.state) for each in self._optimizers]
        position = undo(self, step)
        for optimizer, kept in zip(self._optimizers, before, strict=True):
            for parameter in kept.keys() - optimizer.state.keys():
                made = kept[parameter].items()
                optimizer.state[parameter] = {name: torch.full_like(each, torch.nan) for name, each in made}
        return position

    _put(Rollback, "undo", without)


def _indices_stay() -> None:
    _put(Rollback, "keep_indices", lambda self, is_good: None)


def _scale_stays() -> None:
    _put(
        rollback,
        "_state_of",
        lambda other: {} if isinstance(other, torch.amp.GradScaler) else other.state_dict(),
    )


def _unbounded() -> None:
    _put(DeviceSteps, "has_kept_up", lambda self, lead=None: True)


def _found_inf_stays() -> None:
    _put(DeviceSteps, "_unmask", lambda self, *_: None)


def _scaler_is_forgotten() -> None:
    """What a scaler has found is not given back to it."""

    def mask(self: DeviceSteps, optimizer: Any, *_: object) -> None:
        if self._vote is not None:
            optimizer.found_inf = self._vote.found_inf

    _put(DeviceSteps, "_mask", mask)


def _replays_bad_steps() -> None:
    _put(replay, "_SAID", ("grad_scale",))


def _residuals_are_freed() -> None:
    _put(kept_state, "keep_for_current_streams", lambda tensors: None)


MUTANTS: dict[str, Callable[[], None]] = {
    "the abort": _no_abort,
    "the count of the device, instead of the host's": _own_count,
    "waiting for the count": _old_count,
    "the mask": _no_mask,
    "the vote": _no_vote,
    "numbers that cannot be guessed": _guessable,
    "numbers of the step": _not_of_the_step,
    "withdrawing the vote": _never_withdrawn,
    "a bad step for good": _not_sticky,
    "a note of each step": _one_note,
    "undoing buffers": _buffers_stay,
    "a vote over the new group": _old_group,
    "waiting for the device at an epoch's end": _end_without_device,
    "dropping state that a masked step has made": _made_state_stays,
    "taking back indices": _indices_stay,
    "undoing the scale": _scale_stays,
    "the bound of the host's lead": _unbounded,
    "taking away found_inf": _found_inf_stays,
    "what a scaler has found": _scaler_is_forgotten,
    "sending the vote to a replacement": _replays_bad_steps,
    "keeping residuals until they are copied": _residuals_are_freed,
}
"""By name, what is left out."""


def leave_out(name: str) -> None:
    """Leave it out of this process, for good. KeyError for an unknown name."""
    MUTANTS[name]()


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    """Leave it out of this process for a while; "" for nothing."""
    if name:
        leave_out(name)
    try:
        yield
    finally:
        while _replaced:
            setattr(*_replaced.pop())


def _put(owner: Any, name: str, value: object) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)
