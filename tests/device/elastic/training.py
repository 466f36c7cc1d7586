"""A training as a user writes it, on the emulated device or on the CPU, in which ranks die. `runs.py` starts it.

    training.py OUT [--device late] [--deaths "RANK STEP MOMENT;..."]

A moment on the host is one of HOST. One on the device is a task of its stream, which comes when the device does: one
of TASKS, or a place ("begin", "within", "end") of a collective ("first", "middle", "last", "vote"), as "within vote".
"self-abort" is "within middle" of a rank that aborts its collectives by itself, and dies before its next one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
import paceline
import paceline_recipes
from device import late, nccl
from device.elastic import mutants
from device.nccl import moments
from paceline.comm.device_vote import DeviceExit
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.elastic import watcher
from paceline.elastic.agent_connection import Stop

HOST = ("begin", "forward", "backward", "optimizer", "between")
TASKS = ("device forward", "device backward", "device optimizer")
PLACES = ("begin", "within", "end")
COLLECTIVES = ("first", "middle", "last", "vote")
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.01, fused=True),
    "adam": lambda given: torch.optim.Adam(given, lr=0.01, fused=True),
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1, fused=True),
    "adamw foreach": lambda given: torch.optim.AdamW(given, lr=0.01, foreach=True),
    "sgd foreach": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, foreach=True),
    "lars": lambda given: paceline_recipes.LARS(given, lr=0.1),
}
_TABLE = 4
_PAUSE_S = 0.002  # between two looks how far the device is behind


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default=late.DEVICE)
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument("--deaths", default="")
    parser.add_argument("--behind", type=int, default=500, help="tasks that the device is behind the host")
    parser.add_argument("--lead", type=int, default=2)
    parser.add_argument("--schedule", default="latest", choices=(*late.SCHEDULES, "eager"))
    parser.add_argument("--hears-late", type=float, default=0.0, help="seconds, on rank 0")
    parser.add_argument("--reads-loss", action="store_true")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--autocast", action="store_true", help="forward in bfloat16")
    parser.add_argument(
        "--fails-with-peer", type=int, help="the rank whose device fails for good at an abort"
    )
    parser.add_argument("--wrapped", default="{}", help="arguments of the wrapper")
    parser.add_argument("--sync-batch-norm", action="store_true")
    parser.add_argument("--ordinary", action="store_true", help="not deterministic, and without dropout")
    parser.add_argument("--saves", action="store_true", help="save within the loop")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step")
    parser.add_argument("--mutant", default="")
    return parser.parse_args()


class Turns(nn.Module):
    """Counts steps in one buffer, and adds a row of a table by an index in another. Both have to survive losses."""

    share = 1.0  # of a step, that a forward is

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.turn: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("turn", torch.zeros((), dtype=torch.int64))
        self.table = nn.Parameter(torch.randn(_TABLE, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.share
        return x + self.table.index_select(0, self.turn.reshape(1))


class Faults:
    """What happens to this rank, and when: each death once in a job."""

    def __init__(self, given: str, out: Path, device: torch.device) -> None:
        self._all = [each.strip().split(" ", 2) for each in given.split(";") if each.strip()]
        self._out, self._device = out, device
        self._armed: dict[tuple[str, str], str] = {}
        self._base, self._per_step = 0, 12
        self._of: Any = None  # the communicator that these are of
        if device.type == late.DEVICE:
            moments.listen(self._come)

    def _is_due(self, step: int, moment: str) -> bool:
        for number, (rank, at, what) in enumerate(self._all):
            if (int(rank), int(at), what) == (dist.get_rank(), step, moment):
                return self.is_first(f"death{number}")
        return False

    def is_first(self, name: str) -> bool:
        """Return whether no process of this job has asked this before."""
        with contextlib.suppress(FileExistsError):
            Path(f"{self._out}.{name}").touch(exist_ok=False)
            return True
        return False

    def at(self, step: int, moment: str) -> None:
        """The host has come to a moment."""
        if self._is_due(step, moment):
            die()

    def on_stream(self, step: int, moment: str) -> None:
        """Die when the device comes to this place of its current stream."""
        if self._is_due(step, moment):
            late.queue(die, "die", torch.accelerator.current_stream(self._device), ([], []))

    def within_backward(self, step: int, parameter: Tensor) -> None:
        """Die when backward comes to a parameter."""
        if self._is_due(step, "backward"):
            parameter.register_hook(lambda _: die())

    def begin_step(self, step: int) -> None:
        """Arm what happens within the collectives that the host launches next."""
        world: Any = dist.group.WORLD
        communicators = getattr(world, "_communicators", {})
        own = communicators.get(("all", self._device))
        launched = 0 if own is None else own.num_launched
        if own is self._of and own is not None:
            self._per_step = launched - self._base
        self._of, self._base = own, launched
        last = self._per_step - 1
        numbers = {"first": 0, "middle": last // 2, "last": last - 1, "vote": last}
        for name, number in numbers.items():
            for place in PLACES:
                if self._is_due(step, f"{place} {name}"):
                    self._armed[str(self._base + number), place] = "die"
        if self._is_due(step, "self-abort"):
            self._armed[str(self._base + numbers["middle"]), "within"] = "abort"
            self._armed[str(self._base + numbers["middle"]), "end"] = "die"

    def _come(self, _rank: int, step: str, place: str) -> None:
        what = self._armed.get((step, place))
        if what == "abort":
            self._of.abort()
        elif what == "die":
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def let_go_on(behind: int) -> None:
    """Run the device's main stream, so many tasks behind its host; never returns."""
    extension = late.start()
    while True:
        queued = extension.num_queued(0)
        if queued > behind:
            extension.run_until(0, queued - behind)
        time.sleep(_PAUSE_S)


def hear_late(seconds: float) -> None:
    """Let rank 0 hear later than others that a rank was lost, as on another host."""
    take = watcher.Watcher._take

    def take_late(self: Any, message: object) -> None:
        if isinstance(message, Stop) and dist.is_initialized() and dist.get_rank() == 0:
            time.sleep(seconds)
        take(self, message)

    watcher.Watcher._take = take_late  # type: ignore[method-assign]


def fail_with_peer(faults: Faults, rank: int) -> None:
    """Let the device of a rank fail for good when it leaves a membership, once in a job."""
    abort = DeviceExit.abort

    def fail() -> None:
        late.queue(fail, "kernel", torch.accelerator.current_stream(), ([], []))  # for each later wait
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def abort_and_fail(self: DeviceExit) -> None:
        is_due = dist.get_rank() == rank and faults.is_first("failure")
        abort(self)
        if is_due:
            late.queue(fail, "kernel", torch.accelerator.current_stream(), ([], []))

    DeviceExit.abort = abort_and_fail  # type: ignore[method-assign]


def main() -> None:
    args = parsed()
    on_device = args.device == late.DEVICE
    if on_device:
        nccl.register()
        late.start().set_schedule(args.schedule)
    device = torch.device(args.device, 0) if on_device else torch.device("cpu")
    dist.init_process_group(nccl.MIXED if on_device else "gloo")
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    drawn = torch.Generator().manual_seed(5)
    rows = torch.randn(240, 8, generator=drawn), torch.randint(0, 3, (240,), generator=drawn)
    data = TensorDataset(*rows)
    shuffle = GlobalShuffle(data, GlobalBatch.of(24, dist.get_world_size()))
    loader = DataLoader(data, batch_sampler=shuffle)
    norm = nn.BatchNorm1d(16) if args.sync_batch_norm else nn.LayerNorm(16)
    dropout = nn.Dropout(0.0 if args.ordinary else 0.2)
    layers = (
        nn.Linear(8, 16),
        nn.Tanh(),
        dropout,
        nn.Linear(16, 16),
        norm,
        nn.Tanh(),
        Turns(),
        nn.Linear(16, 3),
    )
    net: Any = nn.Sequential(*layers)
    if args.sync_batch_norm:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net = net.to(device)
    wrapped = {"bucket_cap_mb": 0.0005, **json.loads(args.wrapped)}
    model = paceline.DistributedDataParallel(net, batch_sampler=shuffle, **wrapped)
    optimizer = OPTIMIZERS[args.optimizer](net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    # Overflows in some steps: 2^k times a loss of a float32 model never does, so the growth is what is compared.
    scaler = torch.amp.GradScaler(args.device, init_scale=2.0**10, growth_interval=4, enabled=args.scaler)
    criterion = nn.CrossEntropyLoss()
    faults = Faults(args.deaths, args.out, device)
    if on_device and args.behind >= 0:
        threading.Thread(target=let_go_on, args=(args.behind,), daemon=True).start()
    if args.fails_with_peer is not None:
        fail_with_peer(faults, args.fails_with_peer)
    if args.hears_late:
        hear_late(args.hears_late)
    if args.mutant:
        mutants.leave_out(args.mutant)
    elastic = paceline.Elastic(
        model=model,
        optimizer=optimizer,
        scheduler=[schedule, scaler] if args.scaler else schedule,
        sampler=shuffle,
        deterministic=not args.ordinary,
    )
    turns = next(each for each in net if isinstance(each, Turns))
    waits, ahead = [], 0
    for _ in range(shuffle.epoch, args.epochs):
        for batches in elastic.steps(loader, lead=args.lead):
            step = elastic.step
            if elastic._device_steps is not None:
                ahead = max(ahead, step - elastic._device_steps.num_known)
            faults.begin_step(step)
            Turns.share = 1.0 / max(1, len(batches))
            faults.at(step, "begin")
            with model.accumulate(batches) as micro_batches:
                for batch in micro_batches:
                    x, y = batch
                    faults.at(step, "forward")
                    faults.on_stream(step, "device forward")
                    if on_device:
                        x, y = (each.pin_memory().to(device, non_blocking=True) for each in (x, y))
                    with torch.autocast(args.device, torch.bfloat16, enabled=args.autocast):
                        loss = criterion(model(x), y)
                    faults.within_backward(step, net[0].weight)
                    scaler.scale(loss).backward()
                    faults.on_stream(step, "device backward")
                    if args.reads_loss:
                        loss.item()
            if args.scaler and micro_batches.repeats:
                continue
            faults.at(step, "optimizer")
            scaler.step(optimizer)
            scaler.update()
            faults.on_stream(step, "device optimizer")
            with torch.no_grad():
                turns.turn.add_(1).remainder_(_TABLE)
            schedule.step()
            optimizer.zero_grad()
            faults.at(step, "between")
            if args.saves and step % 5 == 4 and elastic.synchronize():
                saved = [each.detach().cpu() for each in net.parameters()]
                torch.save({"step": step, "state": saved}, f"{args.out}.saved{step}.rank{dist.get_rank()}.pt")
            if on_device:
                waits.append(dict(late.start().take_counts()))
            time.sleep(args.pause)
    if on_device:
        late.drain()
    kept = optimizer.state_dict()["state"].values()
    changes = [(each.step, each.lost, each.num_new, each.size) for each in model.membership.history]
    torch.save(
        {
            "state": [each.detach().cpu() for each in net.parameters()],
            "kept": [
                each.detach().cpu() for state in kept for each in state.values() if isinstance(each, Tensor)
            ],
            "buffers": [each.detach().cpu() for each in net.buffers()],
            "step": elastic.step,
            "rate": schedule.get_last_lr(),
            "scale": scaler.state_dict(),
            "history": changes,
            "decided": model.membership.steps_decided,
            "told": model.timings.decisions.get("elastic"),
            "waits": waits,
            "ahead": ahead,
        },
        f"{args.out}.rank{dist.get_rank()}.pt",
    )
    dist.barrier()


if __name__ == "__main__":
    main()
