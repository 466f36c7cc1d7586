"""Train a small network on handwritten digits: an ordinary torchrun script, one import changed.

    torchrun --nproc-per-node 2 examples/train_digits.py --epochs 5
    paceline run --nproc-per-node 2 examples/train_digits.py --epochs 5

`paceline run` takes torchrun's flags. The script needs scikit-learn, which contains the images.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline import DistributedDataParallel


def digits(device: torch.device) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Return the training set, the test images and their labels: 1,797 images of 8 x 8 pixels, one in five to test."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32, device=device) / 16
    y = torch.tensor(labels, device=device)
    test = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~test], y[~test]), x[test], y[test]


def main() -> None:
    """Train. Rank 0 prints loss and test accuracy of each epoch."""
    options = argparse.ArgumentParser(description="Train on handwritten digits.")
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--batch", type=int, default=32, help="Samples of one rank in one step.")
    chosen = options.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    train_set, test_x, test_y = digits(device)
    sampler = DistributedSampler(train_set, num_ranks, rank)
    loader = DataLoader(train_set, batch_size=chosen.batch, sampler=sampler)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(1, chosen.epochs + 1):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                accuracy = (network(test_x).argmax(1) == test_y).float().mean().item()
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {100 * accuracy:.1f} % on {num_ranks} rank(s)"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
