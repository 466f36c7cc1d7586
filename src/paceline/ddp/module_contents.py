"""The parameters of a module as they were when it was wrapped: a forward refuses what was replaced since.

Hooks and the gradients' memory belong to the parameters of that time. The gradient of a parameter that came later stays
on its rank, so that ranks would train different models without an error.

Rules
1. Which parameters there are is compared in every forward. Added ones are allowed until a backward reaches them: a part
   that each rank trains by a backward of its own is not this module's.
2. Whether a parameter was converted, resized or swapped is looked at in every forward for the first one and the large
   ones. For a small one a bucket finds that its view does not fit, or it is looked at when a backward has not used it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from paceline.ddp.bucket import is_large
from paceline.ddp.layout import ManagedParameters
from paceline.errors import ConfigurationError

_END = (object(),)
# Another one after torch.utils.swap_tensors, in the same Python object
_tensor_of = operator.attrgetter("_cdata")
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
        self._facts = list(map(_facts_of, managed.parameters))
        self._tensors = list(map(_tensor_of, managed.parameters))
        self._looked_at = [p for index, p in enumerate(managed.parameters) if index == 0 or is_large(p)]
        self._tensors_looked_at = list(map(_tensor_of, self._looked_at))
        self._nums_bytes = list(map(_num_bytes_of, self._looked_at))
        self.added: dict[str, Parameter] = {}  # since wrapping, which have no gradients
        self._remember()

    def _remember(self) -> None:
        pairs = ((part._parameters, part._modules) for part in self._module.modules())
        # A scripted part has other mappings, which are not watched.
        contents = [each for pair in pairs for each in pair if isinstance(each, dict)]
        self._empty = [each for each in contents if not each]
        self._views = [each.values() for each in contents if each]  # live
        self._seen = [*chain.from_iterable(self._views), *_END]

    def check(self) -> None:
        """Raise ConfigurationError if a parameter was replaced, converted or moved. Local; 0.05 µs a parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            contents = chain(chain.from_iterable(self._views), _END)
            is_same = (
                not any(self._empty)
                and all(map(operator.is_, contents, self._seen))
                and list(map(_tensor_of, self._looked_at)) == self._tensors_looked_at
                and list(map(_num_bytes_of, self._looked_at)) == self._nums_bytes
                and self._looked_at[0].device == self._facts[0].device
            )
        if not is_same:
            self._compare()
            self._remember()

    def check_tensors(self, indices: Iterable[int]) -> None:
        """Raise ConfigurationError if one of these parameters, by index, is another tensor now. Local.

        No hook sees the gradient of such a tensor, so a backward has not used it.
        """
        with torch._C.DisableTorchFunctionSubclass():
            is_same = all(_tensor_of(self._managed.parameters[i]) == self._tensors[i] for i in indices)
        if not is_same:
            self._compare()

    def _compare(self) -> None:
        """Find what has changed: raise if gradients would be lost, else note which parameters were added."""
        now = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if isinstance(parameter, Parameter) and name not in self._ignored
        }
        named = self._managed.named()
        for (name, parameter), before, tensor in zip(named.items(), self._facts, self._tensors, strict=True):
            after = _facts_of(now.get(name, parameter))
            if after.device != before.device:
                raise ConfigurationError(
                    f"the module was moved to {after.device} after it had been wrapped on {before.device}, where its "
                    "gradients' memory and its process group's backend are. Move the module first, then wrap it."
                )
            if after != before:
                raise ConfigurationError(
                    f"{name} was converted from {before} to {after} after the module had been wrapped: its gradient's "
                    "memory is still the former. Convert the module first, then wrap it."
                )
            if _tensor_of(parameter) != tensor:
                raise _replaced(name)
        self.added = {name: p for name, p in now.items() if id(p) not in self._known}
        if not set(map(id, now.values())).issuperset(map(id, named.values())):
            for name, parameter in self.added.items():
                if parameter.requires_grad:
                    raise _replaced(name)

    def watch(self, output_nodes: Iterable[torch.autograd.graph.Node]) -> None:
        """Refuse a backward that passes these nodes and makes a gradient of a parameter that was added."""
        for node in output_nodes if self.added else ():
            node.register_prehook(lambda _: self.refuse_gradients())

    def refuse_gradients(self) -> None:
        """Raise ConfigurationError if the running backward makes a gradient of a parameter that was added. Local."""
        for name, parameter in self.added.items():
            if parameter.requires_grad and _is_accumulated(parameter):
                raise _replaced(name)


class _Facts(NamedTuple):
    """The facts that a parameter's gradient has in common with it."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _facts_of(parameter: Tensor) -> _Facts:
    return _Facts(parameter.dtype, parameter.shape, parameter.device)


def _is_accumulated(parameter: Tensor) -> bool:
    """Return whether the running backward adds to the parameter's gradient; `autograd.grad` does not."""
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
