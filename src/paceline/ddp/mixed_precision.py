"""The `mixed_precision` argument: low-precision copies of the parameters for forward and backward, on any device.

A forward runs the module on differentiable casts of its parameters. Autograd casts each gradient back on its way to
the parameter, so parameters, `.grad` and optimizer state stay in full precision and nothing has to be swapped back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module
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
