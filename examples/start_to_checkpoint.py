"""A training from start to checkpoint: data, model, mixed precision, clipping, a schedule, resume, evaluation.

    paceline run --nproc-per-node 2 examples/start_to_checkpoint.py --stop-after 50
    paceline run --nproc-per-node 3 examples/start_to_checkpoint.py

The second command continues from the checkpoint of the first one, on another number of ranks. `torchrun` starts the
script, too. It needs scikit-learn, which contains the images.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle

CHECKPOINT = Path("checkpoint.pt")
GLOBAL_BATCH = 64  # samples per step of all ranks together
NUM_EPOCHS = 5
SAVE_EVERY = 20  # steps


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 images of 8 x 8 pixels to train on, and 360 to evaluate on."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    test = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])


def save(parts: dict[str, Any]) -> None:
    """Write all states. The file is replaced only when the new one is complete."""
    unfinished = CHECKPOINT.with_suffix(".new")
    torch.save({name: part.state_dict() for name, part in parts.items()}, unfinished)
    unfinished.replace(CHECKPOINT)


def resume(parts: dict[str, Any], device: torch.device) -> None:
    """Load the states that `save` wrote, on any number of ranks."""
    saved = torch.load(CHECKPOINT, map_location=device)
    for name, part in parts.items():
        part.load_state_dict(saved[name])


def evaluate(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """Return the accuracy. Each rank takes a part of the images, and the counts are added."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x, y = (tensor[rank::num_ranks].to(device) for tensor in test.tensors)
    model.eval()
    with torch.no_grad():
        counts = torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)], device=device)
    model.train()
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def train_step(model: Any, batches: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Train one step in bfloat16 with clipped gradients. Return the loss of this rank's samples."""
    with model.accumulate(batches) as micro_batches:
        for x, y in micro_batches:
            with torch.autocast(device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # reduced gradients have one norm on all ranks
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    """Train from the start or from a checkpoint. Rank 0 prints."""
    options = argparse.ArgumentParser(description="Train on handwritten digits, from start to checkpoint.")
    options.add_argument("--stop-after", type=int, help="Steps until this run ends, as if it was stopped.")
    stop_after = options.parse_args().stop_after

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same network on all ranks, before rank 0's is sent to the others anyway
    data, test = make_data()
    shuffle = GlobalShuffle(data, GlobalBatch.of(GLOBAL_BATCH, num_ranks))
    loader = DataLoader(data, batch_sampler=shuffle)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(network, batch_sampler=shuffle)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps_per_epoch = -(-len(data) // GLOBAL_BATCH)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, NUM_EPOCHS * steps_per_epoch)

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "shuffle": shuffle}
    if CHECKPOINT.exists():
        resume(parts, device)
    if rank == 0:
        print(f"{num_ranks} rank(s) begin after step {scheduler.last_epoch}")

    trained = 0
    for epoch in range(shuffle.epoch, NUM_EPOCHS):
        for batches in shuffle.steps(loader):
            loss = train_step(model, batches, optimizer, device)
            scheduler.step()
            trained += 1
            if rank == 0 and scheduler.last_epoch % SAVE_EVERY == 0:
                save(parts)
            if trained == stop_after:
                dist.destroy_process_group()
                return
        accuracy = evaluate(network, test, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {100 * accuracy:.1f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
