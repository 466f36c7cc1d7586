"""`LAMB`: Adam whose step for each parameter is a fraction of that parameter's norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.errors import ConfigurationError
from paceline.given import number
from paceline_recipes.layerwise import (
    Factors,
    LayerwiseOptimizer,
    Tensors,
    add,
    check_max_trust_ratio,
    check_numbers,
    divide,
    norms,
    norms_on_device,
    scale,
    times,
    trust_ratio,
    trust_ratios_on_device,
)


class LAMB(LayerwiseOptimizer):
    """Layer-wise adaptive moments, for large batches.

    For each parameter w with gradient g, in step t, with weight decay b:

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + b w
        ratio = phi(|w|) / |u|               (1 where phi(|w|) or |u| is 0, and in groups with layerwise=False)
        w = w - lr ratio u

    where phi(z) is z within `weight_norm_bounds`. With `layerwise=False` it is AdamW.

    Limits first: v holds squares in the parameters' precision. In float32, where |g| exceeds
    sqrt(3.4e38 / (1 - beta2)), about 6e20, v is infinite from then on and that element stands still.

    Args:
        params: Parameters or groups. Biases and normalisation are best put into a group with `layerwise=False`.
        lr: The rate.
        betas: How slowly the two moments forget.
        eps: Added to the root of the second moment.
        weight_decay: b.
        bias_correction: False leaves out the divisions by 1 - beta^t.
        weight_norm_bounds: The paper's lower and upper bound of |w| in the ratio.
        max_trust_ratio: An upper bound of the ratio, of the 1 as well, in groups with `layerwise=True`; None for none.
        layerwise: Use the ratio. Usually set for a group.
        maximize: Ascend.

    Contract:
        Local. Sparse gradients and complex parameters are refused.

    Cost:
        State: two tensors and a number a parameter. During a step, on the host, a copy of the largest parameter.

    Source:
        You et al.: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2.
    """

    steps_each_parameter = True  # `paceline.optim.why_not_by_parameter` reads it

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        weight_norm_bounds: tuple[float, float] = (0.0, math.inf),
        max_trust_ratio: float | None = None,
        layerwise: bool = True,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "weight_norm_bounds": weight_norm_bounds,
            "max_trust_ratio": max_trust_ratio,
            "layerwise": layerwise,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _check(self, group: dict[str, Any]) -> None:
        check_numbers("LAMB", group, ("lr", "eps", "weight_decay"))
        check_max_trust_ratio("LAMB", group)
        if not all(0 <= number(beta) < 1 for beta in group["betas"]):
            raise ConfigurationError(f"LAMB: betas={group['betas']} have to be at least 0 and less than 1.")
        low, high = group["weight_norm_bounds"]
        if not 0 <= number(low) <= number(high):
            raise ConfigurationError(
                f"LAMB: weight_norm_bounds={group['weight_norm_bounds']}: a lower bound of at least 0, then an upper "
                "one that is not less."
            )

    def _update(self, tensors: Tensors, group: dict[str, Any]) -> None:
        corrections = _corrections(tensors, group)
        for place, batch in tensors.batches():
            _step(batch, corrections[place], group)


def _step(tensors: Tensors, corrections: list[tuple[float, float]], group: dict[str, Any]) -> None:
    (beta1, beta2), b, lr = group["betas"], group["weight_decay"], float(group["lr"])
    w, g = tensors.parameters, tensors.gradients
    m, v = tensors.kept("exp_avg"), tensors.kept("exp_avg_sq")
    if group["maximize"]:
        g = list(torch._foreach_neg(g))
    torch._foreach_lerp_(m, g, 1 - beta1)
    scale(v, beta2)
    torch._foreach_addcmul_(v, g, g, 1 - beta2)
    # u = c u', where c = root2 / scale1 and u' = m / (sqrt(v) + eps root2) + (b / c) w: a pass less
    cs = [root2 / scale1 for scale1, root2 in corrections]
    # In half precision eps may vanish beside a zero root, and zero by zero is not a number.
    wide = [moment.float() for moment in v] if v[0].dtype == torch.float16 else v
    update = list(torch._foreach_sqrt(wide))
    torch._foreach_add_(update, [group["eps"] * root2 for _, root2 in corrections])
    divide(update, m)
    if b != 0:
        add(update, w, [b / c for c in cs])
    ratios = _ratios(w, update, cs, group)
    add(w, update, times(times(ratios, [-lr] * len(cs)), cs))


def _corrections(tensors: Tensors, group: dict[str, Any]) -> list[tuple[float, float]]:
    """Count the step. Return 1 - beta1^t and the root of 1 - beta2^t for each parameter."""
    beta1, beta2 = group["betas"]
    known: dict[int, tuple[float, float]] = {}
    found = []
    for state in tensors.states:
        step = state["step"] = state.get("step", 0) + 1
        if step not in known:
            known[step] = (1 - beta1**step, math.sqrt(1 - beta2**step))
        found.append(known[step] if group["bias_correction"] else (1.0, 1.0))
    return found


def _ratios(w: list[Tensor], update: list[Tensor], cs: list[float], group: dict[str, Any]) -> Factors:
    """Return each parameter's trust ratio; `update` times its c is u."""
    if not group["layerwise"]:
        return [1.0] * len(w)
    (low, high), most = group["weight_norm_bounds"], group["max_trust_ratio"]
    if not w[0].is_cpu:
        bounded = [z.clamp(low, high) for z in norms_on_device(w)]
        scaled = torch._foreach_mul(norms_on_device(update), cs)
        return trust_ratios_on_device(bounded, scaled, most, w[0].dtype)
    of_weights, of_updates = norms(w, update)
    return [
        trust_ratio(min(max(z, low), high), c * u, most, w[0].dtype)
        for z, u, c in zip(of_weights, of_updates, cs, strict=True)
    ]
