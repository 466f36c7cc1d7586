"""The class of a parameter whose gradient is still being reduced: reading it waits until its step has been made.

Rules
1. A parameter is of this class from the end of backward until its bucket has arrived and its optimizer has stepped it.
   Nothing else about it changes: same object, same memory, same hooks.
2. Every function of torch that takes it, and every attribute (`.grad`, `.data`), first completes its bucket. So a
   reader that no hook of a module announces (tied weights, `F.linear(x, layer.weight)`, an average of the weights,
   clipping, a checkpoint) waits, too, and sees a whole step. Shapes, dtypes and the like need no waiting.
3. What does not go through torch's Python functions cannot be seen: a view or `.data` taken in an earlier step, memory
   shared with NumPy, C++ extensions that bypass the dispatcher of Python. Hence `overlap_forward="debug"`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Complete = Callable[[int, bool], None]
"""Called with a bucket's index, and whether a gradient was read."""

_owners: dict[int, tuple[Complete, int]] = {}  # by a parameter's id: who completes it, and its bucket
lock = threading.RLock()
"""Held while buckets are completed: any thread may read a parameter."""

# What says nothing about values.
_METADATA_METHODS = frozenset(
    word
    for line in (
        "size dim numel nelement stride element_size ndimension is_floating_point is_complex is_contiguous",
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
    """A parameter whose step is outstanding."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, of = func.__name__, getattr(getattr(func, "__self__", None), "__name__", "")
        if not (of in _METADATA_ATTRIBUTES and name == "__get__") and name not in _METADATA_METHODS:
            for parameter in _outstanding((*args, *kwargs.values())):
                complete(parameter, of == "grad")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _outstanding(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, OutstandingParameter):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _outstanding(argument)
        elif isinstance(argument, dict):
            yield from _outstanding(argument.values())


def is_outstanding(parameter: Tensor) -> bool:
    """Whether the parameter's step is. Local; does not wait."""
    return parameter.__class__ is OutstandingParameter


def complete(parameter: Tensor, reads_gradient: bool = False) -> None:
    """Wait for the parameter's bucket and step it, if it is outstanding."""
    with lock:
        owner = _owners.get(id(parameter))
        if owner is not None:
            owner[0](owner[1], reads_gradient)


def mark(parameters: Iterable[Parameter], owner: Complete, bucket: int) -> None:
    """From now on reading one of these calls `owner(bucket, ...)`."""
    for parameter in parameters:
        _owners[id(parameter)] = (owner, bucket)
        parameter.__class__ = OutstandingParameter


def unmark(parameters: Iterable[Parameter]) -> None:
    """They are ordinary parameters again."""
    for parameter in parameters:
        parameter.__class__ = Parameter
        del _owners[id(parameter)]
