"""Which optimizer a row has, over which parameters."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, Optimizer

from paceline.study.tasks import MOMENTUM, WEIGHT_DECAY


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Biases and normalisation do not decay (Goyal et al. 2017, section 5.1)."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    assert name == "sgd"
    return SGD(groups, lr=1.0, momentum=MOMENTUM, foreach=True)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
