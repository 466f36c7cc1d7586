"""Parameter groups by weight decay: weights are decayed, but biases and scales of normalisation layers are not."""

from __future__ import annotations

import re
from typing import Any

from torch.nn import Module, Parameter

from paceline.errors import ConfigurationError

_NORMALIZATION = re.compile(r"Norm(alization)?(\dd)?$")  # LayerNorm, BatchNorm2d, LlamaRMSNorm, ...


def parameter_groups(module: Module, weight_decay: float, **settings: Any) -> list[dict[str, Any]]:
    """Cut the trainable parameters of `module` into two groups: decayed ones, and the others with `weight_decay=0`.

    Parameters with fewer than two dimensions are not decayed (biases, scale and shift of normalisations). Nor is
    whatever is called `bias` or belongs to a module whose class is named LayerNorm, BatchNorm2d, LlamaRMSNorm and the
    like, whatever its shape. Embeddings are weights. Shared parameters count once.

    Args:
        module: The model, before or after wrapping.
        weight_decay: The first group's.
        settings: Further settings of both groups, such as `lr`.

    Returns:
        Groups for any optimizer, in registration order; an empty one is left out.

    Raises:
        ConfigurationError: The weight decay is negative, or nothing can be trained.

    Source:
        Goyal et al. 2017, section 5.1, exempts the scale and shift of batch normalisation; biases are left out as well,
        as is common since (He et al. 2019, section 3.1).
    """
    if not weight_decay >= 0:
        raise ConfigurationError(
            f"weight_decay={weight_decay} is negative. Give 0 or more; the paper has 1e-4."
        )
    decayed: dict[int, Parameter] = {}
    others: dict[int, Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in decayed:
                exempt = parameter.ndim < 2 or name.endswith("bias") or is_normalization(part)
                (others if exempt else decayed).setdefault(id(parameter), parameter)
    if not decayed and not others:
        raise ConfigurationError(
            f"this {type(module).__name__} has no parameter that requires a gradient. Unfreeze some before making "
            "groups."
        )
    groups = [
        {"params": list(decayed.values()), "weight_decay": weight_decay, **settings},
        {"params": list(others.values()), "weight_decay": 0.0, **settings},
    ]
    return [group for group in groups if group["params"]]


def is_normalization(module: Module) -> bool:
    """Return whether a module normalises, by the name of its class or of one that it derives from."""
    return any(_NORMALIZATION.search(kind.__name__) for kind in type(module).__mro__)
