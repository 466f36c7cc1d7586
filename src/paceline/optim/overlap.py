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

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as torchs

from paceline.observe.timings import watches_optimizers
from paceline.optim.adopted_optimizer import (
    AdoptedOptimizer,
    adopt,
    parameters_of,
    refuse,
    settings_of,
    why_not_by_parameter,
)
from paceline.optim.behind_forward import Overlap

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class Defers(Overlap, Protocol):
    """The forward overlap of a wrapped model, as this module uses it."""

    def take_optimizer(self) -> None:
        """Defer the steps of an optimizer from now on."""

    def under_way(self, parameters: Iterable[Tensor]) -> Sequence[Defers]:
        """Return the models, this one or others, that have a gradient of one of these parameters under way."""

    def later(self, action: Callable[[Sequence[Parameter]], None]) -> None:
        """Run `action` with the parameters of each bucket that is under way, when it has arrived."""

    def zero_grad_of(self, parameters: Sequence[Tensor], set_to_none: bool) -> None:
        """Drop these gradients. Those under way are dropped when the optimizer has used them."""

    def flush(self) -> None:
        """Complete all steps under way."""


def overlap(optimizer: AnyOptimizer, model: Any, *, per_parameter: bool = False) -> AnyOptimizer:
    """Let `optimizer.step()` return at once, each parameter being stepped when the next forward needs it.

    Parameters after any number of steps are bitwise those that the optimizer makes without this. The rate and the other
    settings of a step are those of the moment of `step()`, whatever a scheduler does before the gradients arrive.

    Args:
        optimizer: One of torch's, or LARS or LAMB of `paceline-recipes`, over parameters of `model` and perhaps others.
            Those of another model with forward overlap are deferred as well; parameters of no such model are stepped
            at once. It is changed in place, so schedulers may have been given it before.
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
        deferring = cast("Defers", steps)
        adopt(optimizer, _Overlapped, "overlap", _steps=deferring, _met=[deferring])
        deferring.take_optimizer()
    return optimizer


_MISSING = object()
_refuse = functools.partial(refuse, "overlap")


def _check(optimizer: Any, model: Any, steps: object, per_parameter: bool) -> None:
    """Raise ConfigurationError if the optimizer's steps cannot be deferred; `steps` is the model's forward overlap."""
    if steps is _MISSING or not hasattr(model, "flush"):
        _refuse(
            f"the model is a {type(model).__name__}. Pass what "
            "paceline.DistributedDataParallel(..., overlap_forward=True) returned."
        )
    if not isinstance(optimizer, Optimizer):
        _refuse(
            f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer. Pass the optimizer itself, "
            "before anything else wraps it."
        )
    if isinstance(optimizer, _Overlapped):
        _refuse(
            "this optimizer has been through overlap() before. Call it once, and go on with what it returned."
        )
    if isinstance(optimizer, AdoptedOptimizer):
        _refuse("this optimizer is sharded, which includes what overlap() does. Leave out overlap().")
    if not per_parameter and (why := why_not_by_parameter(type(optimizer))):
        _refuse(f"{why}. If it does, pass per_parameter=True; otherwise train without overlap_forward.")
    if steps is None and not getattr(model, "overlaps_forward", False):
        _refuse(
            "the model was wrapped without overlap_forward. Write DistributedDataParallel(module, "
            "overlap_forward=True), or leave out overlap()."
        )
    own, stepped = set(map(id, model.parameters())), parameters_of(optimizer)
    if not any(id(parameter) in own for parameter in stepped):
        _refuse(
            f"none of the {len(stepped)} parameters that this {type(optimizer).__name__} steps is the model's, so "
            "there is nothing to defer. Make it of model.parameters(), or pass the model whose parameters it steps."
        )


class _Overlapped(AdoptedOptimizer):
    """Put in front of an optimizer's class."""

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
        found = self._steps.under_way(parameters_of(self))
        self._met += [steps for steps in found if steps not in self._met]
        return found

    def _flush(self) -> None:
        """Complete whatever this optimizer has deferred."""
        for steps in self._met:
            steps.flush()

    def _defer(self, under_way: Sequence[Defers]) -> None:
        settings = [settings_of(group) for group in self.param_groups]
        members = [list(group["params"]) for group in self.param_groups]
        there = [[p for p in own if not self._steps.is_outstanding(p)] for own in members]
        if any(there):
            self._run_groups(_groups(settings, there), self._kind.step)
        owner = {id(p): place for place, own in enumerate(members) for p in own}

        def step_these(parameters: Sequence[Parameter]) -> None:
            own: list[list[Tensor]] = [[] for _ in settings]
            for parameter in parameters:
                if (place := owner.get(id(parameter))) is not None:
                    own[place].append(parameter)
            if any(own):
                self._run_groups(_groups(settings, own), self._kind.step)

        for steps in under_way:
            steps.later(step_these)

    def _has_hooks(self) -> bool:
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        of_all = (*torchs._global_optimizer_pre_hooks.values(), *torchs._global_optimizer_post_hooks.values())
        return bool(own) or not all(map(watches_optimizers, of_all))

    def zero_grad(self, set_to_none: bool = True) -> None:
        with self._steps.lock:
            under_way = self._under_way()
            for steps in under_way:
                steps.zero_grad_of(parameters_of(self), set_to_none)
        if not under_way:
            super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._flush()
        super().load_state_dict(state_dict)


def _groups(settings: Iterable[dict[str, Any]], members: Iterable[Sequence[Tensor]]) -> list[dict[str, Any]]:
    return [{**group, "params": list(own)} for group, own in zip(settings, members, strict=True) if own]
