"""LAMB: Adam whose step for each parameter is as long as that parameter's norm says."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.errors import ConfigurationError
from paceline.optim.layerwise import LayerwiseOptimizer, Tensors, check_max_trust_ratio, check_numbers
from paceline.optim.norms import norms


class LAMB(LayerwiseOptimizer):
    """Layer-wise adaptive moments, for large batches.

    For each parameter w with gradient g, in step t, with weight decay b:

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + b w
        ratio = phi(|w|) / |u|               (1 where phi(|w|) or |u| is 0, and in groups with layerwise=False)
        w = w - lr ratio u

    where phi(z) is z within `weight_norm_bounds`. With `layerwise=False` it is AdamW.

    Args:
        params: Parameters or groups. Biases and normalisation are best put into a group with `layerwise=False`.
        lr: The rate.
        betas: How slowly the two moments forget.
        eps: Added to the root of the second moment.
        weight_decay: b.
        bias_correction: False leaves out the divisions by 1 - beta^t.
        weight_norm_bounds: The paper's lower and upper bound of |w| in the ratio.
        max_trust_ratio: An upper bound of the ratio; None for none.
        layerwise: Use the ratio. Usually set for a group.
        maximize: Ascend.

    Contract:
        Local. Sparse gradients and complex parameters are refused.

    Cost:
        State: two tensors and a number a parameter. During a step, on the host, a copy of the largest parameter.

    Source:
        You et al.: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2.
    """

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
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ConfigurationError(f"LAMB: betas={group['betas']} have to be at least 0 and less than 1.")
        low, high = group["weight_norm_bounds"]
        if not 0 <= low <= high:
            raise ConfigurationError(
                f"LAMB: weight_norm_bounds={group['weight_norm_bounds']}: a lower bound of at least 0, then an upper "
                "one that is not less."
            )

    def _update(self, tensors: Tensors, group: dict[str, Any]) -> None:
        (beta1, beta2), b = group["betas"], group["weight_decay"]
        w, g = tensors.parameters, tensors.gradients
        m, v = tensors.kept("exp_avg"), tensors.kept("exp_avg_sq")
        if group["maximize"]:
            g = list(torch._foreach_neg(g))
        torch._foreach_lerp_(m, g, 1 - beta1)
        tensors.scale(v, beta2)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)
        scale1, scale2 = _corrections(tensors, group)
        # u = c u', where c = sqrt(scale2) / scale1 and u' = m / (sqrt(v) + eps sqrt(scale2)) + (b / c) w: a pass less
        # In half precision the reciprocal of a small root is infinite, and times a zero moment not a number.
        wide = [moment.float() for moment in v] if v[0].dtype == torch.float16 else v
        update = list(torch._foreach_sqrt(wide))
        torch._foreach_add_(update, (group["eps"] * scale2.sqrt()).tolist())
        torch._foreach_reciprocal_(update)  # in place: a fresh tensor of this size costs more than the pass
        torch._foreach_mul_(update, m)
        c = scale2.sqrt() / scale1
        if b != 0:
            tensors.add(update, w, b / c)
        ratio = _ratios(tensors, update, c, group)
        tensors.add(w, update, -float(group["lr"]) * ratio * c)


def _corrections(tensors: Tensors, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Count the step; 1 - beta^t of each parameter for both moments, shape (K,), float64."""
    for state in tensors.states:
        state["step"] = state.get("step", 0) + 1
    if not group["bias_correction"]:
        ones = torch.ones(len(tensors.states), dtype=torch.float64)
        return ones, ones
    steps = torch.tensor([state["step"] for state in tensors.states], dtype=torch.float64)
    beta1, beta2 = group["betas"]
    return 1 - beta1**steps, 1 - beta2**steps


def _ratios(tensors: Tensors, update: list[Tensor], c: Tensor, group: dict[str, Any]) -> Tensor:
    """Each parameter's ratio, shape (K,), float64; `update` times `c` is u."""
    if not group["layerwise"]:
        return torch.ones_like(c)
    w, u = norms(tensors.parameters, update)
    low, high = group["weight_norm_bounds"]
    w, u = w.clamp(low, high), u * c
    ratios = w / u
    if group["max_trust_ratio"] is not None:
        ratios = ratios.clamp(max=group["max_trust_ratio"])
    return torch.where((w == 0) | (u == 0), 1.0, ratios)
