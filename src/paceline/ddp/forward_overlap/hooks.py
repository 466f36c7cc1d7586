"""Modules that wait for their own parameters: hooks in front of forward, and when each was first needed."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle


class Waiting(Protocol):
    """Who is told that a module is about to use its parameters."""

    is_idle: bool

    def need(self, parameters: Sequence[Parameter], evaluates: bool) -> None:
        """These are about to be used, in evaluation or in training."""


class _Wait:
    """A forward pre-hook. A copy of the module has it, too, where it does nothing."""

    def __init__(self, waiting: Waiting, parameters: Sequence[Parameter]) -> None:
        self._waiting = weakref.ref(waiting)
        self._parameters = tuple(parameters)

    def __call__(self, module: Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the wrapper has settled before, and a clock cannot be compiled
        waiting = self._waiting()
        if waiting is not None and not waiting.is_idle:
            waiting.need(self._parameters, not module.training and not torch.is_grad_enabled())

    def __deepcopy__(self, memo: Any) -> Any:
        return _wait_for_nothing

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> Any:
    return _wait_for_nothing


def _wait_for_nothing(module: Module, inputs: Any) -> None:
    """Do nothing."""


def install(module: Module, waiting: Waiting, managed: Iterable[Parameter]) -> tuple[RemovableHandle, ...]:
    """Make every part of `module` wait before its forward for the managed parameters that are its own. Local.

    A part that has none of its own, but has parts that have, says that it runs, too.
    """
    ids = set(map(id, managed))
    return tuple(
        part.register_forward_pre_hook(_Wait(waiting, [p for p in _own(part) if id(p) in ids]), prepend=True)
        for part in module.modules()
        if not _is_container(part) and any(id(p) in ids for p in part.parameters())
    )


def _own(part: Module) -> list[Parameter]:
    """A module's parameters, and those of parts that are never called (`nn.ParameterList`)."""
    own = list(part.parameters(recurse=False))
    for child in part.children():
        if _is_container(child):
            own += _own(child)
    return own


def _is_container(part: Module) -> bool:
    return type(part).forward is Module.forward


class Needs:
    """When each parameter was first needed in the last forward that said so, without the time spent waiting in it.

    Nobody says so in a forward before which somebody has completed the step, by saving the model, say.

    Attributes:
        waited_s: Of the last forward, so far. Who reads a weight between a step and the forward is not counted.
    """

    def __init__(self) -> None:
        self._first_s: dict[int, float] = {}
        self._began_s: float | None = None
        self.waited_s = 0.0

    def begin(self) -> None:
        """Another forward may come."""
        self._began_s, self.waited_s = None, 0.0

    def note(self, parameters: Iterable[Parameter]) -> None:
        """A module that has these of its own is about to run."""
        now_s = time.perf_counter()
        if self._began_s is None:
            self._first_s.clear()
            self._began_s = now_s
        passed_s = max(0.0, now_s - self._began_s - self.waited_s)  # another thread may have waited meanwhile
        for parameter in parameters:
            self._first_s.setdefault(id(parameter), passed_s)

    def note_wait(self, from_s: float, until_s: float) -> None:
        """Somebody has waited for gradients."""
        if self._began_s is not None:
            self.waited_s += max(0.0, until_s - max(from_s, self._began_s))

    def of(self, parameters: Iterable[Parameter], otherwise_s: float) -> float:
        """Seconds of forward before the first of these was needed."""
        return min((self._first_s.get(id(p), otherwise_s) for p in parameters), default=otherwise_s)
