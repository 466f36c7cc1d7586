"""Which layers has a model, how large are their gradients, and how much work is each? Without memory or arithmetic.

A layer is a module that owns parameters itself, or one item of a ParameterList. A parameter that several modules
share belongs to the first one, which is the last to finish its gradient. Everything runs on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.lab.workloads.workload import SizedWorkload, Workload

Shape = tuple[int, ...]
_TOUCHED_OPERATIONS = 4.0  # operations counted for each element that a normalisation or an embedding touches


@dataclass(frozen=True)
class Layer:
    """One layer: its gradients become ready together.

    Attributes:
        name: The module's name in the model.
        shapes: One a parameter.
        operations: Floating-point operations of its forward, for one step of the workload's published size.
    """

    name: str
    shapes: tuple[Shape, ...]
    operations: float


def layers_of(workload: SizedWorkload) -> tuple[Layer, ...]:
    """Return the layers in the order of their registration, which is about that of forward."""
    with torch.device("meta"):
        model = workload.make_model()
    operations = workload.published().operations() or _count(workload.published())
    layers = []
    for name, (module, parameters) in owners(model).items():
        shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        if isinstance(module, nn.ParameterList):
            work = operations.get(name.rpartition(".")[0], 0.0) / len(module)
        else:
            work = operations.get(name, 0.0)
        layers.append(Layer(name, shapes, work))
    return tuple(layers)


def owners(model: nn.Module) -> dict[str, tuple[nn.Module, list[nn.Parameter]]]:
    """Return the layers of a model by name: the module and the parameters it owns, in the order of registration."""
    found: dict[str, tuple[nn.Module, list[nn.Parameter]]] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(id(parameter) for parameter in own)
        if isinstance(module, nn.ParameterList):
            found |= {f"{name}.{i}": (module, [parameter]) for i, parameter in enumerate(own)}
        elif own:
            found[name] = (module, own)
    return found


def _count(workload: Workload) -> Mapping[str, float]:
    """Run one forward on the meta device and count what each module that owns parameters does."""
    batch = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, workload.make_batch(0, 0))
    counted: dict[str, float] = {}
    with torch.device("meta"):
        model = workload.make_model()
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_hook(_counter(name, counted))
        workload.loss(model, batch, None)
        lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ParameterList)]
    for name, module in lists:  # containers: nobody calls their forward
        counted[name] = float(sum(parameter.numel() for parameter in module.parameters()))
    return counted


def _counter(name: str, counted: dict[str, float]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if isinstance(module, nn.Conv2d | nn.Linear):
            each = 2.0 * module.weight[0].numel()  # a multiplication and an addition for each weight
        else:
            each = _TOUCHED_OPERATIONS
        counted[name] = counted.get(name, 0.0) + each * output.numel()

    return hook
