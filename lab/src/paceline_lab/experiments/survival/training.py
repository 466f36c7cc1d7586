"""A script for `paceline run --min-ranks`: a small training that notes what each rank trained, and its faults.

A user would write the same, but for three things. It notes every try of a step, it fails where it is told to, and it
leaves its final parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
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

NUM_BUCKETS = 3  # of the model, a layer each, the last layer first
BUCKET_MOMENTS = tuple(
    f"{when} bucket {i}" for i in range(NUM_BUCKETS) for when in ("before", "within", "after")
)
MOMENTS = (
    "rendezvous",
    "constructing",
    "loading",
    "entering",
    "forward",
    "backward",
    *BUCKET_MOMENTS,
    "leaving",
    "optimizer",
    "between steps",
    "checkpoint",
    "end of epoch",
    # of a recovery: opening the next group, having told that it follows; a replacement as it starts, takes the state
    # from one that trains, and is let in; one that gives it
    "recovery",
    "following",
    "coming in",
    "replaying",
    "receiving",
    "giving",
)
WAYS = ("SIGKILL", "exit", "error", "memory", "SIGSTOP", "pause")
CHECKPOINT_EVERY = 4  # steps
_HOLD_FROM = 10
_CAP_MB = 1e-3  # a layer's weight and bias are more
_STOP_S, _PAUSE_S = 20.0, 0.3  # a stopped rank is woken; by then it is lost, or is not
_MEMORY_BYTES = 32 << 20  # that a rank which runs out of memory may still have
GROUPS = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Fault:
    """A fault of a rank, once in a job.

    Attributes:
        rank: Number of the rank when it happens; of a replacement that has none, 0.
        step: Step in which it happens, counted from 0.
        moment: Moment of `MOMENTS`.
        how: Way of `WAYS`: `memory` is the kernel's killer, in a control group of its own, or else MemoryError;
            `SIGSTOP` lasts 20 s, `pause` 0.3 s.
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
        # not one of a second beginning, if a rank has died in the first
        self.is_replacement = any('"try"' in each.read_text() for each in folder.glob("rank-*.jsonl"))

    def at(self, moment: str) -> None:
        for number, fault in enumerate(self._faults):
            if fault.moment == moment and self._is_here(fault) and self._takes(number):
                self._notes.write(what="fault", step=self.step, moment=moment, how=fault.how)
                _fail(fault.how, self._folder)

    def _is_here(self, fault: Fault) -> bool:
        if fault.moment in ("coming in", "replaying", "receiving", "giving"):  # each happens once for a loss
            return self.is_replacement or fault.moment == "giving"
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
        return fault.step == self.step and fault.rank == rank

    def _takes(self, number: int) -> bool:
        try:
            (self._folder / f"fault-{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _fail(how: str, folder: Path) -> None:
    if how == "exit":
        os._exit(1)
    if how == "error":
        raise ValueError("a fault that was asked for")
    if how == "memory":
        _run_out_of_memory(folder)
    if how in ("SIGSTOP", "pause"):
        _stop_for(_PAUSE_S if how == "pause" else _STOP_S)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def _run_out_of_memory(folder: Path) -> None:
    """Have the kernel kill this process for memory; MemoryError where that needs other rights."""
    group = GROUPS / f"paceline-{folder.name}-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(_MEMORY_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise MemoryError("a fault that was asked for") from error
    taken = [bytearray(os.urandom(1 << 20)) for _ in range(2 * _MEMORY_BYTES >> 20)]
    raise MemoryError(f"{len(taken)} MiB were given out")


def _stop_for(seconds: float) -> None:
    """Stop this rank: this process, and the one that asked for it if it is a fork (tests/harness/warm.py)."""
    names = ("PACELINE_SURVIVAL_JOB", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    wanted = {f"{name}={os.environ.get(name)}".encode() for name in names}
    pids = [os.getpid()]
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((each / "environ").read_bytes().split(b"\0")) and int(each.name) not in pids:
                pids.insert(0, int(each.name))
    words = " ".join(map(str, pids))
    subprocess.Popen(
        ["sh", "-c", f"sleep {seconds}; kill -CONT {words} 2>/dev/null"],
        env={"PATH": os.environ["PATH"]},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


class Notes:
    """One line of JSON for all that happens, at once on the disk, in a file of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"rank-{os.getpid()}.jsonl").open("a")

    def write(self, **what: object) -> None:
        self._file.write(json.dumps({"at": time.monotonic(), **what}) + "\n")
        self._file.flush()


def parser_of() -> argparse.ArgumentParser:
    """Return the parser of the script's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=194)  # the last step has 2, fewer than ranks
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--ranks", type=int, help="logical ranks; by default the number of ranks")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--compression", default="none")
    parser.add_argument("--wrapped", default="{}", help="further options of the wrapper, as JSON")
    parser.add_argument("--sync-batch-norm", action="store_true")
    parser.add_argument("--pause-ms", type=float, default=0)
    parser.add_argument("--hold", type=Path, help="as long as it exists, steps are slow from the tenth on")
    parser.add_argument("--hold-s", type=float, default=0.3, help="how slow")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--normalize", action="store_true", help="batch normalisation")
    parser.add_argument(
        "--ordinary", action="store_true", help="epochs by range(epochs), not from the sampler's on"
    )
    parser.add_argument("--parts", action="store_true", help="note when which part of a recovery was done")
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


def make_schedules(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """One that is stepped behind each step, and one behind each epoch."""
    schedules = torch.optim.lr_scheduler
    return schedules.CosineAnnealingLR(optimizer, 200), schedules.StepLR(optimizer, 1, gamma=0.9)


def digest(model: nn.Module) -> str:
    """Return a digest of all parameters' bits."""
    found = hashlib.sha256()
    for each in (*model.parameters(), *model.buffers()):
        found.update(each.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    args = parser_of().parse_args()
    torch.set_num_threads(1)
    notes = Notes(args.folder)
    faults = Faults(args.fault, args.folder, notes)
    faults.at("rendezvous")
    dist.init_process_group(args.backend)
    faults.at("constructing")
    _fail_in_recovery(faults, notes)
    if args.parts:
        _note_parts(notes)
    data = Data(args)
    data.at = faults.at
    shuffle = GlobalShuffle(
        data,
        GlobalBatch.of(args.batch, ranks=args.ranks)
        if args.ranks
        else GlobalBatch.of(args.batch, dist.get_world_size()),
        seed=5,
    )
    net = make_model(args)
    if args.sync_batch_norm:
        net = paceline.convert_sync_batchnorm(net)
    options = {"bucket_cap_mb": _CAP_MB, **json.loads(args.wrapped)}
    model = paceline.DistributedDataParallel(
        net, batch_sampler=shuffle, compression=args.compression, **options
    )
    optimizer = make_optimizer(args.optimizer, net)
    scheduler, by_epoch = make_schedules(optimizer)
    _fail_in_backward(faults, net)
    elastic = paceline.Elastic(
        model=model,
        optimizer=optimizer,
        scheduler=[scheduler, by_epoch],
        sampler=shuffle,
        deterministic=args.deterministic,
        checkpoint=lambda: notes.write(what="saved", step=elastic.step),
        notice=globals().get("notice"),  # of an actor of Ray
    )
    saved = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "sampler": shuffle}
    loader = DataLoader(data, batch_sampler=shuffle, num_workers=args.workers)
    loss = nn.CrossEntropyLoss()
    for epoch in range(0 if args.ordinary else shuffle.epoch, args.epochs):
        for batches in elastic.steps(loader):
            faults.step, began_s = elastic.step, time.monotonic()
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
                took_s = time.monotonic() - began_s
                notes.write(what="done", step=elastic.step, under=model.membership.epoch, took_s=took_s)
            faults.at("between steps")
            if elastic.step % CHECKPOINT_EVERY == 0:
                _save(saved, args.folder, faults)
            if args.hold and elastic.step > _HOLD_FROM and args.hold.exists():
                time.sleep(args.hold_s)
            if args.pause_ms and not micro_batches.repeats:
                time.sleep(args.pause_ms / 1000)
        faults.at("end of epoch")
        by_epoch.step()
    history = [vars(change) for change in model.membership.history]
    open_now = {name: len(list(Path(f"/proc/self/{name}").iterdir())) for name in ("task", "fd")}
    notes.write(what="end", step=elastic.step, bits=digest(net), history=history, open=open_now)
    torch.save(net.state_dict(), args.folder / f"model-{os.getpid()}.pt")


def _save(parts: dict[str, Any], folder: Path, faults: Faults) -> None:
    """A checkpoint of this rank, whole or not at all."""
    path = folder / f"checkpoint-{os.environ['LOCAL_RANK']}"
    torch.save({name: each.state_dict() for name, each in parts.items()}, path.with_suffix(".new"))
    faults.at("checkpoint")
    path.with_suffix(".new").replace(path)


def _fail_in_backward(faults: Faults, net: nn.Module) -> None:
    """Perform faults at a layer's first gradient, at its second, and after the launch of its bucket."""
    layers = [each for each in net.children() if isinstance(each, nn.Linear)]
    assert len(layers) == NUM_BUCKETS
    for bucket, layer in enumerate(reversed(layers)):
        _fail_in_bucket(faults, bucket, layer)


def _fail_in_bucket(faults: Faults, bucket: int, layer: nn.Linear) -> None:
    when, sent = itertools.cycle(("before", "within")), itertools.cycle((False, True))

    def behind(_: object) -> None:
        if next(sent):
            faults.at(f"after bucket {bucket}")

    for each in layer.parameters():
        each.register_hook(lambda _: faults.at(f"{next(when)} bucket {bucket}"))
        each.register_post_accumulate_grad_hook(behind)  # behind the model's own


def _fail_in_recovery(faults: Faults, notes: Notes) -> None:
    """Perform faults as a rank opens the next group, has agreed to follow, sends its state or receives one."""
    from paceline.ddp.membership import Membership
    from paceline.elastic import handover, replay

    rebuild, take, give = Membership.rebuild, replay.take, replay.Giver.go_on
    take_rest = handover.Carried.take
    faults.at("coming in")

    def failing(*given: Any, **named: Any) -> None:
        if given[0].epoch or faults.step:
            faults.at("recovery")
        faults.at("receiving")
        rebuild(*given, **named)
        if given[0].epoch > 1:
            faults.at("following")

    def taking(*given: Any) -> None:
        faults.at("replaying")
        take(*given)
        notes.write(what="followed", frame=sorted(given[0]))

    def taking_rest(carried: handover.Carried, tree: Any, **named: Any) -> None:
        notes.write(what="took", all="parameters" in tree)
        take_rest(carried, tree, **named)

    def giving(*given: Any) -> None:
        faults.at("giving")
        give(*given)

    Membership.rebuild = failing  # type: ignore[method-assign]
    setattr(handover.Carried, "take", taking_rest)  # noqa: B010
    for owner, name, method in ((replay, "take", taking), (replay.Giver, "go_on", giving)):
        setattr(owner, name, method)


def _note_parts(notes: Notes) -> None:
    """Note the times of each membership change: when the rank heard of the last one's end, and each part after it."""
    from paceline.ddp.membership import Membership
    from paceline.elastic.client import ElasticClient

    next_assignment, opens = ElasticClient.next_assignment, ElasticClient.open
    goes_on, opens_beside = ElasticClient.go_on, Membership.open_groups
    times: dict[str, float] = {}

    def assigned(client: ElasticClient, *given: Any) -> Any:
        times.update(heard=client.watcher.since_s, left=time.monotonic())
        assignment = next_assignment(client, *given)
        times["assignment"] = time.monotonic()
        return assignment

    def opened(client: ElasticClient, *given: Any) -> Any:
        states = opens(client, *given)
        times["open"] = time.monotonic()
        return states

    def opened_beside(members: Membership, *given: Any) -> Any:
        times["met"] = time.monotonic()
        groups = opens_beside(members, *given)
        times["beside"] = time.monotonic()
        return groups

    def gone_on(client: ElasticClient, *given: Any) -> None:
        goes_on(client, *given)
        notes.write(what="moved", **times)

    for name, method in (("next_assignment", assigned), ("open", opened), ("go_on", gone_on)):
        setattr(ElasticClient, name, method)
    setattr(Membership, "open_groups", opened_beside)  # noqa: B010


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
    sys.stdout.flush()
