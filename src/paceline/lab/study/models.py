"""The models that the study trains: small enough for hundreds of runs on one core."""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional

from paceline.recipes import zero_init_residual


def mlp(*sizes: int) -> nn.Sequential:
    """Fully connected layers of `sizes` units with ReLU between them; takes images too, shape (N, ...)."""
    layers: list[nn.Module] = [nn.Flatten()]
    for num_in, num_out in itertools.pairwise(sizes):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with normalisation beside a shortcut.

    Source: He et al. 2016.
    """

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(num_out)
        is_same = num_in == num_out and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, num_out, side / stride, side / stride)."""
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.last_norm(self.second(inner)) + self.shortcut(x))


def residual_cnn(num_classes: int, width: int = 8) -> nn.Sequential:
    """Two residual blocks for grey images, shape (N, 1, side, side), with batch normalisation throughout.

    Each block starts as its shortcut (Goyal et al. 2017, section 5.1).
    """
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        ResidualBlock(width, width, stride=1),
        ResidualBlock(width, 2 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, num_classes),
    )
    zero_init_residual(model)
    return model


def byte_model(context: int, embedding_size: int = 16, hidden_size: int = 128) -> nn.Sequential:
    """Predict a byte from the `context` before it, shape (N, context), int64.

    Source: Bengio et al. 2003, on bytes instead of words.
    """
    return nn.Sequential(
        nn.Embedding(256, embedding_size),
        nn.Flatten(),
        nn.Linear(context * embedding_size, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, 256),
    )
