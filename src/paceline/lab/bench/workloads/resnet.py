"""The shape of ResNet-50 (He et al. 2015, table 1) on small images: 161 tensors of very different sizes, and buffers.

Same parameters as the ImageNet model, 25,557,032 in 161 tensors; the images are small so that two cores
finish a step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.lab.bench.workloads.workload import SizedWorkload, batch_generator

EXPANSION = 4
STAGES = (
    (64, 3, 1),
    (128, 4, 2),
    (256, 6, 2),
    (512, 3, 2),
)  # (bottleneck width, blocks, stride of the first block)


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3, 1x1 expand, around a shortcut."""

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        num_outputs = width * EXPANSION
        self.body = nn.Sequential(
            nn.Conv2d(num_inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, num_outputs, 1, bias=False),
            nn.BatchNorm2d(num_outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_inputs != num_outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False), nn.BatchNorm2d(num_outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, num_inputs, H, W) to (B, 4 * width, H / stride, W / stride)."""
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet50(num_classes: int = 1000) -> nn.Sequential:
    """Return the network with its ImageNet stem and 1000-way head."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    num_channels = 64
    for width, num_blocks, stride in STAGES:
        for block in range(num_blocks):
            layers.append(Bottleneck(num_channels, width, stride if block == 0 else 1))
            num_channels = width * EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_channels, num_classes))


@dataclass(frozen=True)
class ResNet50Workload(SizedWorkload):
    """Random images and labels: the figures are about time, not accuracy."""

    image_size: int = 64
    batch_size: int = 4

    @classmethod
    def quick(cls) -> "ResNet50Workload":
        """Return the smallest images; the network stays whole."""
        return cls(image_size=32, batch_size=2)

    def published(self) -> "ResNet50Workload":
        """Return ImageNet's images, 32 of them."""
        return ResNet50Workload(image_size=224, batch_size=32)

    def make_model(self) -> nn.Module:
        """Return the network."""
        return resnet50()

    def make_batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, S, S) and labels (B,)."""
        generator = batch_generator(rank, step)
        images = torch.randn(self.batch_size, 3, self.image_size, self.image_size, generator=generator)
        return images, torch.randint(1000, (self.batch_size,), generator=generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], carry: None) -> tuple[Tensor, None]:
        """Return the cross-entropy."""
        return functional.cross_entropy(model(batch[0]), batch[1]), None
