"""Waiting for an outstanding step: at each read of a parameter, and before a module's forward.

Rules
1. A parameter is of this class from the end of backward until its bucket has arrived and its optimizer has stepped it.
   Nothing else about it changes: same object, same hooks; its memory comes back as it was.
2. Every function of torch that takes it, and every attribute (`.grad`, `.data`), first completes its bucket. So reads
   that no module's hook announces wait, too, and see a whole step: tied weights, `F.linear(x, layer.weight)`, an
   average of the weights, clipping, a checkpoint. Shapes, dtypes and the like need no waiting.
3. What does not go through torch's Python functions cannot be seen. What takes the parameter so (`torch.tensor(p)`,
   extensions, a `ProcessGroup`'s methods, scripted functions) reads NaN, because its memory is another from
   `optimizer.step()` on (`DeferredStep.hide`). What refers to its own memory from before (a view, `.data`, NumPy) reads
   the old step.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

# By a parameter's id: the `ForwardOverlap` that completes it (which imports this file), and its bucket.
_owners: dict[int, tuple[Any, int]] = {}
lock = threading.RLock()
"""Held while buckets are completed: any thread may read a parameter."""

# What says nothing about values. (`dim` does not either, but is all that `torch.vmap` asks for before it takes one.)
_METADATA_METHODS = frozenset(
    word
    for line in (
        "size numel nelement stride element_size ndimension is_floating_point is_complex is_contiguous",
        "storage_offset get_device register_hook register_post_accumulate_grad_hook requires_grad_",
    )
    for word in line.split()
)
_METADATA_ATTRIBUTES = frozenset(
    word
    for line in (
        "shape dtype device layout ndim requires_grad is_leaf grad_fn is_sparse is_cuda is_cpu is_meta is_quantized",
        "nbytes itemsize output_nr _version names _backward_hooks _post_accumulate_grad_hooks is_mkldnn is_nested",
    )
    for word in line.split()
)


class OutstandingParameter(Parameter):
    """A parameter whose optimizer step is deferred."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, of = func.__name__, getattr(getattr(func, "__self__", None), "__name__", "")
        if not (of in _METADATA_ATTRIBUTES and name == "__get__") and name not in _METADATA_METHODS:
            for parameter in _outstanding((*args, *kwargs.values())):
                complete(parameter, of == "grad")
            # `nn.Parameter(p)` asks for this of a subclass, and compares the classes: of one that is none any more.
            if name == "detach" and sys._getframe(1).f_code is Parameter.__new__.__code__:
                return Tensor._make_subclass(Parameter, args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        complete(self)
        return Parameter.__deepcopy__(self, memo)  # an ordinary one, as this is now

    def __reduce_ex__(self, protocol: Any) -> Any:
        complete(self)
        return Parameter.__reduce_ex__(self, protocol)


def _outstanding(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, OutstandingParameter):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _outstanding(argument)
        elif isinstance(argument, dict):
            yield from _outstanding(argument.values())


def is_outstanding(parameter: Tensor) -> bool:
    """Return whether the parameter's step is. Local; does not wait."""
    return parameter.__class__ is OutstandingParameter


def complete(parameter: Tensor, reads_gradient: bool = False) -> None:
    """Wait for the parameter's bucket and step the parameter, if it is outstanding."""
    with lock:
        owner = _owners.get(id(parameter))
        if owner is not None:
            owner[0].complete(owner[1], reads_gradient)


def owner_of(parameter: Tensor) -> Any:
    """Return the `ForwardOverlap` whose outstanding step includes this parameter. Local; does not wait."""
    owner = _owners.get(id(parameter))
    return None if owner is None else owner[0]


def mark(parameters: Iterable[Parameter], owner: Any, bucket: int) -> None:
    """Make each read of these parameters call `owner.complete(bucket, ...)`."""
    for parameter in parameters:
        _owners[id(parameter)] = (owner, bucket)
        parameter.__class__ = OutstandingParameter


def unmark(parameters: Iterable[Parameter]) -> None:
    """Make these ordinary parameters again."""
    for parameter in parameters:
        parameter.__class__ = Parameter
        del _owners[id(parameter)]


# ---- modules that wait for their own parameters, and when each was first needed


class _Wait:
    """A forward pre-hook. A copy of the module has it, too, where it does nothing."""

    def __init__(self, waiting: Any, parameters: Sequence[Parameter]) -> None:
        self._waiting = weakref.ref(waiting)
        self._parameters = tuple(parameters)

    def __call__(self, module: Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the wrapper has flushed before, and a clock cannot be compiled
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
    """Return at once. This is the hook of a copied module, which has no parameters to wait for."""


def install(module: Module, waiting: Any, managed: Iterable[Parameter]) -> tuple[RemovableHandle, ...]:
    """Make every part of `module` wait before its forward for managed parameters of its own or its parts. Local."""
    ids = set(map(id, managed))
    return tuple(
        part.register_forward_pre_hook(_Wait(waiting, [p for p in _own(part) if id(p) in ids]), prepend=True)
        for part in module.modules()
        if not _is_container(part) and any(id(p) in ids for p in part.parameters())
    )


def _own(part: Module) -> list[Parameter]:
    """Return a module's parameters, and those of parts that are never called (`nn.ParameterList`)."""
    own = list(part.parameters(recurse=False))
    for child in part.children():
        if _is_container(child):
            own += _own(child)
    return own


def _is_container(part: Module) -> bool:
    return type(part).forward is Module.forward


class FirstUseTimes:
    """The moment at which each parameter was first needed in the last measured forward, without `waited_s`.

    None are recorded if the step was completed before, say by saving the model. Reads of a weight between a step
    and the forward are not counted.
    """

    def __init__(self) -> None:
        self._first_s: dict[int, float] = {}
        self._began_s: float | None = None
        self.waited_s = 0.0

    def begin(self) -> None:
        """Expect another forward."""
        self._began_s, self.waited_s = None, 0.0

    def note(self, parameters: Iterable[Parameter]) -> None:
        """Note that a module which owns these is about to run."""
        now_s = time.perf_counter()
        if self._began_s is None:
            self._first_s.clear()
            self._began_s = now_s
        passed_s = max(0.0, now_s - self._began_s - self.waited_s)  # another thread may have waited meanwhile
        for parameter in parameters:
            self._first_s.setdefault(id(parameter), passed_s)

    def note_wait(self, from_s: float, until_s: float) -> None:
        """Add the time that a thread has waited for gradients."""
        if self._began_s is not None:
            self.waited_s += max(0.0, until_s - max(from_s, self._began_s))

    def of(self, parameters: Iterable[Parameter], otherwise_s: float) -> float:
        """Return the seconds of forward before the first of these was needed."""
        return min((self._first_s.get(id(p), otherwise_s) for p in parameters), default=otherwise_s)
