"""What a step has changed before its parameters change: buffers, random numbers, schedules. So that it can be undone.

Rules
1. `note` is called before a step's data are fetched, `undo` if the step is given up: the next one then begins as this
   one did. A step that is given up has stepped no parameter; its optimizer had no gradients, and did nothing.
2. A script's `scheduler.step()` behind the window is undone as well, in the schedule and in the optimizer's groups.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer


class Randomness:
    """The states of the generators that a script draws from: torch's on the CPU, numpy's, Python's."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy = np.random.get_state(legacy=False)  # noqa: NPY002  the script's may be the old one
        self._python = random.getstate()

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)

    def as_tree(self) -> dict[str, Any]:
        """For another rank."""
        inner: dict[str, Any] = dict(self._numpy)
        state = {**inner["state"], "key": torch.from_numpy(inner["state"]["key"].astype(np.int64))}
        return {"torch": self._torch, "numpy": {**inner, "state": state}, "python": self._python}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Randomness:
        made = cls.__new__(cls)
        numpy = dict(tree["numpy"])
        key = numpy["state"]["key"].numpy().astype(np.uint32)
        made._torch, made._python = tree["torch"], tree["python"]
        made._numpy = {**numpy, "state": {**numpy["state"], "key": key}}
        return made


class Rollback:
    """Remembers how one step began: buffers, optimizers' settings, and the state of what else steps behind a window."""

    def __init__(
        self,
        buffers: Callable[[], Mapping[str, Tensor]],
        optimizers: Sequence[Optimizer],
        others: Sequence[Any],
    ) -> None:
        self._buffers, self._optimizers, self._others = buffers, optimizers, others
        self._kept: dict[str, Tensor] = {}

    def note(self) -> None:
        """A step begins. Local."""
        now = self._buffers()
        if {name: each.shape for name, each in now.items()} != {
            name: each.shape for name, each in self._kept.items()
        }:
            self._kept = {name: torch.empty_like(buffer) for name, buffer in now.items()}
        for name, buffer in now.items():
            self._kept[name].copy_(buffer)
        self._randomness = Randomness()
        self._settings = [[_settings(group) for group in each.param_groups] for each in self._optimizers]
        self._states = [copy.deepcopy(each.state_dict()) for each in self._others]

    def undo(self) -> None:
        """Be as the step began. Local."""
        self.undo_schedules()
        self._randomness.restore()
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                if name in self._kept:
                    buffer.copy_(self._kept[name])

    def undo_schedules(self) -> None:
        """Take back what was stepped behind the window of a step that was given up. Local."""
        for each, settings in zip(self._optimizers, self._settings, strict=True):
            for group, kept in zip(each.param_groups, settings, strict=True):
                group.update(_copied(kept))
        for each, state in zip(self._others, self._states, strict=True):
            each.load_state_dict(copy.deepcopy(state))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer's group has besides parameters."""
    return _copied({name: value for name, value in group.items() if name != "params"})


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A learning rate may be a tensor, which a schedule writes in place."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in settings.items()}
