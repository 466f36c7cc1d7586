"""The script that every rank of `paceline demo survive` runs: a training loop with `paceline.Elastic`.

It reports by a named pipe, a line of JSON each. A rank reports the samples of a step before it trains them, so a death
at any moment leaves no step unreported.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import DistributedDataParallel, Elastic
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.demo.images import load_digits
from paceline.demo.training import network


@dataclass(frozen=True)
class SurvivalJob:
    """One training of the demo; every rank reads the same file."""

    pipe: str  # path of the named pipe for reports
    num_ranks: int = 4  # at the beginning
    epochs: int = 12
    num_samples: int = 1_408  # of an epoch
    global_batch: int = 64  # samples of a step
    step_s: float = 0.0  # a step takes at least so many seconds
    short_step_s: float = 0.0  # the same while a rank is missing: its replacement arrives before the end


def train(job: SurvivalJob, say: Callable[..., object]) -> None:
    """Train to the end, also with fewer ranks than at the beginning."""
    images = load_digits()
    data = TensorDataset(
        torch.from_numpy(images.train_images[: job.num_samples]),
        torch.from_numpy(images.train_labels[: job.num_samples]),
        torch.arange(job.num_samples),
    )
    torch.manual_seed(0)
    shuffle = GlobalShuffle(data, GlobalBatch.of(job.global_batch, dist.get_world_size()))
    loader = DataLoader(data, batch_sampler=shuffle)
    net = network(images.side, images.num_classes)
    model = DistributedDataParallel(net, batch_sampler=shuffle)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    elastic = Elastic(model=model, optimizer=optimizer, sampler=shuffle, deterministic=True)
    for _ in range(shuffle.epoch, job.epochs):
        for batches in elastic.steps(loader):
            started_s, loss_sum = time.perf_counter(), 0.0
            taken = [int(index) for _, _, indices in batches for index in indices]
            where = {"step": elastic.step, "epoch": model.membership.epoch, "rank": dist.get_rank()}
            say(**where, pid=os.getpid(), samples=taken)
            with model.accumulate(batches) as micro_batches:
                for x, labels, _ in micro_batches:
                    loss = nn.functional.cross_entropy(model(x), labels)
                    loss.backward()
                    loss_sum += loss.item() * len(labels)
            optimizer.step()
            optimizer.zero_grad()
            say(pid=os.getpid(), loss=loss_sum / len(taken))
            pause_s = job.step_s if dist.get_world_size() == job.num_ranks else job.short_step_s
            time.sleep(max(0.0, started_s + pause_s - time.perf_counter()))
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    changes = [asdict(change) for change in model.membership.history]
    say(pid=os.getpid(), steps=elastic.step, digest=hashlib.sha256(content).hexdigest(), changes=changes)


def main() -> None:
    """Join the group, train, leave."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher says that it was stopped
    job = SurvivalJob(**json.loads(Path(sys.argv[1]).read_text()))
    dist.init_process_group("gloo")
    with Path(job.pipe).open("w", buffering=1) as pipe:  # a line is one write
        train(job, lambda **words: pipe.write(json.dumps(words) + "\n"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
