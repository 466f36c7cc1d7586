"""What every rank of the demo runs: an ordinary training loop, as a user would write it.

Run by `paceline demo` as `python -m paceline.demo.demo_training JOB.json`, under torchrun's environment variables.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline import DistributedDataParallel
from paceline.demo.progress_pipe import Progress, RankOutcome, Sender
from paceline_lab.workloads.datasets import Images

LEARNING_RATE, MOMENTUM = 0.1, 0.9
_NUM_WARM_UP_STEPS = 5
_MIN_PAUSE_S = 0.1


@dataclass(frozen=True)
class Job:
    """What to train, and where to leave what; every rank reads the same file.

    Attributes:
        images: File written by `Images.save`.
        pipe: Where to report.
        parameters: Where rank 0 writes the final parameters.
        epochs: How often to see the training set.
        global_batch: Samples a step, over all ranks.
        seed: Of the initial parameters and the order of the samples.
        dtype: `float32` or `float64`.
        wrapped: Whether the model is wrapped in DistributedDataParallel.
    """

    images: str
    pipe: str
    parameters: str
    epochs: int
    global_batch: int
    seed: int
    dtype: str
    wrapped: bool

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))


def network(side: int, num_classes: int) -> nn.Module:
    """A small convolutional network.

    It has no batch normalisation: with statistics per rank no two worlds of different size train the same
    network, and the comparison would have nothing to promise.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (side // 4) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


@dataclass
class _Stopwatch:
    """Sums of the steps' parts, in seconds, the warm-up steps left out."""

    num_steps: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    exposed_s: float = 0.0
    optimizer_s: float = 0.0
    total_s: float = 0.0
    _seen: int = field(default=0, repr=False)

    def add(
        self, forward_s: float, backward_s: float, exposed_s: float, optimizer_s: float, total_s: float
    ) -> None:
        self._seen += 1
        if self._seen <= _NUM_WARM_UP_STEPS:
            return
        self.num_steps += 1
        self.forward_s += forward_s
        self.backward_s += backward_s
        self.exposed_s += exposed_s
        self.optimizer_s += optimizer_s
        self.total_s += total_s


def train(job: Job, rank: int, num_ranks: int) -> None:
    """Train on this rank's slice of every global batch, reporting on the way."""
    dtype = getattr(torch, job.dtype)
    images = Images.read(Path(job.images))
    inputs, labels = torch.from_numpy(images.train_images).to(dtype), torch.from_numpy(images.train_labels)
    torch.manual_seed(job.seed)
    bare = network(images.side, images.num_classes).to(dtype)
    model = DistributedDataParallel(bare) if job.wrapped else bare
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    sender, watch = Sender(Path(job.pipe)), _Stopwatch()
    batch, num_steps = job.global_batch // num_ranks, len(labels) // job.global_batch
    order = torch.Generator().manual_seed(job.seed)
    training_s = 0.0
    for epoch in range(1, job.epochs + 1):
        shuffled = torch.randperm(len(labels), generator=order)
        loss_sum, began_s, said_s = 0.0, time.perf_counter(), 0.0
        for step in range(num_steps):
            started_s = time.perf_counter()
            first = step * job.global_batch + rank * batch
            mine = shuffled[first : first + batch]
            x, y = inputs[mine], labels[mine]
            optimizer.zero_grad()
            cut_s = time.perf_counter()
            loss = nn.functional.cross_entropy(model(x), y)
            forward_s = time.perf_counter()
            loss.backward()
            backward_s = time.perf_counter()
            optimizer.step()
            ended_s = time.perf_counter()
            exposed_s = _exposed_s(model)
            watch.add(
                forward_s - cut_s,
                backward_s - forward_s - exposed_s,
                exposed_s,
                ended_s - backward_s,
                ended_s - started_s,
            )
            loss_sum += loss.item()
            now_s = time.perf_counter()
            if step + 1 == num_steps or now_s - said_s > _MIN_PAUSE_S:
                said_s = now_s
                speed = (step + 1) * batch / (now_s - began_s)
                sender.send(Progress(rank, epoch, step + 1, num_steps, loss_sum / (step + 1), speed))
        training_s += time.perf_counter() - began_s
    speed = job.epochs * num_steps * batch / training_s
    accuracy = None
    if rank == 0:
        accuracy = _accuracy(bare, torch.from_numpy(images.test_images).to(dtype), images.test_labels)
        parameters: dict[str, Any] = {name: p.detach().numpy() for name, p in bare.named_parameters()}
        np.savez(job.parameters, **parameters)
    sender.send(_outcome(rank, speed, watch, bare, accuracy))
    sender.close()


def _exposed_s(model: nn.Module) -> float:
    """How long the last backward waited for communication, after autograd was done."""
    if not isinstance(model, DistributedDataParallel):
        return 0.0
    last = model.timings.last
    return 0.0 if last is None else last.exposed_s


def _accuracy(model: nn.Module, inputs: Tensor, labels: NDArray[np.int64]) -> float:
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(dim=1) for part in torch.split(inputs, 250)])
    return float((predicted.numpy() == labels).mean())


def _outcome(
    rank: int, samples_per_s: float, watch: _Stopwatch, model: nn.Module, accuracy: float | None
) -> RankOutcome:
    steps = max(1, watch.num_steps)
    parts_s = watch.forward_s + watch.backward_s + watch.exposed_s + watch.optimizer_s
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return RankOutcome(
        rank,
        samples_per_s,
        watch.forward_s / steps,
        watch.backward_s / steps,
        watch.exposed_s / steps,
        watch.optimizer_s / steps,
        (watch.total_s - parts_s) / steps,
        digest.hexdigest(),
        accuracy,
    )


def main() -> None:
    """Join the group if there is one, train, leave."""
    job = Job.read(Path(sys.argv[1]))
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not job.wrapped:
        train(job, rank, num_ranks)
        return
    dist.init_process_group("gloo")
    try:
        train(job, rank, num_ranks)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
