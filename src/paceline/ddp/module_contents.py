"""The parameters of a module as they were when it was wrapped: a forward refuses what was replaced since.

Hooks and the gradients' memory belong to the parameters of that time. The gradient of a parameter that came later stays
on its rank, so that ranks would train different models without an error.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from paceline.ddp.layout import ManagedParameters
from paceline.errors import ConfigurationError

_END = (object(),)
_tensor_of = operator.attrgetter(
    "_cdata"
)  # another one after torch.utils.swap_tensors, in the same Python object
_num_bytes_of = operator.attrgetter("nbytes")


class ModuleContents:
    """The parts and parameters of a module, compared before each forward with those of the last one."""

    def __init__(
        self,
        module: Module,
        managed: ManagedParameters,  # whose gradients are reduced
        known: Iterable[Parameter],  # all parameters of the time of wrapping; frozen ones may be replaced
        ignored: set[str],  # names of parameters that may change
    ) -> None:
        self._module, self._ignored = module, ignored
        self._managed = managed
        self._known = set(map(id, known))
        self._facts = [_facts(parameter) for parameter in managed.parameters]
        self._tensors = list(map(_tensor_of, managed.parameters))
        self._nums_bytes = list(map(_num_bytes_of, managed.parameters))
        self._added: dict[str, Parameter] = {}
        self._remember()

    def _remember(self) -> None:
        contents = ((part._parameters, part._modules) for part in self._module.modules())
        # Live views. A scripted part has other mappings, which are not watched.
        self._views = [each.values() for pair in contents for each in pair if isinstance(each, dict)]
        self._seen = [*chain.from_iterable(self._views), *_END]

    def check(self) -> None:
        """Raise ConfigurationError if a parameter was replaced, converted or moved. Local; before a forward.

        Cost: 0.1 µs for each part and each parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            contents = chain(chain.from_iterable(self._views), _END)
            parameters, first = self._managed.parameters, self._facts[0][2]
            is_same = (
                all(map(operator.is_, contents, self._seen))
                and list(map(_tensor_of, parameters)) == self._tensors
                and list(map(_num_bytes_of, parameters)) == self._nums_bytes
                and parameters[0].device == first
            )
        if not is_same:
            self._compare()
            self._remember()

    def _compare(self) -> None:
        """Find what has changed: raise if gradients would be lost, else note which parameters were added."""
        now = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if isinstance(parameter, Parameter) and name not in self._ignored
        }
        named = self._managed.named()
        for (name, parameter), before, tensor in zip(named.items(), self._facts, self._tensors, strict=True):
            dtype, shape, device = _facts(now.get(name, parameter))
            if device != before[2]:
                raise ConfigurationError(
                    f"the module was moved to {device} after it had been wrapped on {before[2]}, where its gradients' "
                    "memory and its process group's backend are. Move the module first, then wrap it."
                )
            if (dtype, shape) != before[:2]:
                raise ConfigurationError(
                    f"{name} was converted from {before[0]}{list(before[1])} to {dtype}{list(shape)} after the module "
                    "had been wrapped: its gradient's memory is still the former. Convert the module first, then "
                    "wrap it."
                )
            if _tensor_of(parameter) != tensor:
                raise _replaced(name)
        self._added = {name: p for name, p in now.items() if id(p) not in self._known}
        if not set(map(id, now.values())).issuperset(map(id, named.values())):
            for name, parameter in self._added.items():
                if parameter.requires_grad:
                    raise _replaced(name)

    def watch(self, output_nodes: Iterable[torch.autograd.graph.Node]) -> None:
        """Refuse a backward that passes these nodes and makes a gradient of a parameter that was added."""
        for node in output_nodes if self._added else ():
            node.register_prehook(self._refuse_gradients)

    def _refuse_gradients(self, _: tuple[Tensor, ...]) -> None:
        for name, parameter in self._added.items():
            if parameter.requires_grad and _is_accumulated(parameter):
                raise _replaced(name)


def _facts(parameter: Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return parameter.dtype, parameter.shape, parameter.device


def _is_accumulated(parameter: Tensor) -> bool:
    """Whether the running backward adds to the parameter's gradient; `autograd.grad` does not."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # the engine's answer for a leaf that autograd.grad was asked for
        return False


def _replaced(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} is not a parameter with which the module was wrapped. Its gradient would stay on this rank, and ranks "
        "would train different models. Replace or add parameters first (another head, weight_norm, LoRA, "
        "load_state_dict with assign=True), then wrap the module."
    )
