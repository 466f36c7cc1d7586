"""Adasum of updates while backward still runs: a bucket of parameters is stepped when it has its gradients.

Rules
1. Buckets are in the reverse order of the parameters, about that of backward, and launched in this order. One that
   lacks a gradient (a parameter is not used) is launched when backward ends. So every rank launches the same buckets in
   the same order, and between the same collectives of the script.
2. A launched bucket's parameters have the values of before until the optimizer's `step()`: only its update is under
   way. So backward, which may still read them, computes what it would have.
3. It is one backward a step: all but the last are under `no_sync`. What changes gradients, or settings of the
   optimizer, after backward is too late, and refused where it can be seen: on all ranks, whichever did it.
4. After a backward that raised, what it has launched belongs to the step: `finish` completes it, `abort` drops it.
   How far the ranks got may differ, so either is done by all of them. Where nothing was launched, the next begins anew.
5. What is dropped leaves no trace: the optimizer's state is copied before a bucket is stepped (`_UndoLog`).
6. A parameter that is unfrozen gets its hook when the first gradient of a backward arrives, or the step ends.

Source: the form is that of Maleki et al. 2021, section 4; that it can be done tensor by tensor, section 4.3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.comm import Backward, Work
from paceline.errors import ConfigurationError, PeerAbortedError
from paceline.optim import FlatParameters

LEAST_BYTES = 2**20  # of a bucket: less costs more rounds than it hides
MOST_BUCKETS = 8  # of one dtype: seven eighths can be under way before the last gradient is there

Launch = Callable[[int], Work]
Wait = Callable[[Sequence[Work]], None]
Tell = Callable[[bool], Sequence[bool]]


def cut(flats: Sequence[FlatParameters]) -> list[FlatParameters]:
    """Cut parameters, given in reverse order, into the buckets of rule 1."""
    buckets = []
    for whole in flats:
        cap_bytes = max(LEAST_BYTES, whole.kept.nbytes // MOST_BUCKETS)
        members: list[Tensor] = []
        for parameter in whole.parameters:
            members.append(parameter)
            if sum(member.nbytes for member in members) >= cap_bytes:
                buckets.append(FlatParameters(members))
                members = []
        if members:
            buckets.append(FlatParameters(members))
    return buckets


class DuringBackward:
    """Launches the update of each bucket from within backward.

    `launch` starts combining one of the buckets (`cut`), by its index; collective.
    """

    def __init__(self, optimizer: Optimizer, flats: Sequence[FlatParameters], launch: Launch) -> None:
        self._optimizer, self._flats, self._launch = optimizer, flats, launch
        self.is_armed = False  # whether the next backward launches anything
        self._kept = _UndoLog(optimizer)
        self._bucket_of = {id(p): index for index, flat in enumerate(flats) for p in flat.parameters}
        self._hooks: dict[int, RemovableHandle] = {}
        self.remove = weakref.finalize(self, _remove, self._hooks)
        """Take part in no backward any more."""
        self._begin()

    def _begin(self) -> None:
        self.hook_unfrozen()
        self._missing = [{id(p) for p in flat.parameters if p.requires_grad} for flat in self._flats]
        self._pending: list[Work] = []
        # Parameters that were stepped, the gradients they were stepped by, and those gradients' versions then.
        self._used: list[tuple[Tensor, Tensor, int]] = []
        self._backward: weakref.ref[Backward] | None = None

    def hook_unfrozen(self) -> None:
        """Register hooks for the gradients of parameters that have been unfrozen (rule 6)."""
        note = _unowned(weakref.ref(self))
        for flat in self._flats:
            for p in flat.parameters:
                if p.requires_grad and id(p) not in self._hooks:
                    self._hooks[id(p)] = p.register_post_accumulate_grad_hook(note)

    @property
    def has_launched(self) -> bool:
        """Return whether updates are under way."""
        return bool(self._pending)

    def note(self, parameter: Tensor) -> None:
        """Note that autograd has finished this parameter's gradient."""
        if not self.is_armed:
            return
        is_under_way = self._backward is not None and self._backward() is not None
        index = self._bucket_of[id(parameter)]
        if index < len(self._pending) or (self._pending and not is_under_way):
            raise ConfigurationError(
                f"AdasumOptimizer(overlap=True) has stepped {len(self._pending)} of {len(self._flats)} buckets of "
                f"parameters already, and a second backward brings one of shape {tuple(parameter.shape)} another "
                "gradient, before step(). Run all backwards of a step but the last under the optimizer's no_sync(), "
                "and call step() after the last. To skip a batch whose backward raised, call abort_step() on all "
                "ranks."
            )
        if not is_under_way:
            self._begin()
            backward = Backward(synchronizes=True, on_end=self._end)
            self._backward = weakref.ref(backward)
            torch.autograd.Variable._execution_engine.queue_callback(backward.end)
        self._missing[index].discard(id(parameter))
        while len(self._pending) < len(self._flats) and not self._missing[len(self._pending)]:
            self._step_next()

    def _end(self, backward: Backward) -> None:
        """Called by autograd when it has nothing left to do: launch all buckets that have not been (rule 1)."""
        if self._backward is None or self._backward() is not backward or backward.waits_for_outer_end():
            return
        self._backward = None
        self._launch_rest()

    def _launch_rest(self) -> None:
        while len(self._pending) < len(self._flats):
            self._step_next()

    @torch.no_grad()
    def _step_next(self) -> None:
        """Step the next bucket, give its parameters their values back, and launch the update (rule 2)."""
        index = len(self._pending)
        flat = self._flats[index]
        used = [(p, p.grad, p.grad._version) for p in flat.parameters if p.grad is not None]
        self._kept.take(p for p, _, _ in used)
        flat.take()
        with torch.autograd._unsafe_preserve_version_counter(tuple(flat.parameters)):
            try:
                step_only(self._optimizer, flat.parameters)
                flat.take_update()
            finally:
                flat.put_back()
        self._used += used
        self._pending.append(self._launch(index))

    def finish(self, wait: Wait, tell: Tell) -> None:
        """Complete the update of every bucket; the next backward begins anew.

        `wait` waits for what was launched; `tell`, a collective, tells all ranks whether this one has changed
        gradients.

        Contract:
            Collective.  Blocks: yes, also where it raises: nothing is under way afterwards.

        Raises:
            ConfigurationError: A gradient was changed after it had been used: parameters and state are as before.
            PeerAbortedError: One was on another rank; likewise.
        """
        self._launch_rest()  # a backward that raised has not
        is_changed = any(
            p.grad is not gradient or gradient._version != version for p, gradient, version in self._used
        )
        changed_by: list[int] = []

        def tell_and_wait(launched: Sequence[Work]) -> None:
            answers = tell(is_changed)  # while the last updates are under way
            wait(launched)
            changed_by.extend(rank for rank, answer in enumerate(answers) if answer)

        self._wait(tell_and_wait, drops=False)
        if changed_by:
            self._kept.put_back()
            raise _refusal(is_changed, changed_by)
        self._kept.drop()

    def abort(self, wait: Wait) -> None:
        """Drop the updates of this step; buckets that were not launched here may have been on other ranks (rule 4).

        Contract:
            Collective: every rank, however far its backward got.  Blocks: yes.  Afterwards: the optimizer's state is
            that of before.
        """
        for index in range(len(self._pending), len(self._flats)):
            self._pending.append(self._launch(index))  # whatever is in it: no rank applies the result
        self._wait(wait, drops=True)

    def _wait(self, wait: Wait, drops: bool) -> None:
        """Wait for everything, and begin anew; if that fails, or the step is dropped, the state is that of before."""
        try:
            wait(self._pending)
        except BaseException:
            drops = True
            raise
        finally:
            if drops:
                self._kept.put_back()
            self._begin()


def _refusal(is_changed_here: bool, changed_by: Sequence[int]) -> ConfigurationError | PeerAbortedError:
    """Return the error for a step whose gradients these ranks have changed after they had been used."""
    rule = (
        "clipped, unscaled, zeroed or replaced. AdasumOptimizer(overlap=True) has made its steps during backward, "
        "without that. Leave out overlap. The parameters and the optimizer's state are those of before this step, on "
        "all ranks."
    )
    if is_changed_here:
        return ConfigurationError(f"gradients were changed between backward and step(): {rule}")
    return PeerAbortedError(f"rank {changed_by[0]} has changed gradients between backward and step(): {rule}")


def _unowned(during: weakref.ref[DuringBackward]) -> Callable[[Tensor], None]:
    """Return a hook that does not keep its owner alive: parameters outlive an optimizer that is replaced."""

    def note(parameter: Tensor) -> None:
        if (owner := during()) is not None:
            owner.note(parameter)

    return note


def _remove(hooks: Mapping[int, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()


def step_only(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Step these parameters of an optimizer that steps each by its own gradient and state."""
    chosen, groups = set(map(id, parameters)), optimizer.param_groups
    partial: list[dict[str, Any]] = [
        {**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups
    ]
    optimizer.param_groups = [group for group in partial if group["params"]]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


class _UndoLog:
    """Copies of what `optimizer.state` holds for parameters, in memory that is used again for the next step.

    The state of a parameter is a dictionary of tensors and numbers, as of torch's optimizers.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # The objects that were there; what tensors held is in `_copies`.
        self._before: dict[Tensor, dict[str, Any]] = {}
        self._copies: dict[tuple[Tensor, str], Tensor] = {}

    def take(self, parameters: Iterable[Tensor]) -> None:
        """Copy the state of these parameters. A parameter that was copied before keeps its first copy."""
        state = self._optimizer.state
        sources, targets = [], []
        for parameter in parameters:
            if parameter in self._before:
                continue  # its step raised, and is tried again
            held = self._before[parameter] = dict(state.get(parameter, {}))
            for name, value in held.items():
                if isinstance(value, Tensor):
                    sources.append(value)
                    targets.append(self._copy_for((parameter, name), value))
        if sources:
            torch._foreach_copy_(targets, sources)

    def _copy_for(self, key: tuple[Tensor, str], value: Tensor) -> Tensor:
        found = self._copies.get(key)
        if found is None or _layout(found) != _layout(value):
            found = self._copies[key] = torch.empty_like(value)
        return found

    def put_back(self) -> None:
        """Make the state that of `take`, for all parameters that were taken: the same objects, with the same values."""
        state = self._optimizer.state
        with torch.no_grad():
            for parameter, held in self._before.items():
                for name, value in held.items():
                    if isinstance(value, Tensor):
                        value.copy_(self._copies[parameter, name])
                if held:
                    state[parameter].clear()
                    state[parameter].update(held)
                else:
                    state.pop(parameter, None)
        self.drop()

    def drop(self) -> None:
        """Forget what was taken: the step counts."""
        self._before.clear()


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
