"""`LARS`: momentum SGD whose step for each parameter is a fixed fraction of that parameter's norm."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from paceline.errors import ConfigurationError
from paceline_recipes.layerwise import (
    Factors,
    LayerwiseOptimizer,
    Tensors,
    add,
    check_max_trust_ratio,
    check_numbers,
    norms,
    norms_on_device,
    scale,
    times,
    trust_ratio,
    trust_ratios_on_device,
)


class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling, for large batches.

    For each parameter w with gradient g, weight decay b, momentum m, rate lr and trust coefficient h:

        ratio = h |w| / (|g| + b |w|)        (1 where |w| or |g| is 0, and in groups with layerwise=False)
        u = ratio (g + b w)
        v = m v + u
        w = w - lr v                         (with nesterov: w - lr (u + m v))

    As in `torch.optim.SGD` the rate stands outside of the momentum, so a change of the rate needs no momentum
    correction. In the paper it is inside. At a constant rate both are the same.

    Args:
        params: Parameters or groups. Biases and normalisation are best put into a group with `layerwise=False`, which
            `torch.optim.SGD` would update the same.
        lr: The rate; much larger than that of SGD: the ratio multiplies it by about h |w| / |g|.
        momentum: m; 0 keeps no state.
        weight_decay: b.
        trust_coefficient: h; the paper has 0.001 to 0.02.
        nesterov: Step along the gradient after the momentum.
        max_trust_ratio: An upper bound of the ratio, of the 1 as well, in groups with `layerwise=True`; None for none.
        layerwise: Use the ratio; False: plain momentum SGD. Usually set for a group.
        maximize: Ascend.

    Contract:
        Local. Sparse gradients and complex parameters are refused.

    Cost:
        State: one tensor a parameter. Seven passes over all parameters.

    Source:
        You, Gitman, Ginsburg: "Large Batch Training of Convolutional Networks", arXiv 1708.03888, algorithm 1.
    """

    steps_each_parameter = True  # `paceline.optim.why_not_by_parameter` reads it

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
        max_trust_ratio: float | None = None,
        layerwise: bool = True,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "nesterov": nesterov,
            "max_trust_ratio": max_trust_ratio,
            "layerwise": layerwise,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _check(self, group: dict[str, Any]) -> None:
        check_numbers("LARS", group, ("lr", "momentum", "weight_decay", "trust_coefficient"))
        check_max_trust_ratio("LARS", group)
        if group["nesterov"] and group["momentum"] == 0:
            raise ConfigurationError("LARS: nesterov=True needs momentum; give momentum=0.9, say.")

    def _update(self, tensors: Tensors, group: dict[str, Any]) -> None:
        ratios = _ratios(tensors, group)
        for place, batch in tensors.batches():
            _step(batch, ratios[place], group)


def _step(tensors: Tensors, ratios: Factors, group: dict[str, Any]) -> None:
    lr, m, b = float(group["lr"]), group["momentum"], group["weight_decay"]
    sign = -1.0 if group["maximize"] else 1.0

    def scaled(number: float) -> Factors:
        return times(ratios, [number] * len(ratios))

    w, g = tensors.parameters, tensors.gradients
    if m != 0:
        v = tensors.kept("momentum_buffer")
        scale(v, m)
        add(v, g, scaled(sign))
        if b != 0:
            add(v, w, scaled(b))
    if m == 0 or group["nesterov"]:
        if b != 0:
            add(w, w, scaled(-lr * b))  # first: all of u is at the old w
        add(w, g, scaled(-lr * sign))
    if m != 0:
        torch._foreach_add_(w, v, alpha=-lr * m if group["nesterov"] else -lr)


def _ratios(tensors: Tensors, group: dict[str, Any]) -> Factors:
    if not group["layerwise"]:
        return [1.0] * len(tensors.parameters)
    h, b, most = group["trust_coefficient"], group["weight_decay"], group["max_trust_ratio"]
    dtype = tensors.parameters[0].dtype
    if not tensors.parameters[0].is_cpu:
        on_device = norms_on_device(tensors.parameters), norms_on_device(tensors.gradients)
        scaled, updates = torch._foreach_mul(on_device[0], h), torch._foreach_mul(on_device[0], b)
        torch._foreach_add_(updates, on_device[1])
        used = [torch.where(g == 0, g, u) for g, u in zip(on_device[1], updates, strict=True)]
        return trust_ratios_on_device(scaled, used, most, dtype)
    of_weights, of_gradients = norms(tensors.parameters, tensors.gradients)
    return [
        trust_ratio(h * w, g and g + b * w, most, dtype)
        for w, g in zip(of_weights, of_gradients, strict=True)
    ]
