"""A script under `paceline run --min-ranks`: a small training that writes down what each rank trained, and its faults.

It is what a user would write, but for three things: it notes every try of a step, it fails where it is told to, and it
leaves its final parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data import GlobalBatch, GlobalShuffle

MOMENTS = (
    "constructing",
    "loading",
    "entering",
    "forward",
    "backward",
    "within backward",
    "leaving",
    "optimizer",
    "between steps",
    "end of epoch",
    "recovery",
    "following",
)
WAYS = ("SIGKILL", "SIGSTOP", "exit", "error")


@dataclass(frozen=True)
class Fault:
    """What happens to a rank, once in a job.

    Attributes:
        rank: Which, by its number when it happens.
        step: In which step, counted from 0.
        moment: Where in it, one of `MOMENTS`.
        how: One of `WAYS`.
    """

    rank: int
    step: int
    moment: str
    how: str = "SIGKILL"

    @classmethod
    def parse(cls, text: str) -> Fault:
        rank, step, moment, how = text.split(":")
        return cls(int(rank), int(step), moment, how)

    def __str__(self) -> str:
        return f"{self.rank}:{self.step}:{self.moment}:{self.how}"


class Faults:
    """Lets this rank fail. Each fault happens once: the first that comes to it takes it."""

    def __init__(self, faults: list[Fault], folder: Path, notes: Notes) -> None:
        self._faults, self._folder, self._notes = faults, folder, notes
        self.step = 0

    def at(self, moment: str) -> None:
        for number, fault in enumerate(self._faults):
            is_here = (fault.moment, fault.step) == (moment, self.step) and fault.rank == dist.get_rank()
            if is_here and self._takes(number):
                self._notes.write(what="fault", step=self.step, moment=moment)
                _fail(fault.how)

    def _takes(self, number: int) -> bool:
        try:
            (self._folder / f"fault-{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _fail(how: str) -> None:
    if how == "exit":
        os._exit(1)
    if how == "error":
        raise ValueError("a fault that was asked for")
    os.kill(os.getpid(), getattr(signal, how))
    if how == "SIGKILL":
        time.sleep(60)


class Notes:
    """One line of JSON for all that happens, at once on the disk, in a file of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"rank-{os.getpid()}.jsonl").open("a")

    def write(self, **what: object) -> None:
        self._file.write(json.dumps({"at": time.monotonic(), **what}) + "\n")
        self._file.flush()


def parser_of() -> argparse.ArgumentParser:
    """Of its command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--compression", default="none")
    parser.add_argument("--wrapped", default="{}", help="further options of the wrapper, as JSON")
    parser.add_argument("--sync-batch-norm", action="store_true")
    parser.add_argument("--pause-ms", type=float, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--normalize", action="store_true", help="batch normalisation")
    parser.add_argument("--fault", action="append", type=Fault.parse, default=[])
    return parser


class Data(torch.utils.data.Dataset[Any]):
    """Numbers by a seed; a sample's own index comes with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        source = torch.Generator().manual_seed(3)
        self.x = torch.randn(args.samples, 16, generator=source, dtype=torch.float64).to(
            getattr(torch, args.dtype)
        )
        self.y = torch.randint(0, 4, (args.samples,), generator=source)
        self.at: Callable[[str], None] = lambda _: None

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[int, Any, Any]:
        self.at("loading")
        return index, self.x[index], self.y[index]


def make_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(7)
    width = args.width
    layers: list[nn.Module] = [nn.Linear(16, width), nn.Tanh()]
    if args.normalize:
        layers.append(nn.BatchNorm1d(width))
    layers += [nn.Linear(width, width), nn.Tanh(), nn.Dropout(args.dropout), nn.Linear(width, 4)]
    return nn.Sequential(*layers).to(getattr(torch, args.dtype))


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def digest(model: nn.Module) -> str:
    """Of all parameters' bits."""
    found = hashlib.sha256()
    for each in (*model.parameters(), *model.buffers()):
        found.update(each.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    args = parser_of().parse_args()
    torch.set_num_threads(1)
    notes = Notes(args.folder)
    faults = Faults(args.fault, args.folder, notes)
    dist.init_process_group(args.backend)
    faults.at("constructing")
    _fail_in_recovery(faults)
    data = Data(args)
    data.at = faults.at
    shuffle = GlobalShuffle(data, GlobalBatch.of(args.batch, dist.get_world_size()), seed=5)
    net = make_model(args)
    if args.sync_batch_norm:
        net = paceline.convert_sync_batchnorm(net)
    model = paceline.DistributedDataParallel(
        net, batch_sampler=shuffle, compression=args.compression, **json.loads(args.wrapped)
    )
    optimizer = make_optimizer(args.optimizer, net)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    next(iter(net.parameters())).register_hook(lambda _: faults.at("within backward"))
    elastic = paceline.Elastic(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=shuffle,
        deterministic=args.deterministic,
    )
    notes.write(what="in", step=elastic.step, epoch=shuffle.epoch)
    loader = DataLoader(data, batch_sampler=shuffle, num_workers=args.workers)
    loss = nn.CrossEntropyLoss()
    for epoch in range(shuffle.epoch, args.epochs):
        for batches in elastic.steps(loader):
            faults.step = elastic.step
            indices = [int(i) for batch in batches for i in batch[0]]
            notes.write(
                what="try", step=elastic.step, under=model.membership.epoch, of=epoch, samples=indices
            )
            faults.at("entering")
            with model.accumulate(batches) as micro_batches:
                for _, x, y in micro_batches:
                    faults.at("forward")
                    value = loss(model(x), y)
                    faults.at("backward")
                    value.backward()
                faults.at("leaving")
            faults.at("optimizer")
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if not micro_batches.repeats:
                notes.write(what="done", step=elastic.step, under=model.membership.epoch)
            faults.at("between steps")
            if args.pause_ms:
                time.sleep(args.pause_ms / 1000)
        faults.at("end of epoch")
    history = [vars(change) for change in model.membership.history]
    open_now = {name: len(list(Path(f"/proc/self/{name}").iterdir())) for name in ("task", "fd")}
    notes.write(what="end", step=elastic.step, bits=digest(net), history=history, open=open_now)
    torch.save(net.state_dict(), args.folder / f"model-{os.getpid()}.pt")


def _fail_in_recovery(faults: Faults) -> None:
    """Let faults happen as a rank opens the next group, and as it has just told that it follows."""
    from paceline.ddp.membership import Membership

    rebuild = Membership.rebuild

    def failing(*given: Any, **named: Any) -> None:
        if given[0].epoch or faults.step:
            faults.at("recovery")
        rebuild(*given, **named)
        if given[0].epoch > 1:
            faults.at("following")

    Membership.rebuild = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
    sys.stdout.flush()
