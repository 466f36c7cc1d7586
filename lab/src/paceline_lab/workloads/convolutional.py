"""Convolutional networks: ResNet-50, many tensors of very different sizes; VGG-16, most bytes in one layer.

Both have the parameters of the ImageNet models (25,557,032 in 161 tensors; 138,357,544 in 32). The images are small
so that two cores finish a step.

Source: He et al. 2015, table 1; Simonyan & Zisserman 2015, configuration D, here without dropout (all sides must
compute the same).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline_lab.workloads.workload import SizedWorkload, batch_generator

EXPANSION = 4
# Bottleneck width, blocks, stride of the first block.
RESNET_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
# Channels, convolutions before a pooling.
VGG_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


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
    for width, num_blocks, stride in RESNET_STAGES:
        for block in range(num_blocks):
            layers.append(Bottleneck(num_channels, width, stride if block == 0 else 1))
            num_channels = width * EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_channels, num_classes))


@dataclass(frozen=True)
class RandomImages(SizedWorkload):
    """Random images and labels: the figures are about time, not accuracy."""

    image_size: int = 64
    batch_size: int = 4

    def published(self) -> RandomImages:
        """Return ImageNet's images, 32 of them."""
        return type(self)(image_size=224, batch_size=32)

    def make_batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, S, S) and labels (B,)."""
        generator = batch_generator(rank, step)
        images = torch.randn(self.batch_size, 3, self.image_size, self.image_size, generator=generator)
        return images, torch.randint(1000, (self.batch_size,), generator=generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], carry: None) -> tuple[Tensor, None]:
        """Return the cross-entropy."""
        return functional.cross_entropy(model(batch[0]), batch[1]), None


@dataclass(frozen=True)
class ResNet50Workload(RandomImages):
    """ResNet-50 on random images."""

    @classmethod
    def quick(cls) -> ResNet50Workload:
        """Return the smallest images; the network stays whole."""
        return cls(image_size=32, batch_size=2)

    def make_model(self) -> nn.Module:
        """Return the network."""
        return resnet50()


def vgg16(num_classes: int = 1000, width: int = 4096) -> nn.Sequential:
    """Return the network; any image of 32 pixels or more is pooled to the 7 x 7 that the head expects."""
    layers: list[nn.Module] = []
    num_channels = 3
    for channels, num_convolutions in VGG_STAGES:
        for _ in range(num_convolutions):
            layers += [nn.Conv2d(num_channels, channels, 3, padding=1), nn.ReLU(inplace=True)]
            num_channels = channels
        layers.append(nn.MaxPool2d(2))
    layers += [
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(num_channels * 49, width),
        nn.ReLU(inplace=True),
    ]
    layers += [nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, num_classes)]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Vgg16Workload(RandomImages):
    """VGG-16 on random images."""

    batch_size: int = 2
    head_width: int = 4096

    @classmethod
    def quick(cls) -> Vgg16Workload:
        """Return the smallest images and a narrow head."""
        return cls(image_size=32, batch_size=1, head_width=16)

    def make_model(self) -> nn.Module:
        """Return the network."""
        return vgg16(width=self.head_width)
