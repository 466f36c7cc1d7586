"""The base of what `overlap` and `shard` make of an optimizer: they give the object another class, in place.

Rules
1. The object stays: schedulers and scripts that hold it go on changing its groups. A copy is an ordinary optimizer.
2. Everything that shows its state completes first what its steps have left to be done.
3. A part of a step runs the plain optimizer's code on a stand-in: the object's attributes, with groups of its own.
"""

from __future__ import annotations

import copy
import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import ConfigurationError

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
)


def why_not_by_parameter(kind: type[Optimizer]) -> str | None:
    """Return in words that a class may not step parameters one by one; None if it is known to.

    Classes outside of torch say so of themselves: by the attribute `steps_each_parameter = True`, which their
    subclasses do not inherit.
    """
    if kind in PER_PARAMETER or vars(kind).get("steps_each_parameter", False):
        return None
    names = ", ".join(each.__name__ for each in PER_PARAMETER)
    return f"{kind.__name__} is not known to step each parameter by its own gradient and state alone, as {names} do"


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's settings: a rate that is a tensor may be changed in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else copy.copy(value)
        for name, value in group.items()
        if name != "params"
    }


def ordinary(kind: type[Optimizer], state: dict[str, Any]) -> Optimizer:
    """Return an optimizer of this class with this state."""
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    return optimizer


class AdoptedOptimizer(Optimizer):
    """Put in front of an optimizer's class by `adopt`."""

    _kind: type[Optimizer]
    _stand_in: type[Any]  # of that class, with groups of its own

    @abstractmethod
    def _flush(self) -> None:
        """Complete what steps have left to be done."""

    def _check_state(self) -> None:
        """Raise ConfigurationError if the state is not to be seen."""

    def _run_groups(self, groups: Sequence[dict[str, Any]], step: Callable[[Any], Any]) -> None:
        """Step these groups, on any thread. `param_groups` is not changed."""
        stand_in = object.__new__(self._stand_in)
        stand_in.__dict__ = self.__dict__  # the same state, and whatever else it has
        stand_in._stepped_groups = groups
        step(stand_in)

    @property
    def state(self) -> Any:
        self._flush()
        self._check_state()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        self._check_state()
        return super().state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._flush()
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        self._flush()
        self._check_state()
        return super().__getstate__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let a copy be an ordinary optimizer."""
        return ordinary, (self._kind, self.__getstate__())


def refuse(by: str, why: str) -> NoReturn:
    """Raise a ConfigurationError of the function of this name."""
    raise ConfigurationError(f"{by}(optimizer, model): {why}")


def adopt(optimizer: Optimizer, by: type[AdoptedOptimizer], function: str, **attributes: Any) -> None:
    """Put a class in front of the optimizer's, and give the object these attributes. Local.

    Raises:
        ConfigurationError: Something has replaced the object's `step`; nothing was changed.
    """
    replaced = optimizer.__dict__.get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        refuse(
            function,
            f"the step of this {type(optimizer).__name__} has been replaced on the object, so what it does is not "
            f"known. Call {function}() on the optimizer first, then what replaces its step.",
        )
    kind = type(optimizer)
    groups = property(operator.attrgetter("_stepped_groups"))
    own = {"__module__": kind.__module__, "__slots__": ("_stepped_groups",), "param_groups": groups}
    stand_in = type(kind.__name__, (kind,), own)
    own = {"__module__": kind.__module__, "_kind": kind, "_stand_in": stand_in}
    optimizer.__class__ = type(kind.__name__, (by, kind), own)
    optimizer.__dict__.update(attributes)
    if replaced is not None:
        optimizer.__dict__["step"] = _counted_step(optimizer)


def _counted_step(optimizer: Any) -> Any:
    """Return a `step` that torch's schedulers notice, as the one that they had put on the object."""

    def step(*arguments: Any, **keywords: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *arguments, **keywords)

    vars(step)["_wrapped_by_lr_sched"] = True
    return step
