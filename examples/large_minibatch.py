"""Train a residual network on handwritten digits with a batch eight times the reference's, by Goyal et al.'s recipe.

    torchrun --nproc-per-node 2 examples/large_minibatch.py
    torchrun --nproc-per-node 2 examples/large_minibatch.py --scaling none

The second command keeps the rate of the small batch, for comparison. The script needs scikit-learn, which contains the
images.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel, windows
from paceline.data import GlobalShuffle
from paceline_recipes import (
    Curve,
    GradientNoiseScale,
    LargeMinibatch,
    convert_ghost_batchnorm,
    init_output_layer,
    parameter_groups,
    zero_init_residual,
)

REFERENCE_BATCH = 32  # samples of one step
REFERENCE_RATE = 0.02  # the learning rate that suits that batch
GHOST_BATCH = 16  # samples that batch normalization takes its statistics over, for any share of a rank


class Block(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, width, H, W) to the same shape."""
        return nn.functional.relu(x + self.body(x))


def make_network() -> nn.Module:
    """Return a small residual network, initialized and normalized as the recipe asks for."""
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        Block(16),
        nn.MaxPool2d(2),
        Block(16),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )
    zero_init_residual(network, "*.body.4.weight")
    init_output_layer(network)
    return convert_ghost_batchnorm(network, GHOST_BATCH)


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return 1,408 images of 8 x 8 pixels with their labels to train on; the other 389 images; their labels."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    return TensorDataset(x[:1408], y[:1408]), x[1408:], y[1408:]


def main() -> None:
    """Train. Rank 0 prints the derived settings, and the rate and test accuracy of each epoch."""
    options = argparse.ArgumentParser(description="Train by the large-minibatch recipe.")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--batch", type=int, default=64, help="Samples of one rank in one micro-step.")
    options.add_argument("--accumulation", type=int, default=2, help="Micro-steps (backwards) of one step.")
    options.add_argument("--scaling", choices=["linear", "sqrt", "none"], default="linear")
    chosen = options.parse_args()

    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    torch.manual_seed(0)
    train_set, test_x, test_y = digits()
    network = make_network()
    model = DistributedDataParallel(network, reduction=GradientNoiseScale())
    optimizer = torch.optim.SGD(
        parameter_groups(model, weight_decay=1e-4), lr=REFERENCE_RATE, momentum=0.9, nesterov=True
    )
    recipe = LargeMinibatch(
        optimizer,
        REFERENCE_BATCH,
        batch=chosen.batch,
        accumulation=chosen.accumulation,
        curve=Curve(total=chosen.epochs, warmup=chosen.epochs / 4, decay="cosine"),
        epoch_samples=len(train_set),
        scaling=chosen.scaling,
        noise=model.reduction,
    )
    if is_first:
        print(recipe)
    shuffle = GlobalShuffle(train_set, recipe.batch)
    loader = DataLoader(train_set, batch_sampler=shuffle)

    for epoch in range(1, chosen.epochs + 1):
        for batches in windows(loader, chosen.accumulation):
            with model.accumulate(batches, weight=lambda batch: len(batch[0])) as micro_batches:
                for x, y in micro_batches:
                    nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            recipe.step(samples=round(micro_batches.total_weight))
        if is_first:
            network.eval()
            with torch.no_grad():
                accuracy = (network(test_x).argmax(1) == test_y).float().mean().item()
            network.train()
            print(f"epoch {epoch}: rate {recipe.get_last_lr()[0]:.4f}, test accuracy {100 * accuracy:.1f} %")
    if is_first:
        print(f"gradient noise: {recipe.as_dict()['noise']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
