"""`overlap`: an ordinary torch optimizer whose step is deferred, parameter by parameter, into the next forward.

Rules
1. A step is noted with the settings of the groups at that moment (rate, momentum, decay). It is made for each bucket of
   parameters when its gradients have arrived. For an optimizer that steps each parameter by its own gradient and state,
   that is the same arithmetic on the same numbers: bitwise the same parameters.
2. What is there already is stepped at once; so with nothing under way it is the optimizer that it was.
3. Everything that shows the optimizer's state completes the step first: `state`, `state_dict`, copies, adding groups.
   An optimizer with step hooks is stepped at once.
4. A part of a step may be made on any thread, the one that reads a parameter.
5. An optimizer may have parameters of several models. A call is noted with each that has some of them under way.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as torchs

from paceline.errors import ConfigurationError
from paceline.observe.timings import watches_optimizers
from paceline.optim.lamb import LAMB
from paceline.optim.lars import LARS

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

_PER_ELEMENT_NAMES = "SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD"
# Each steps an element of a parameter by that element's gradient, value and state alone.
PER_ELEMENT = tuple(getattr(torch.optim, name) for name in _PER_ELEMENT_NAMES.split())
# Each steps a parameter by that parameter's gradient, value and state alone, and leaves its groups as they are.
PER_PARAMETER = (
    *PER_ELEMENT,
    *(
        getattr(torch.optim, name)
        for name in ("Adafactor", "Muon")
        if hasattr(torch.optim, name)  # torch 2.8 has no Muon
    ),
    LARS,
    LAMB,
)


class Defers(Protocol):
    """The forward overlap of a wrapped model, as this module uses it."""

    def take_optimizer(self) -> None:
        """An optimizer takes part from now on."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while a step is deferred, or a part of it completed."""

    def under_way(self, parameters: Iterable[Tensor]) -> Sequence[Defers]:
        """Return the models, this one or others, that have a gradient of one of these parameters under way."""

    def is_outstanding(self, parameter: Tensor) -> bool:
        """Return whether this parameter's gradient is, of whichever model."""

    def later(self, action: Callable[[Sequence[Parameter]], None]) -> None:
        """Run `action` with the parameters of each bucket that is under way, when it has arrived."""

    def zero_grad_of(self, parameters: Sequence[Tensor], set_to_none: bool) -> None:
        """Drop these gradients, or those that are under way when they have been used."""

    def flush(self) -> None:
        """Complete everything."""


def overlap(optimizer: AnyOptimizer, model: Any, *, per_parameter: bool = False) -> AnyOptimizer:
    """Let `optimizer.step()` return at once, each parameter being stepped when the next forward needs it.

    Parameters after any number of steps are bitwise those that the optimizer makes without this. The rate and the other
    settings of a step are those of the moment of `step()`, whatever a scheduler does before the gradients arrive.

    Args:
        optimizer: One of torch's, LARS or LAMB, over parameters of `model`, and perhaps others. Those of another model
            with forward overlap are deferred as well; parameters of no such model are stepped at once. It is changed
            in place, so schedulers may have been given it before.
        model: What `DistributedDataParallel(..., overlap_forward=True)` returned.
        per_parameter: For an optimizer of another class. It says that each parameter is stepped by its own gradient
            and state only, and that a step neither changes `param_groups` nor counts its calls.

    Returns:
        `optimizer` itself. Where the overlap is not used (one rank, one host), it is as it was.

    Contract:
        Local; on every rank.

    Raises:
        ConfigurationError: The model does not overlap. Or the optimizer has none of its parameters, is not known to
            step parameters one by one, or its `step` was replaced.
    """
    steps = getattr(model, "forward_overlap", _MISSING)
    _check(optimizer, model, steps, per_parameter)
    if steps is not None:  # else one rank, or one host: there is nothing to hide
        _adopt(optimizer, cast("Defers", steps))
    return optimizer


_MISSING = object()


def _check(optimizer: Any, model: Any, steps: object, per_parameter: bool) -> None:
    """Raise ConfigurationError if the optimizer's steps cannot be deferred; `steps` is the model's forward overlap."""
    if steps is _MISSING or not hasattr(model, "flush"):
        raise ConfigurationError(
            f"overlap(optimizer, model): the model is a {type(model).__name__}. Pass what "
            "paceline.DistributedDataParallel(..., overlap_forward=True) returned."
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"overlap(optimizer, model): the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer. "
            "Pass the optimizer itself, before anything else wraps it."
        )
    if isinstance(optimizer, _Overlapped):
        raise ConfigurationError(
            "overlap(optimizer, model): this optimizer has been through overlap() before. Call it once, and "
            "go on with what it returned."
        )
    if type(optimizer) not in PER_PARAMETER and not per_parameter:
        names = ", ".join(kind.__name__ for kind in PER_PARAMETER)
        raise ConfigurationError(
            f"overlap(optimizer, model): {type(optimizer).__name__} is not known to step each parameter by its own "
            f"gradient and state alone, as {names} do. If it does, pass per_parameter=True; otherwise train without "
            "overlap_forward."
        )
    if steps is None and not getattr(model, "overlaps_forward", False):
        raise ConfigurationError(
            "overlap(optimizer, model): the model was wrapped without overlap_forward. Write "
            "DistributedDataParallel(module, overlap_forward=True), or leave out overlap()."
        )
    own = set(map(id, model.parameters()))
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in own for parameter in stepped):
        raise ConfigurationError(
            f"overlap(optimizer, model): none of the {len(stepped)} parameters that this {type(optimizer).__name__} "
            "steps is the model's, so there is nothing to defer. Make it of model.parameters(), or pass the model "
            "whose parameters it steps."
        )


def _adopt(optimizer: Optimizer, steps: Defers) -> None:
    replaced = optimizer.__dict__.pop("step", None)
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        optimizer.__dict__["step"] = replaced
        raise ConfigurationError(
            f"overlap(optimizer, model): the step of this {type(optimizer).__name__} has been replaced on the object, "
            "so what it does is not known. Call overlap() on the optimizer first, then what replaces its step."
        )
    kind = type(optimizer)
    own = {"__module__": kind.__module__, "_kind": kind, "_stand_in": stand_in_of(kind)}
    optimizer.__class__ = type(kind.__name__, (_Overlapped, kind), own)
    optimizer.__dict__["_steps"], optimizer.__dict__["_met"] = steps, [steps]
    if replaced is not None:
        optimizer.__dict__["step"] = counted_step(optimizer)
    steps.take_optimizer()


def stand_in_of(kind: type[Optimizer]) -> type[Optimizer]:
    """A class whose objects share an optimizer's attributes, except its groups."""
    own = {
        "__module__": kind.__module__,
        "__slots__": ("_stepped_groups",),
        "param_groups": property(operator.attrgetter("_stepped_groups")),
    }
    return type(kind.__name__, (kind,), own)


def counted_step(optimizer: Any) -> Any:
    """A `step` that tells torch's schedulers of itself, as the one that they had put on the object."""

    def step(*arguments: Any, **keywords: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *arguments, **keywords)

    vars(step)["_wrapped_by_lr_sched"] = True
    return step


class _Overlapped(Optimizer):
    """Put in front of an optimizer's class."""

    _kind: type[Optimizer]
    _stand_in: type[Any]  # of that class, with groups of its own
    _steps: Defers
    _met: list[Defers]  # of every model whose step has had parameters of this optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._has_hooks():
            self._flush()
        # Another thread, which reads a parameter, may complete the last bucket meanwhile.
        with self._steps.lock:
            if under_way := self._under_way():
                self._defer(under_way)
            else:
                self._kind.step(self)
        return loss

    def _under_way(self) -> Sequence[Defers]:
        """Return the models with an outstanding step of this optimizer's parameters, which may belong to several."""
        found = self._steps.under_way(self._parameters())
        self._met += [steps for steps in found if steps not in self._met]
        return found

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _flush(self) -> None:
        """Complete whatever this optimizer has deferred."""
        for steps in self._met:
            steps.flush()

    def _defer(self, under_way: Sequence[Defers]) -> None:
        settings = [settings_of(group) for group in self.param_groups]
        members = [list(group["params"]) for group in self.param_groups]
        there = [[p for p in own if not self._steps.is_outstanding(p)] for own in members]
        if any(there):
            self._run(_groups(settings, there))
        owner = {id(p): place for place, own in enumerate(members) for p in own}

        def step_these(parameters: Sequence[Parameter]) -> None:
            own: list[list[Tensor]] = [[] for _ in settings]
            for parameter in parameters:
                if (place := owner.get(id(parameter))) is not None:
                    own[place].append(parameter)
            if any(own):
                self._run(_groups(settings, own))

        for steps in under_way:
            steps.later(step_these)

    def _has_hooks(self) -> bool:
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        of_all = (*torchs._global_optimizer_pre_hooks.values(), *torchs._global_optimizer_post_hooks.values())
        return bool(own) or not all(map(watches_optimizers, of_all))

    def _run(self, groups: list[dict[str, Any]]) -> None:
        """The optimizer's own step, over these groups. On any thread: `param_groups` stays what it is."""
        stand_in = object.__new__(self._stand_in)
        stand_in.__dict__ = self.__dict__  # the same state, and whatever else it has
        stand_in._stepped_groups = groups
        self._kind.step(stand_in)

    def zero_grad(self, set_to_none: bool = True) -> None:
        with self._steps.lock:
            under_way = self._under_way()
            for steps in under_way:
                steps.zero_grad_of(self._parameters(), set_to_none)
        if not under_way:
            super().zero_grad(set_to_none)

    @property
    def state(self) -> Any:
        self._flush()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._flush()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._flush()
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        self._flush()
        return super().__getstate__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is an ordinary optimizer."""
        return ordinary, (self._kind, self.__getstate__())


def ordinary(kind: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    """Return an optimizer of this class with this state."""
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    return optimizer


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings as they are now: a rate that is a tensor may be changed in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else copy.copy(value)
        for name, value in group.items()
        if name != "params"
    }


def _groups(settings: Iterable[dict[str, Any]], members: Iterable[Sequence[Tensor]]) -> list[dict[str, Any]]:
    return [{**group, "params": list(own)} for group, own in zip(settings, members, strict=True) if own]
