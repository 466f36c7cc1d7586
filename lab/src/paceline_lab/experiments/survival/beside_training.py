"""One training, written for each of the three that `beside` compares: Paceline, torchrun's restart, and torchft.

Data, model, optimizer and number of steps are the same. What differs is what each asks for: how samples are shared out,
who wraps the model, and what is saved. A rank kills itself in a forward pass where it is told to, once per place.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data import GlobalBatch, GlobalShuffle
from paceline_lab.experiments.survival.training import Notes

KINDS = ("paceline", "guest", "torchrun", "torchft")
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
SAVE_EVERY = 10  # steps, of the side that restarts
_SEED = 5


def parser_of() -> argparse.ArgumentParser:
    """Return the parser of the script's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="an epoch")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--kill", action="append", default=[], help="STEP:RANK")
    return parser


class Data(torch.utils.data.Dataset[Any]):
    """Numbers by a seed; a sample's own index comes with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        source = torch.Generator().manual_seed(3)
        self.x = torch.randn(args.steps * args.batch, args.width, generator=source)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.x[index]


class Script:
    """The common part of all three trainings."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(7)
        self.args, self.data, self.notes = args, Data(args), Notes(args.folder)
        width = args.width
        layers = [each for _ in range(6) for each in (nn.Linear(width, width), nn.Tanh())]
        self.net = nn.Sequential(*layers)
        self.per_rank = args.batch // args.ranks
        self.num_steps = args.epochs * args.steps

    def adam(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def backward(self, model: Callable[[Any], Any], x: torch.Tensor, step: int, rank: int) -> None:
        """Forward and backward of a micro-batch; the rank may die in between."""
        out = model(x)
        if f"{step}:{rank}" in self.args.kill:
            try:
                (self.args.folder / f"killed-{step}").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                self.notes.write(what="fault", step=step, moment="forward", how="SIGKILL")
                os.kill(os.getpid(), 9)
        nn.functional.mse_loss(out, x).backward()

    def wait_for_all(self, rank: int) -> None:
        """Wait until all ranks have been here once."""
        (self.args.folder / f"here-{rank}").touch()
        while len(list(self.args.folder.glob("here-*"))) < self.args.ranks:
            time.sleep(0.05)

    def tries(self, step: int, under: int, epoch: int, indices: torch.Tensor | list[int]) -> None:
        self.notes.write(what="try", step=step, under=under, of=epoch, samples=[int(i) for i in indices])

    def done(self, step: int, under: int) -> None:
        self.notes.write(what="done", step=step, under=under)


def with_paceline(script: Script) -> None:
    """Under `paceline run --min-ranks`, or as a guest of one torchrun for each rank."""
    dist.init_process_group("gloo")
    shuffle = GlobalShuffle(
        script.data, GlobalBatch.of(script.args.batch, ranks=script.args.ranks), seed=_SEED
    )
    model = paceline.DistributedDataParallel(script.net, batch_sampler=shuffle)
    optimizer = script.adam()
    elastic = paceline.Elastic(model=model, optimizer=optimizer, sampler=shuffle)
    loader = DataLoader(script.data, batch_sampler=shuffle)
    for epoch in range(shuffle.epoch, script.args.epochs):
        for batches in elastic.steps(loader):
            step, under = elastic.step, model.membership.epoch
            script.tries(step, under, epoch, [int(i) for batch in batches for i in batch[0]])
            with model.accumulate(batches) as micro_batches:
                for _, x in micro_batches:
                    script.backward(model, x, step, dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()
            if not micro_batches.repeats:
                script.done(step, under)


def with_torchrun(script: Script) -> None:
    """Under `torchrun --max-restarts`: torch's wrapper, and a checkpoint of rank 0 every few steps."""
    dist.init_process_group("gloo")
    rank, under = dist.get_rank(), int(os.environ[RESTARTS])
    sampler: Any = torch.utils.data.DistributedSampler(script.data, seed=_SEED)
    model, optimizer = nn.parallel.DistributedDataParallel(script.net), script.adam()
    path, step = script.args.folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        script.net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < script.num_steps:
        epoch, begin = divmod(step, script.args.steps)
        sampler.set_epoch(epoch)
        own = list(sampler)[begin * script.per_rank :]
        loader = DataLoader(torch.utils.data.Subset(script.data, own), batch_size=script.per_rank)
        for indices, x in loader:
            script.tries(step, under, epoch, indices)
            script.backward(model, x, step, rank)
            optimizer.step()
            optimizer.zero_grad()
            script.done(step, under)
            step += 1
            if step % SAVE_EVERY == 0 and rank == 0:
                state = {"model": script.net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)


def with_torchft(script: Script) -> None:
    """Each rank a replica group of its own, under a `torchrun` of its own, as torchft's examples have it."""
    import torchft

    replica = int(os.environ["REPLICA_GROUP_ID"])
    sampler: Any = torchft.DistributedSampler(
        script.data, replica, script.args.ranks, group_rank=0, num_replicas=1, seed=_SEED
    )
    loader = DataLoader(script.data, batch_size=script.per_rank, sampler=sampler)
    inner = script.adam()

    def load(state: Any) -> None:
        script.net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": script.net.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{replica}",
    )
    model, optimizer = torchft.DistributedDataParallel(manager, script.net), torchft.Optimizer(manager, inner)
    script.wait_for_all(replica)  # or those that start sooner train alone
    epoch = 0
    while manager.current_step() < script.num_steps:
        sampler.set_epoch(epoch)
        for indices, x in loader:
            optimizer.zero_grad()
            step = manager.current_step()
            script.backward(model, x, step, replica)
            optimizer.step()
            now = manager.current_step()
            if now > step and manager.is_participating():
                script.tries(now - 1, 0, epoch, indices)
            if now > step:
                script.done(now - 1, 0)
            if now >= script.num_steps:
                break
        epoch += 1
    script.notes.write(what="end")
    time.sleep(1.0)  # or the others miss the last step's quorum
    manager.shutdown(wait=False)


def main() -> None:
    args = parser_of().parse_args()
    {"paceline": with_paceline, "guest": with_paceline, "torchrun": with_torchrun, "torchft": with_torchft}[
        args.kind
    ](Script(args))


if __name__ == "__main__":
    main()
