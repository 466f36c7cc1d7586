"""What the product's recipe does to the laboratory's convolutional networks."""

import torch
from torch import nn

from harness.models import generator
from paceline_lab.workloads.convolutional import Bottleneck
from paceline_recipes import zero_init_residual


def test_blocks_of_resnet_50():
    """Three convolutions under other names, with and without a projection."""
    model = nn.Sequential(Bottleneck(16, 4, 1), nn.Sequential(Bottleneck(16, 8, 2), Bottleneck(32, 8, 1)))
    names = zero_init_residual(model, "*.body.7.weight")
    assert names == ["0.body.7.weight", "1.0.body.7.weight", "1.1.body.7.weight"]
    x = torch.randn(2, 16, 4, 4, generator=generator(1))
    assert torch.equal(model[0](x), torch.relu(x))
