"""Train on ranks of different speed, with equal shares and with shares by speed, which give the same model sooner.

    paceline run --nproc-per-node 3 examples/unequal_machines.py

To show it on one machine, ranks sleep for each sample, the last one `--slowness` times as long as the others. On
machines that really differ, leave out `slowed`. The script needs scikit-learn, which contains the images.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle

SAMPLE_S = 0.001  # the time that a fast rank takes for a sample


def digits() -> TensorDataset:
    """Return 1,797 images of 8 x 8 pixels."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


def slowed(num_samples: int, slowness: float) -> None:
    """Sleep as long as a slow machine computes."""
    time.sleep(num_samples * SAMPLE_S * slowness)


def train(balance: str | None, epochs: int, slowness: float) -> tuple[float, nn.Module, list[int]]:
    """Return the median step of the last epoch in ms, the model, and each rank's samples per step."""
    torch.manual_seed(0)
    data = digits()
    shuffle = GlobalShuffle(data, GlobalBatch((32,) * dist.get_world_size()))
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(network, batch_sampler=shuffle, balance=balance)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_sampler=shuffle)
    for epoch in range(epochs):
        shuffle.set_epoch(epoch)
        steps_ms, began_s = [], time.perf_counter()
        for batches in shuffle.steps(loader):
            with model.accumulate(batches) as micro_batches:
                for x, y in micro_batches:
                    slowed(len(x), slowness)
                    nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps_ms.append(1000 * (time.perf_counter() - began_s))
            began_s = time.perf_counter()
    return statistics.median(steps_ms), network, list(shuffle.batch.samples)


def main() -> None:
    """Train twice and compare. Rank 0 prints."""
    options = argparse.ArgumentParser(description="Train on ranks of different speed.")
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument(
        "--slowness", type=float, default=4.0, help="Of the last rank; 1 is as fast as the others."
    )
    chosen = options.parse_args()

    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    slowness = chosen.slowness if rank == num_ranks - 1 else 1.0
    equal_ms, equal, _ = train(None, chosen.epochs, slowness)
    auto_ms, balanced, samples = train("auto", chosen.epochs, slowness)
    if rank == 0:
        ideal_ms = 1000 * SAMPLE_S * 32 * num_ranks / (num_ranks - 1 + 1 / chosen.slowness)
        pairs = zip(equal.state_dict().values(), balanced.state_dict().values(), strict=True)
        difference = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        print(f"equal shares: {equal_ms:.0f} ms a step, {num_ranks} x 32 samples")
        print(
            f"balanced: {auto_ms:.0f} ms a step, {' + '.join(map(str, samples))} samples (ideal {ideal_ms:.0f} ms)"
        )
        print(f"{equal_ms / auto_ms:.1f} times faster; weights differ by {difference:.0e} of the largest")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
