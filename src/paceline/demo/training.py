"""The script that every rank of the demo runs: an ordinary training loop, as a user would write it.

`paceline demo` starts it as `python -m paceline.demo.training JOB.json` under torchrun's environment variables. It
reports by a named pipe, a line of JSON each: shorter than PIPE_BUF, so the kernel keeps lines of several ranks apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from paceline import DistributedDataParallel
from paceline.demo.images import Images, load_digits

STEP_PARTS = ("forward", "backward", "exposed communication", "optimizer", "other")
_NUM_WARM_UP_STEPS = 5
_MIN_PAUSE_S = 0.1


@dataclass(frozen=True)
class Job:
    """One training; every rank reads the same file. Reports go to `pipe`, rank 0's parameters to `parameters`."""

    epochs: int
    global_batch: int
    seed: int
    dtype: str
    wrapped: bool
    pipe: str
    parameters: str


def network(side: int, num_classes: int) -> nn.Module:
    """Return a small convolutional network without batch normalisation, whose statistics would differ between ranks."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * (side // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, num_classes)),
    )


def train(job: Job, rank: int, num_ranks: int, say: Callable[..., object]) -> None:
    """Train on this rank's slice of every global batch, reporting on the way."""
    dtype, images = getattr(torch, job.dtype), load_digits()
    inputs, labels = torch.from_numpy(images.train_images).to(dtype), torch.from_numpy(images.train_labels)
    torch.manual_seed(job.seed)
    bare = network(images.side, images.num_classes).to(dtype)
    model = DistributedDataParallel(bare) if job.wrapped else bare
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch, num_steps = job.global_batch // num_ranks, len(labels) // job.global_batch
    order = torch.Generator().manual_seed(job.seed)
    steps_s: list[tuple[float, ...]] = []  # a step's seconds, in the order of STEP_PARTS
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
            now_s = time.perf_counter()
            last = model.timings.last if isinstance(model, DistributedDataParallel) else None
            exposed_s = last.exposed_s if last else 0.0  # waiting for communication after autograd was done
            in_backward_s = backward_s - forward_s - exposed_s
            steps_s.append(
                (forward_s - cut_s, in_backward_s, exposed_s, now_s - backward_s, cut_s - started_s)
            )
            loss_sum += loss.item()
            if step + 1 == num_steps or now_s - said_s > _MIN_PAUSE_S:
                said_s, speed = now_s, (step + 1) * batch / (time.perf_counter() - began_s)
                done = epoch - 1 + (step + 1) / num_steps
                say(rank=rank, epoch=epoch, done=done, loss=loss_sum / (step + 1), samples_per_s=speed)
        training_s += time.perf_counter() - began_s
    parameters = {name: parameter.detach().numpy() for name, parameter in bare.named_parameters()}
    accuracy = _accuracy(bare, images, dtype) if rank == 0 else None
    if rank == 0:
        np.savez(job.parameters, **parameters)  # type: ignore[arg-type]  # of numpy 2.4's stubs
    speed = job.epochs * num_steps * batch / training_s
    means_s = np.mean(steps_s[_NUM_WARM_UP_STEPS:] or steps_s, axis=0)
    step_s = dict(zip(STEP_PARTS, means_s.tolist(), strict=True))
    digest = hashlib.sha256(b"".join(each.tobytes() for each in parameters.values())).hexdigest()
    say(rank=rank, samples_per_s=speed, step_s=step_s, fingerprint=digest, accuracy=accuracy)


def _accuracy(model: nn.Module, images: Images, dtype: torch.dtype) -> float:
    with torch.no_grad():
        parts = torch.split(torch.from_numpy(images.test_images).to(dtype), 250)
        predicted = torch.cat([model(part).argmax(dim=1) for part in parts])
    return float((predicted.numpy() == images.test_labels).mean())


def main() -> None:
    """Join the group if there is one, train, leave."""
    # the launcher says that it was stopped; a rank adds no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if job.wrapped:
        dist.init_process_group("gloo")
    try:
        with Path(job.pipe).open("w", buffering=1) as pipe:  # a line is one write
            train(job, rank, num_ranks, lambda **words: pipe.write(json.dumps(words) + "\n"))
    finally:
        if job.wrapped:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
