"""Optimizers that step within backward (`torch.distributed.optim._apply_optimizer_in_backward`), on any device.

Torch runs such an optimizer as soon as a gradient is there, which is before it was reduced. Wrapped, it runs when the
parameter's bucket has come back; `.grad` is None afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter

MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def take_over(parameters: Iterable[Parameter]) -> bool:
    """Remove the hooks that would run optimizers on gradients that are not reduced yet; says if there are any."""
    handles = sys.modules[MODULE].param_to_optim_hook_handle_map if MODULE in sys.modules else None
    if not handles:
        return False
    found = [handle for parameter in parameters for handle in handles.get(parameter, ())]
    for handle in found:
        handle.remove()
    return bool(found)


def step(parameter: Any) -> None:
    """Run the parameter's own optimizers, if it has any, on its reduced gradient."""
    optimizers = getattr(parameter, "_in_backward_optimizers", None)
    if optimizers:
        for optimizer in optimizers:
            optimizer.step()
        parameter.grad = None
