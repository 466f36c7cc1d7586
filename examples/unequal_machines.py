"""See unequal ranks work all the time: digits, with ranks that are made slow, first in equal shares, then balanced.

    torchrun --nproc-per-node 2 examples/unequal_machines.py --slowness 1,3

A rank's slowness is how many times longer it takes for a sample: it sleeps for the difference. On machines that really
differ leave it out. Needs scikit-learn, which contains the images.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle

SAMPLE_S = 0.002  # what a sample takes on a rank of slowness 1, if any slowness is asked for


class Slowed(nn.Module):
    """A network that takes `sample_s` longer for each sample."""

    def __init__(self, body: nn.Module, sample_s: float) -> None:
        super().__init__()
        self.body, self.sample_s = body, sample_s

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 64) to (B, 10)."""
        time.sleep(self.sample_s * len(x))
        return self.body(x)


def train(
    data: TensorDataset, batch: GlobalBatch, sample_s: float, balance: str | None, epochs: int
) -> float:
    """Train; the median step in seconds, of the second half."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    shuffle = GlobalShuffle(data, batch)
    loader = DataLoader(data, batch_sampler=shuffle)
    model = DistributedDataParallel(Slowed(network, sample_s), batch_sampler=shuffle, balance=balance)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ended, loss = [time.perf_counter()], torch.zeros(())
    for _ in range(epochs):
        for batches in shuffle.steps(loader):
            with model.accumulate(batches) as micro_batches:
                for x, y in micro_batches:
                    loss = nn.functional.cross_entropy(model(x), y)
                    loss.backward()
            if micro_batches.repeats:
                continue
            optimizer.step()
            optimizer.zero_grad()
            ended.append(time.perf_counter())
    step_s = statistics.median(b - a for a, b in itertools.pairwise(ended) if a >= ended[len(ended) // 2])
    if dist.get_rank() == 0:
        shares = " + ".join(map(str, shuffle.batch.samples))
        print(
            f"{'balanced' if balance else 'equal':9} {shares:12} {1e3 * step_s:6.1f} ms a step, loss {loss:.3f}"
        )
    return step_s


def main() -> None:
    """Train twice; rank 0 prints what a step took, and the gain."""
    options = argparse.ArgumentParser(description="Equal shares against balanced ones.")
    options.add_argument("--slowness", help="Time per sample of each rank, such as 1,3; default: as it is.")
    options.add_argument(
        "--batch", type=int, default=32, help="Samples of a step for each rank, in the mean."
    )
    options.add_argument("--epochs", type=int, default=2)
    chosen = options.parse_args()

    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    slowness = [float(each) for each in chosen.slowness.split(",")] if chosen.slowness else [0.0] * num_ranks
    if len(slowness) != num_ranks:
        options.error(f"--slowness {chosen.slowness} is for {len(slowness)} ranks, and there are {num_ranks}")
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    equal = GlobalBatch((chosen.batch,) * num_ranks)
    before_s, after_s = (
        train(data, equal, SAMPLE_S * slowness[rank], balance, chosen.epochs) for balance in (None, "auto")
    )
    if rank == 0:
        print(f"the same global batches in {100 * after_s / before_s:.0f} % of the time")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
