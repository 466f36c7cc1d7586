"""The undoing of a step whose parameters have not changed: of its buffers, extra state, random numbers and schedules.

Rules
1. `note` is called before a step's data are fetched, `undo` if the step is given up: the next one then begins as this
   one did. A step that is given up has stepped no parameter; its optimizer had no gradients, and did nothing.
2. A script's `scheduler.step()` behind the window is undone as well, in the schedule and in the optimizer's groups.
3. `note` is part of every step, so it copies only what may have changed. Numpy needs 90 us to give out its state, and
   2 us to show that nothing was drawn.
"""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

_NUMPY_BYTES = 624 * 4 + 4  # of a Mersenne twister in memory: its words, and the place of the next one
_PLAIN = (bool, int, float, str, type(None))


class Randomness:
    """The states of the generators that a script draws from: torch's on the CPU, numpy's, Python's.

    Of `earlier` numpy's is taken over, if nothing was drawn from it since.
    """

    def __init__(self, earlier: Randomness | None = None) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._words = _words_of_numpy()
        # A second normal number, which numpy keeps for later, is in none of these words.
        is_same = earlier is not None and self._words is not None and self._words == earlier._words
        if earlier is not None and is_same and not earlier._numpy["has_gauss"]:
            self._numpy: Any = earlier._numpy
        else:
            self._numpy = np.random.get_state(legacy=False)  # noqa: NPY002  the script's may be the old one

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)

    def as_tree(self) -> dict[str, Any]:
        """Return the random states for another rank."""
        return {"torch": self._torch, "numpy": self._numpy, "python": self._python}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Randomness:
        made = cls.__new__(cls)
        made._torch, made._numpy, made._python = tree["torch"], tree["numpy"], tree["python"]
        made._words = None
        return made


def _words_of_numpy() -> bytes | None:
    """The state of numpy's global generator as it lies in memory; None if it is another than the usual one."""
    generator: Any = np.random.mtrand._rand._bit_generator
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _NUMPY_BYTES)


class Buffers:
    """All buffers of a module, those that are None as well, by (place among its modules, name).

    Modules that are put into it later are not looked for.
    """

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


class Rollback:
    """Remembers how one step began: buffers, optimizers' settings, and the state of what else steps behind a window."""

    def __init__(self, module: Module, optimizers: Sequence[Optimizer], others: Sequence[Any]) -> None:
        self._module, self._buffers = module, Buffers(module)
        self._optimizers, self._others = optimizers, others
        self._kept: dict[tuple[int, str], Tensor] = {}
        self._has_extra_state = bool(extra_state(module))
        self._randomness: Randomness | None = None

    def note(self) -> None:
        """A step begins. Local."""
        now = {place: each for place, each in self._buffers.named().items() if each is not None}
        if [(each.shape, each.dtype) for each in now.values()] != [
            (each.shape, each.dtype) for each in self._kept.values()
        ]:
            self._kept = {place: torch.empty_like(buffer) for place, buffer in now.items()}
        if now:
            torch._foreach_copy_(list(self._kept.values()), [each.detach() for each in now.values()])
        self._extra_state = copied(extra_state(self._module)) if self._has_extra_state else {}
        self._randomness = Randomness(self._randomness)
        self._settings = [[settings_of(group) for group in each.param_groups] for each in self._optimizers]
        self._states = [copied(each.state_dict()) for each in self._others]

    def undo(self) -> None:
        """Restore the state in which the step began. Local."""
        assert self._randomness is not None
        self._randomness.restore()
        self._buffers.put(self._kept)
        put_extra_state(self._module, copied(self._extra_state))
        for each, settings in zip(self._optimizers, self._settings, strict=True):
            for group, kept in zip(each.param_groups, settings, strict=True):
                group.update(copied(kept))
        for each, state in zip(self._others, self._states, strict=True):
            each.load_state_dict(copied(state))


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
