"""What goes into a wrapped module's forward and what comes out: casts for `mixed_precision`, tensors found in outputs.

With `mixed_precision` a forward runs the module on differentiable low-precision casts of its parameters, on any
device. Autograd casts each gradient back on its way to the parameter, so parameters, `.grad` and optimizer state stay
in full precision and nothing has to be swapped back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.rpc import is_available as rpc_is_available
from torch.func import functional_call
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only


def cast_parameters(module: Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Differentiable low-precision copies, by name, of the floating-point parameters that are not ignored."""
    return {
        name: parameter.to(dtype)
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and not getattr(parameter, "_ddp_ignored", False)
    }


def cast_buffers(module: Module, dtype: torch.dtype) -> None:
    """Convert the floating-point buffers that are not ignored, for good."""
    for buffer in module.buffers():
        if buffer.is_floating_point() and not getattr(buffer, "_ddp_ignored", False):
            buffer.data = buffer.to(dtype)


def cast_inputs(inputs: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in nested inputs."""
    return tree_map_only(
        Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs
    )


def forward_in(module: Module, dtype: torch.dtype, inputs: Any, kwargs: Any) -> Any:
    """Run `module` with parameters and inputs in `dtype`."""
    inputs, kwargs = cast_inputs(inputs, dtype), cast_inputs(kwargs, dtype)
    return functional_call(module, cast_parameters(module, dtype), inputs, kwargs)


def batch_size(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The first dimension of the first tensor among a forward's arguments; 0 if there is none."""
    for value in (*inputs, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.size(0) if value.dim() else 0
    return 0


def find_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, mappings, dataclasses, packed sequences; nothing from other objects."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, PackedSequence):
        yield output.data
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from find_tensors(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from find_tensors(getattr(output, field.name, None))
    elif rpc_is_available():
        yield from _remote_tensors(output)


def _remote_tensors(output: Any) -> Iterator[Tensor]:
    from torch.distributed.rpc import RRef  # noqa: PLC0415 (not in every build)

    if isinstance(output, RRef) and output.is_owner():
        yield from find_tensors(output.local_value())
