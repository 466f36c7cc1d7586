"""Trains under an engine that is not ours, and checks by the ranks' logs that each sample counted once.

Each process of a rank writes a log of its own. `begins` lines say which samples a step has on that rank, and `done`
lines which have counted. A rank that is killed in between has no `done` line, though its gradients may have counted.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

NUM_SAMPLES, BATCH, STEPS_PER_EPOCH, NUM_EPOCHS = 240, 24, 10, 80
NUM_STEPS = STEPS_PER_EPOCH * NUM_EPOCHS
PATIENCE_S = 900.0

# Steps are slow until the test writes the file `goes on`. A rank kills itself in a step if its file `die-NAME` exists.
TRAIN = """
import os, pathlib, signal, socket, sys, time, uuid
here = pathlib.Path(sys.argv[1])
host = os.environ.get("ENGINE_HOST") or socket.gethostname()
name = f"{host}-{os.environ.get('LOCAL_RANK', '0')}"
log = (here / f"log-{name}-{uuid.uuid4().hex[:6]}").open("w", buffering=1)
log.write(f"pid {os.getpid()}\\n")
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import paceline
from paceline.data import GlobalBatch, GlobalShuffle

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.arange(240.0).unsqueeze(1))
shuffle = GlobalShuffle(data, GlobalBatch.of(24, ranks=4))
loader = DataLoader(data, batch_sampler=shuffle)
net = torch.nn.Linear(1, 1)
model = paceline.DistributedDataParallel(net, batch_sampler=shuffle)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)

def save():
    log.write(f"saved {elastic.step}\\n")

elastic = paceline.Elastic(
    model, optimizer, sampler=shuffle, checkpoint=save, deterministic=True, notice=globals().get("notice")
)
log.write("in\\n")
for epoch in range(shuffle.epoch, 80):
    for batches in elastic.steps(loader):
        samples = [int(x) for (b,) in batches for x in b]
        log.write(f"begins {elastic.step} {dist.get_world_size()} {samples}\\n")
        with model.accumulate(batches) as micro_batches:
            if (here / f"die-{name}").exists():
                (here / f"die-{name}").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            for (x,) in micro_batches:
                model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if micro_batches.repeats:
            log.write(f"repeats {elastic.step}\\n")
            continue
        log.write(f"done {elastic.step} {dist.get_world_size()} {samples}\\n")
        until_s = time.monotonic() + 1.5
        while not (here / "goes on").exists() and time.monotonic() < until_s:
            time.sleep(0.05)
if dist.get_rank() == 0:
    log.write(f"parameters {[each.tolist() for each in net.parameters()]}\\n")
log.write("end\\n")
"""


@dataclass
class RankLog:
    """The log of one process of a rank."""

    name: str
    begun: dict[int, list[int]] = field(default_factory=dict)
    done: dict[int, list[int]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # the number of ranks of each step that is done
    repeats: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    parameters: str = ""
    has_ended: bool = False
    pid: int = 0


class TrainingFolder:
    """The folder of one training: its script, and the logs of all processes that have run it."""

    def __init__(self, path: Path, head: str = "") -> None:
        self.path = path
        (path / "train.py").write_text(head + TRAIN)

    @property
    def command(self) -> list[str]:
        return [str(self.path / "train.py"), str(self.path)]

    def logs(self) -> list[RankLog]:
        """Read the logs. A line that is being written is left out."""
        return [_read(file) for file in sorted(self.path.glob("log-*"))]

    def kill_in_a_step(self, name: str) -> None:
        """Have the rank with this name, such as `host0-1`, kill itself within its next step."""
        (self.path / f"die-{name}").touch()

    def let_it_end(self) -> None:
        """End the slow part of the training."""
        (self.path / "goes on").touch()

    def newest_step(self) -> int:
        return max((step for log in self.logs() for step in log.done), default=-1)

    def wait_for_ranks(self, num_ranks: int) -> int:
        """Wait for a step, later than those that are done, of so many ranks. Return the step."""
        after = self.newest_step()
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [
                step
                for log in self.logs()
                for step, n in log.sizes.items()
                if n == num_ranks and step > after
            ]
            return bool(found)

        wait_until(
            is_there, lambda: f"no step of {num_ranks} ranks after step {after}: {self.what_happened()}"
        )
        return found[0]

    def what_happened(self) -> str:
        """Return a summary of the logs, for messages."""
        lines = [
            f"{log.name}: steps {min(log.begun, default=None)} to {max(log.done, default=None)}, repeats {log.repeats}"
            for log in self.logs()
        ]
        return f"{'; '.join(lines)} (processes in {self.path})"

    def repeated(self) -> set[int]:
        """Return the steps that were computed again."""
        return {step for log in self.logs() for step in log.repeats}

    def check_once(self) -> None:
        """Check that each sample counted once an epoch, and each step once."""
        logs = self.logs()
        counted: dict[int, list[int]] = {step: [] for step in range(NUM_STEPS)}
        unsure: dict[int, list[list[int]]] = {}
        for log in logs:
            for step, samples in log.done.items():
                counted[step] += samples
            for step in log.begun.keys() - log.done.keys() - set(log.repeats):
                unsure.setdefault(step, []).append(log.begun[step])  # the process ended in this step
        for step, samples in counted.items():
            for more in unsure.get(step, []):
                if len(samples) < BATCH:
                    samples.extend(more)
            assert len(samples) == len(set(samples)) == BATCH, (step, sorted(samples), self.what_happened())
        for epoch in range(NUM_EPOCHS):
            first = epoch * STEPS_PER_EPOCH
            of_epoch = [each for step in range(first, first + STEPS_PER_EPOCH) for each in counted[step]]
            assert sorted(of_epoch) == list(range(NUM_SAMPLES)), f"epoch {epoch}"

    def parameters(self) -> str:
        """Return the final parameters, as the one rank 0 at the end has written them."""
        (found,) = {log.parameters for log in self.logs() if log.parameters}
        return found


def _read(file: Path) -> RankLog:
    log = RankLog(file.name.removeprefix("log-").rpartition("-")[0])
    for line in file.read_text().splitlines(keepends=True):
        word, _, rest = line.rstrip("\n").partition(" ")
        if not line.endswith("\n"):
            break
        if word in ("begins", "done"):
            step, size, samples = re.fullmatch(r"(\d+) (\d+) (\[.*\])", rest).groups()  # type: ignore[union-attr]
            (log.begun if word == "begins" else log.done)[int(step)] = ast.literal_eval(samples)
            if word == "done":
                log.sizes[int(step)] = int(size)
        elif word == "repeats":
            log.repeats.append(int(rest))
        elif word == "saved":
            log.saved.append(int(rest))
        elif word == "parameters":
            log.parameters = rest
        elif word == "pid":
            log.pid = int(rest)
        log.has_ended = word == "end"
    return log


def wait_until(is_so: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Wait for an event. Raises AssertionError with these words if it does not come."""
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s, otherwise()
        time.sleep(0.1)
