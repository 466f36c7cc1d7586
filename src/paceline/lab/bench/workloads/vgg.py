"""The shape of VGG-16 (Simonyan & Zisserman 2015, configuration D): three quarters of the bytes in one layer.

Differences from the paper: no dropout (all sides must compute the same). 138,357,544 parameters in 32 tensors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.lab.bench.workloads.workload import SizedWorkload, batch_generator

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # (channels, convolutions before a pooling)


def vgg16(num_classes: int = 1000, width: int = 4096) -> nn.Sequential:
    """Return the network; any image of 32 pixels or more is pooled to the 7 x 7 that the head expects."""
    layers: list[nn.Module] = []
    num_channels = 3
    for channels, num_convolutions in STAGES:
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
class Vgg16Workload(SizedWorkload):
    """Random images and labels: the figures are about time, not accuracy."""

    image_size: int = 64
    batch_size: int = 2
    head_width: int = 4096

    @classmethod
    def quick(cls) -> "Vgg16Workload":
        """Return the smallest images and a narrow head."""
        return cls(image_size=32, batch_size=1, head_width=16)

    def published(self) -> "Vgg16Workload":
        """Return ImageNet's images, 32 of them."""
        return Vgg16Workload(image_size=224, batch_size=32)

    def make_model(self) -> nn.Module:
        """Return the network."""
        return vgg16(width=self.head_width)

    def make_batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, S, S) and labels (B,)."""
        generator = batch_generator(rank, step)
        images = torch.randn(self.batch_size, 3, self.image_size, self.image_size, generator=generator)
        return images, torch.randint(1000, (self.batch_size,), generator=generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], carry: None) -> tuple[Tensor, None]:
        """Return the cross-entropy."""
        return functional.cross_entropy(model(batch[0]), batch[1]), None
