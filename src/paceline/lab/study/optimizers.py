"""Which optimizer a row has, over which parameters."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, Optimizer

from paceline.lab.study.tasks import MOMENTUM, WEIGHT_DECAY
from paceline.optim import LAMB, LARS, parameter_groups

TRUST_COEFFICIENT = 0.02  # so large that LARS's rates suit biases, which it steps as SGD does


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Make one for a model: sgd, lars or lamb. Its rate is set before each step.

    Biases and normalisation do not decay, and have no rate of their own layer.
    """
    groups = parameter_groups(model, WEIGHT_DECAY)
    if name == "sgd":
        return SGD(groups, lr=1.0, momentum=MOMENTUM, foreach=True)
    for group in groups:
        group["layerwise"] = group["weight_decay"] > 0
    if name == "lars":
        return LARS(groups, lr=1.0, momentum=MOMENTUM, trust_coefficient=TRUST_COEFFICIENT)
    return LAMB(groups, lr=1.0)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every group this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
