"""Initial values of the large-minibatch recipe: residual blocks that start as their shortcut, a small output layer.

How a residual block is found: by what it does, not by what it is called. A module whose first convolution says how many
channels it takes is run on noise; if autograd's graph of the result has a sum of two ways that both lead back to the
noise, the module is a block, and the longer way is its branch. If the branch ends in a normalisation, that one's scale
becomes zero, and the block begins as its shortcut (followed by whatever comes after the sum).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter

from paceline.errors import ConfigurationError
from paceline.numbers_given import number

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EDGE = 16  # of the noise: stays positive through a few strides within one block
_NORMALIZED = ("BatchNorm", "GroupNorm", "LayerNorm", "InstanceNorm")  # in the names of autograd's nodes
_PASSING = ("View", "Reshape", "Clone", "Alias", "Contiguous", "Slice", "ToCopy", "Permute", "Transpose")


def zero_init_residual(module: Module) -> list[str]:
    """Clear the scale of the last normalisation of every residual block, so that each block begins as its shortcut.

    For convolutional networks: blocks that take one tensor (B, C, ...) and add to it what ends in a normalisation, as
    in ResNets. Where the branch ends otherwise (ResNets with normalisation first, transformers) nothing is touched.

    Args:
        module: The model on its device, before wrapping.

    Returns:
        Names of the parameters that are zero now, in the order of the modules.

    Raises:
        ConfigurationError: There is no such block; nothing was changed.

    Source:
        Goyal et al. 2017, section 5.1.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: list[Parameter] = []
    inside_a_block: set[int] = set()
    for part in reversed(list(module.modules())):  # children before their parents
        if any(id(child) in inside_a_block for child in part.children()):
            inside_a_block.add(id(part))
            continue
        is_block, scale = _probe(part)
        if is_block:
            inside_a_block.add(id(part))
        if scale is not None and id(scale) in names:
            found.append(scale)
    if not found:
        raise ConfigurationError(
            f"zero_init_residual found no residual block in this {type(module).__name__} whose branch ends in a "
            "normalisation with a scale. It looks for convolutional blocks that take one tensor. Leave it out; or "
            "set the scales by hand: torch.nn.init.zeros_(block.bn3.weight)."
        )
    with torch.no_grad():
        for scale in found:
            scale.zero_()
    return [names[id(scale)] for scale in reversed(found)]


def init_output_layer(module: Module, std: float = 0.01) -> str:
    """Draw the weights of the last linear layer from N(0, std²) and clear its bias; returns its name.

    Raises:
        ConfigurationError: There is no linear layer, or `std` is negative.

    Source:
        Goyal et al. 2017, section 5.1.
    """
    linear = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise ConfigurationError(
            f"this {type(module).__name__} has no torch.nn.Linear to initialise as its output layer. Leave "
            "init_output_layer out."
        )
    if not number(std) >= 0:
        raise ConfigurationError(f"std={std!r} is not a standard deviation. The paper's is 0.01.")
    name, layer = linear[-1]
    nn.init.normal_(layer.weight, 0.0, std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return str(name)


# ---- finding blocks


def _probe(part: Module) -> tuple[bool, Parameter | None]:
    """Whether a module is a residual block, and the scale with which its branch ends, if it does so."""
    convolution = next((child for child in part.modules() if isinstance(child, _CONVOLUTIONS)), None)
    if convolution is None or isinstance(part, _CONVOLUTIONS):
        return False, None
    num_dims = convolution.weight.ndim - 2
    noise = torch.randn(
        2, convolution.in_channels, *[_EDGE] * num_dims, generator=torch.Generator().manual_seed(0)
    ).to(convolution.weight.device, convolution.weight.dtype)
    noise.requires_grad_()
    try:
        with torch.enable_grad(), _evaluating(part), torch.random.fork_rng(devices=[]):
            output = part(noise.clone())  # a first layer may write in place
    except Exception:  # noqa: BLE001  whatever does not take one tensor of this shape is no such block
        return False, None
    if not isinstance(output, Tensor) or output.grad_fn is None:
        return False, None
    return _find_sum(output.grad_fn, noise)


@contextmanager
def _evaluating(part: Module) -> Iterator[None]:
    """Evaluation mode, so that no statistics move and nothing is dropped; then everything as it was."""
    modes = [(module, module.training) for module in part.modules()]
    part.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _find_sum(output: Any, noise: Tensor) -> tuple[bool, Parameter | None]:
    depths: dict[Any, int] = {}
    for node in _from_leaves(output):
        depths[node] = _depth(node, depths, noise)
    sums = [node for node in depths if type(node).__name__.startswith("AddBackward")]
    for node in reversed(sums):
        ways = [way for way, _ in node.next_functions if way is not None and depths[way] >= 0]
        if len(ways) == 2:
            branch = max(ways, key=depths.__getitem__)
            return True, _scale_of(branch) if depths[ways[0]] != depths[ways[1]] else None
    return False, None


def _from_leaves(output: Any) -> list[Any]:
    """All nodes of a graph, each after those that it leads back to."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(output, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(way, False) for way, _ in node.next_functions if way is not None]
    return order


def _depth(node: Any, depths: dict[Any, int], noise: Tensor) -> int:
    """The longest way back to the noise; -1 where there is none."""
    if getattr(node, "variable", None) is noise:
        return 0
    below = [depths[way] for way, _ in node.next_functions if way is not None]
    return max(below, default=-1) + 1 if max(below, default=-1) >= 0 else -1


def _scale_of(node: Any) -> Parameter | None:
    """The scale of the normalisation that a branch ends in; None if it ends in something else."""
    while any(word in type(node).__name__ for word in _PASSING):
        node = node.next_functions[0][0]
    if not any(word in type(node).__name__ for word in _NORMALIZED):
        return None
    variables = [getattr(way, "variable", None) for way, _ in node.next_functions[1:2]]
    scale = variables[0] if variables else None
    return scale if isinstance(scale, Parameter) else None
