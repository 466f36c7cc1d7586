"""The undoing of a step whose parameters have not changed: of its buffers, extra state and schedules.

Rules
1. `note` is called before a step's data are fetched, `undo` if the step is given up: the next one then begins as this
   one did. A step that is given up has stepped no parameter; its optimizer had no gradients, and did nothing.
2. A script's `scheduler.step()` behind the window is undone as well, in the schedule and in the optimizer's groups.
3. `note` is part of every step, so it copies only what may have changed. Random numbers need no note, because
   generators are seeded anew at each step (`handover.py`, rule 6).
4. A host that is ahead of its device keeps a note of each step that the device has yet to complete. Copies on the
   device are made in its order, so a note holds good values if all steps before it are good.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

HOST = torch.device("cpu")
_WITHIN_A_STEP = "_per_optimizer_states"  # of a scaler: nothing of it outlives a step
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class TrainingPosition:
    """The position of training. After the last step of an epoch it is that epoch's end, until the next loop begins."""

    step: int  # steps that have been completed
    epoch: int  # of the data, for the next step
    num_samples: int  # samples of it before that step


class Buffers:
    """All buffers of a module, also those that are None, by (place among its modules, name); not of later modules."""

    def __init__(self, module: Module) -> None:
        self._holders = [each._buffers for each in module.modules()]

    def named(self) -> dict[tuple[int, str], Tensor | None]:
        return {(place, name): each for place, it in enumerate(self._holders) for name, each in it.items()}

    @torch.no_grad()
    def put(self, given: Mapping[tuple[int, str], Tensor | None]) -> None:
        """Take these values, and their shapes and dtypes."""
        for (place, name), value in given.items():
            own = self._holders[place].get(name)
            if own is None or value is None:
                self._holders[place][name] = None if value is None else value.clone()
            elif (own.shape, own.dtype) == (value.shape, value.dtype):
                own.copy_(value)
            else:
                own.data = value.clone()


def extra_state(module: Module) -> dict[str, Any]:
    """Return what the module's `state_dict()` has besides parameters and buffers, as by `get_extra_state`."""
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
    return {name: each for name, each in module.state_dict(keep_vars=True).items() if id(each) not in own}


def put_extra_state(module: Module, given: Mapping[str, Any]) -> None:
    """Take what `extra_state` was."""
    if given:
        state = module.state_dict()
        state.update(given)
        module.load_state_dict(state)


@dataclass
class Note:
    """The state in which one step began on this host."""

    position: TrainingPosition
    buffers: dict[tuple[int, str], Tensor]
    extra_state: dict[str, Any]
    settings: list[list[dict[str, Any]]]  # of each optimizer's groups
    states: list[Any]  # of what else steps behind a window
    filled: list[dict[Tensor, int]]  # of each optimizer, how many values it kept for each parameter


class Rollback:
    """Remembers how steps began: buffers, optimizers' settings, and the state of what else steps behind a window.

    `others` are schedules, scalers and averages of the script.
    """

    def __init__(self, module: Module, optimizers: Sequence[Optimizer], others: Sequence[Any]) -> None:
        self._module, self._buffers = module, Buffers(module)
        self._optimizers, self._others = optimizers, others
        self._has_extra_state = bool(extra_state(module))
        self._notes: deque[Note] = deque()
        self._free: list[dict[tuple[int, str], Tensor]] = []  # memory of notes that are not needed any more

    def note(self, position: TrainingPosition, num_known: int | None = None) -> None:
        """Begin a step at `position`. Forget steps before `num_known`, or all of them if that is None. Local."""
        while self._notes and (num_known is None or self._notes[0].position.step < num_known):
            self._free = [self._notes.popleft().buffers]
        self._notes.append(
            Note(
                position,
                self._copied_buffers(),
                copied(extra_state(self._module)) if self._has_extra_state else {},
                [[settings_of(group) for group in each.param_groups] for each in self._optimizers],
                [copied(_state_of(each)) for each in self._others],
                [_filled(each) for each in self._optimizers],
            )
        )

    def _copied_buffers(self) -> dict[tuple[int, str], Tensor]:
        now = {place: each for place, each in self._buffers.named().items() if each is not None}
        kept = self._free.pop() if self._free else {}
        if [(each.shape, each.dtype) for each in now.values()] != [
            (each.shape, each.dtype) for each in kept.values()
        ]:
            kept = {place: torch.empty_like(buffer) for place, buffer in now.items()}
        if now:
            torch._foreach_copy_(list(kept.values()), [each.detach() for each in now.values()])
        return kept

    def undo(self, step: int | None = None) -> TrainingPosition:
        """Restore the state in which a step began, the last one or that after so many; returns its position. Local."""
        while step is not None and self._notes[-1].position.step > step:
            self._notes.pop()
        note = self._notes[-1]
        self._buffers.put(note.buffers)
        put_extra_state(self._module, copied(note.extra_state))
        for each, settings, filled in zip(self._optimizers, note.settings, note.filled, strict=True):
            for group, kept in zip(each.param_groups, settings, strict=True):
                group.update(copied(kept))
            # What a masked step has made is not filled: fused SGD's momentum.
            for parameter, count in _filled(each).items():
                if count != filled.get(parameter, 0):
                    del vars(each)["state"][parameter]
        for each, state in zip(self._others, note.states, strict=True):
            _put_state(each, copied(state))
        return note.position

    @torch.no_grad()
    def keep_indices(self, is_good: Tensor) -> None:
        """Take back what a bad step has left in buffers of integers, on the device. Local; does not wait.

        They may be indices. Old bytes in them may be out of range, which ends the process.
        """
        now = self._buffers.named()
        for place, kept in self._notes[-1].buffers.items():
            buffer = now.get(place)
            if buffer is not None and not (buffer.is_floating_point() or buffer.is_complex()):
                buffer.copy_(torch.where(is_good, buffer, kept))


def _filled(optimizer: Optimizer) -> dict[Tensor, int]:
    # Not by `state`, which a sharded optimizer refuses to show
    return {key: len(kept) for key, kept in vars(optimizer)["state"].items() if isinstance(key, Tensor)}


def _state_of(other: Any) -> Any:
    """Return what is undone of an object with a `state_dict`. A scaler's would make the host wait for the device."""
    if isinstance(other, torch.amp.GradScaler):
        return {name: each for name, each in vars(other).items() if name != _WITHIN_A_STEP}
    return other.state_dict()


def _put_state(other: Any, state: Any) -> None:
    if isinstance(other, torch.amp.GradScaler):
        vars(other).update(state)
        getattr(other, _WITHIN_A_STEP).clear()
    else:
        other.load_state_dict(state)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer's group has besides parameters."""
    return {name: copied(value) for name, value in group.items() if name != "params"}


def copied(value: Any) -> Any:
    """Copy as `copy.deepcopy`, which takes ten times as long for settings. A learning rate may be a tensor."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {name: copied(each) for name, each in value.items()}
    if kind in (list, tuple):
        return kind(map(copied, value))
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
