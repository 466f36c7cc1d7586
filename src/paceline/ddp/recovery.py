"""This rank's backward raised: complete its collectives, tell the other ranks, drop this step's gradients.

Rules
1. The autograd engine owns the object of a backward under way and drops it when it raises. A backward whose object is
   gone and that was never ended has raised. At that moment this rank's gradients go, like the other ranks' later on.
2. The others are told at the next forward, window or synchronization of this rank, and wait until then: nothing may
   communicate while an exception is on its way. A forward in evaluation tells them, too. Gradients that a user has set
   meanwhile stay.
3. A failure of communication is for good: no step begins after it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.backward import Backward
from paceline.ddp.open_forwards import OpenForwards
from paceline.ddp.step import Step, Terms
from paceline.ddp.verdict import Status
from paceline.errors import ProtocolError


class Interruptible(Protocol):
    """What recovery knows of the reducer, and does with it."""

    open_forwards: OpenForwards
    process_groups: list[ProcessGroup]
    step: Step

    def arm(self, token: Backward, terms: Terms) -> object:
        """A backward begins."""

    def complete_aborted(self, status: Status) -> tuple[int, ...]:
        """Perform what is left of the last backward's collectives, and say that it raised; as `recover`."""

    def rest(self) -> None:
        """No backward is under way any more."""

    def begin_step(self, ended_well: bool) -> None:
        """The step has ended, well or not: the next one begins."""


class Recovery:
    """Knows which backward is under way on this rank, and makes up for one that raised."""

    def __init__(self, reducer: Interruptible, parameters: Sequence[Parameter]) -> None:
        self._reducer = reducer
        self._groups = reducer.process_groups
        self._parameters = parameters
        self._backward: weakref.ref[Backward] | None = None
        self._synchronizes = False
        # In words: the error itself holds the step's graph, whose hooks lead back here.
        self._failure: str | None = None
        self._trained_by = threading.get_ident()
        _modules.add(self)

    # ---- the backward under way

    def watch(self, backward: Backward) -> None:
        """This backward begins."""
        self._backward = weakref.ref(backward, self._note_raised)
        self._synchronizes = backward.synchronizes

    def _note_raised(self, _: object) -> None:
        if self._synchronizes:
            self.drop_gradients()

    def current(self) -> Backward | None:
        """The backward under way, if any."""
        return None if self._backward is None else self._backward()

    def forget(self) -> None:
        """The backward has been completed."""
        self._backward = None

    def is_first_over_its_groups(self) -> bool:
        """Whether no other module over one of these groups is in a synchronized backward (rule 6 of `reducer`)."""
        return len(_modules) == 1 or not any(map(self._meets, _modules))

    def _meets(self, other: Recovery) -> bool:
        is_active = (backward := other.current()) is not None and backward.synchronizes and other is not self
        return is_active and any(a is b for a in self._groups for b in other._groups)

    @property
    def is_interrupted(self) -> bool:
        """Whether a backward began and, once autograd has returned, was not completed."""
        return self._backward is not None

    # ---- failures

    @property
    def has_failed(self) -> bool:
        """Whether communication has failed for good."""
        return self._failure is not None

    def fail(self, error: Exception) -> None:
        """Communication has failed for good: refuse to begin another step."""
        self._failure = str(error)

    def check(self) -> None:
        """Before a step: complete the last backward, if it raised. ProtocolError if communication has failed for good.

        Local, unless that backward raised: then it completes the collectives for which the others wait, and tells them.
        """
        self._trained_by = threading.get_ident()
        if self._failure is not None:
            raise ProtocolError(
                f"communication of this module failed earlier, and it cannot be trained any more: {self._failure}"
            )
        if self.is_interrupted and not self._is_under_way():
            self.recover()

    def check_evaluation(self) -> None:
        """Before a forward without gradients: as `check`, if the last backward raised; a failed module may evaluate.

        On the thread that trains alone: an exception may be on its way there while another thread evaluates.
        """
        trains_here = threading.get_ident() == self._trained_by
        if self.is_interrupted and self.current() is None and trains_here and not self.has_failed:
            with torch.inference_mode(mode=False), torch.enable_grad():
                self.recover()

    def _is_under_way(self) -> bool:
        backward = self.current()
        if backward is None:
            return False
        # While it waits, nodes of the graph own it; they may outlive an exception, and then no backward runs.
        return not backward.waits_for_outer or torch._C._current_graph_task_id() >= 0

    def check_finished(self) -> None:
        """Raise if a backward began and was not completed."""
        if self.is_interrupted:
            raise ProtocolError(
                "Expected to have finished reduction in the prior iteration before starting a new one: "
                "the last backward raised before all gradients were there."
            )

    # ---- giving up a step

    def recover(self, status: Status = Status.ABORTED) -> tuple[int, ...]:
        """Complete the collectives of a backward that raised, tell the others this status, drop this rank's gradients.

        Returns the ranks that ran out of memory, if nothing else went wrong on any. Collective if that backward
        synchronizes; blocks.
        """
        raised = self._backward is not None and self._backward() is None
        self._backward = None
        out_of_memory: tuple[int, ...] = ()
        if self._synchronizes:
            set_since = [parameter.grad if raised else None for parameter in self._parameters]
            try:
                out_of_memory = self._reducer.complete_aborted(status)
            except Exception as error:
                self.fail(error)
                raise
            self.drop_gradients()
            for parameter, gradient in zip(self._parameters, set_since, strict=True):
                parameter.grad = gradient
            self._reducer.begin_step(ended_well=False)
        self._reducer.rest()
        return out_of_memory

    def abort(self, status: Status = Status.ABORTED) -> tuple[int, ...]:
        """Give up this step, whether its backward has begun or not; otherwise as `recover`. Collective."""
        if not (self.is_interrupted and self._synchronizes):
            self._reducer.rest()
            self._reducer.arm(Backward(True, _never_ended, by_autograd=False), Terms())
        out_of_memory = self.recover(status)
        self._reducer.open_forwards.forget()
        return out_of_memory

    def drop_gradients(self) -> None:
        """Forget all gradients of this rank."""
        for parameter in self._parameters:
            parameter.grad = None
        self._reducer.step.used_before.clear()


def _never_ended(_: Backward) -> None:
    """The end of a backward that is aborted as soon as it has begun."""


_modules: weakref.WeakSet[Recovery] = weakref.WeakSet()
"""Of all wrapped modules: autograd may run through several in one backward."""
