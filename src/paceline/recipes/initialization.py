"""Initial values of the large-minibatch recipe: residual blocks that start as their shortcut, a small output layer."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn import Module

from paceline.errors import ConfigurationError
from paceline.numbers_given import number


def zero_init_residual(module: Module, *names: str) -> list[str]:
    """Clear the scale of the last normalisation of every residual block, so that each block begins as its shortcut.

    Args:
        module: The model on its device, before wrapping. Mutated.
        names: Names of the scales, with `*` for any part: "*.bn2.weight" for torchvision's ResNet-18 and 34,
            "*.bn3.weight" for its larger ones.

    Returns:
        Names of the parameters that are zero now, in the order of the modules.

    Raises:
        ConfigurationError: A name fits no scale of a normalisation; nothing was changed.

    Source:
        Goyal et al. 2017, section 5.1.
    """
    scales = {name: parameter for name, parameter in module.named_parameters() if parameter.ndim == 1}
    found = [name for name in scales if any(fnmatchcase(name, each) for each in names)]
    for each in names:
        if not any(fnmatchcase(name, each) for name in found):
            raise ConfigurationError(
                f"zero_init_residual: {each!r} fits no parameter of one dimension in this {type(module).__name__}. "
                f"Give names of scales. This model has {', '.join(list(scales)[:8]) or 'none'}, ..."
            )
    with torch.no_grad():
        for name in found:
            scales[name].zero_()
    return found


def init_output_layer(module: Module, std: float = 0.01) -> str:
    """Draw the weights of the last linear layer from N(0, std²) and clear its bias; return its name.

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
