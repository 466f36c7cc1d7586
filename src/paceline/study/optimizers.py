"""Which optimizer a row has, over which parameters."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, Optimizer

from paceline.optim import parameter_groups
from paceline.study.tasks import MOMENTUM, WEIGHT_DECAY


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Make one for a model; its rate is set before each step."""
    groups = parameter_groups(model, WEIGHT_DECAY)
    assert name == "sgd"
    return SGD(groups, lr=1.0, momentum=MOMENTUM, foreach=True)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every group this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
