"""Computing in a lower precision than the parameters': what the module sees in a forward and while it is recomputed.

Rules
1. A forward runs the module on differentiable casts of its parameters, on any device. Autograd casts each gradient back
   on its way to the parameter, so parameters, `.grad` and optimizer state stay in full precision.
2. Activation checkpointing runs parts of the module again in backward. So while a backward passes a forward, the module
   has that forward's casts. Autograd owns the object that puts the parameters back, and drops it also after an error.
3. Normalisation layers compute with parameters in the dtype of their running statistics, as the kernels ask for. So
   these parameters keep their dtype, unless `buffer_dtype` makes the statistics low, too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only

from paceline.errors import ConfigurationError


def cast_buffers(module: Module, dtype: torch.dtype) -> None:
    """Convert the floating-point buffers that are not ignored, for good."""
    for buffer in module.buffers():
        if buffer.is_floating_point() and not getattr(buffer, "_ddp_ignored", False):
            buffer.data = buffer.to(dtype)


def mark_low_precision(module: Module, dtype: torch.dtype | None) -> None:
    """Give parameters that are not ignored `_mp_param` and `_fp_param`, for those who look; ours computes with casts.

    The first has no memory, as torch's between forwards.
    """
    for parameter in module.parameters():
        if not getattr(parameter, "_ddp_ignored", False) and not hasattr(parameter, "_mp_param"):
            low: Any = torch.empty_like(parameter, dtype=dtype, requires_grad=parameter.requires_grad)
            low.untyped_storage().resize_(0)
            marked: Any = parameter
            marked._mp_param, marked._fp_param = low, parameter.data


def check(module: Module, param_dtype: torch.dtype, buffer_dtype: torch.dtype | None) -> None:
    """Raise ConfigurationError for spectral norm, which multiplies its parameter by its buffers, of another dtype."""
    for name, part in module.named_modules():
        hooks = part._forward_pre_hooks.values()
        is_spectral = isinstance(part, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)
        dtypes = {buffer_dtype or b.dtype for b in part.buffers(recurse=False) if b.is_floating_point()}
        if is_spectral and dtypes - {param_dtype}:
            raise ConfigurationError(
                f"mixed_precision with param_dtype={param_dtype}: spectral norm in {name or 'the module'!r} multiplies "
                f"its weight by buffers of {dtypes.pop()}. Pass buffer_dtype={param_dtype} as well, or leave it out."
            )


def cast_inputs(inputs: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in nested inputs."""
    return tree_map_only(
        Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, inputs
    )


class LowPrecision:
    """The low-precision copies of a module's parameters, and when the module uses them."""

    def __init__(self, module: Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype
        self._casts: dict[str, Tensor] = {}  # of the last forward
        self._is_within = False

    def forward(self, inputs: Any, kwargs: Any) -> Any:
        """Run the module with parameters and inputs in low precision."""
        inputs, kwargs = cast_inputs(inputs, self._dtype), cast_inputs(kwargs, self._dtype)
        casts = self._cast()
        with self._having(casts):
            output = self._module(*inputs, **kwargs)
        self._casts = casts if torch.is_grad_enabled() else {}
        return output

    def _cast(self) -> dict[str, Tensor]:
        full = {id(p) for part in self._module.modules() if self._stays(part) for p in part.parameters(False)}
        return {
            name: parameter.to(self._dtype)
            for name, parameter in self._module.named_parameters()
            if parameter.is_floating_point()
            and not getattr(parameter, "_ddp_ignored", False)
            and id(parameter) not in full
        }

    def _stays(self, part: Module) -> bool:
        """Return whether it needs its parameters in the dtype of its statistics (rule 3)."""
        mean = part.running_mean if isinstance(part, _NormBase) else None
        return mean is not None and mean.dtype != self._dtype

    @contextlib.contextmanager
    def _having(self, casts: dict[str, Tensor]) -> Iterator[None]:
        """Let the module use these tensors in place of its parameters, except where it has others already."""
        if self._is_within:
            yield
            return
        self._is_within = True
        try:
            with _reparametrize_module(self._module, casts, tie_weights=True):
                yield
        finally:
            self._is_within = False

    def keep_for_backward(self, output_nodes: Sequence[Any]) -> None:
        """Have the last forward's casts again while a backward passes these nodes (rule 2)."""
        casts, self._casts = self._casts, {}

        def on_output(_: object) -> None:
            if not self._is_within:
                guard = _Guard(self._having(casts))
                torch.autograd.Variable._execution_engine.queue_callback(guard.end)

        for node in output_nodes:
            node.register_prehook(on_output)


class _Guard:
    """Leaves a context when backward ends or, since the engine alone keeps this, when it raises."""

    def __init__(self, context: contextlib.AbstractContextManager[None]) -> None:
        context.__enter__()
        self._leave = weakref.finalize(self, context.__exit__, None, None, None)
        self._leave.atexit = False

    def end(self) -> None:
        self._leave()
