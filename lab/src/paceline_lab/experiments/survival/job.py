"""Runs one job of the survival training, with faults from within and without, and says what did not hold afterwards."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.data import GlobalBatch, GlobalShuffle
from paceline_lab.experiments.survival.training import (
    GROUPS,
    Data,
    Fault,
    make_model,
    make_optimizer,
    make_schedules,
    parser_of,
)

_MARK = "PACELINE_SURVIVAL_JOB"
_POLL_S = 0.05
_WITHOUT_EFFECT = frozenset(("folder", "backend", "pause_ms", "workers", "compression", "fault"))
_WITHOUT_EFFECT |= {"parts", "ordinary", "hold", "ranks"}
_HANG_S = 60.0
_TRAINING = "paceline_lab.experiments.survival.training"


@dataclass(frozen=True)
class Job:
    """The settings of a job on this host.

    Attributes:
        num_ranks: Number of ranks at the start.
        min_ranks: `--min-ranks` of the launcher.
        options: Options of the training.
        faults: Faults that ranks cause in themselves.
        kills_every_s: Approximate time between kills from without; 0: none.
        num_kills: Number of kills from without.
        seed: Seed of their times and victims.
        lost_after_s: `--lost-after` of the launcher.
        limit_s: Time after which the job counts as hung.
        python: Path of the interpreter.
    """

    num_ranks: int = 4
    min_ranks: int = 2
    options: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    kills_every_s: float = 0.0
    num_kills: int = 0
    seed: int = 0
    lost_after_s: float = 10.0
    limit_s: float = 120.0
    python: str = sys.executable


@dataclass
class Outcome:
    """The result of a job.

    Attributes:
        code: Exit code of the launcher; None: it had to be ended.
        said: Standard error of the launcher.
        notes: Notes of the ranks, process by process.
        models: Parameters that the ranks left.
        num_left: Processes and launch folders of the job that were still there.
        kills: Times of kills from without.
        num_blows: Number of faults of hosts. Each may stop the others twice: as the host is lost, and as it comes back.
        ended_s: Time at which it was over, or was ended.
    """

    code: int | None
    said: str
    notes: list[list[dict[str, Any]]]
    models: list[Mapping[str, torch.Tensor]]
    num_left: int
    kills: list[float] = field(default_factory=list)
    num_blows: int = 0
    ended_s: float = field(default_factory=time.monotonic)

    def of(self, what: str) -> list[dict[str, Any]]:
        """Return the notes of this kind."""
        return [note for notes in self.notes for note in notes if note["what"] == what]

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The last words of the ranks that came to the end."""
        return self.of("end")

    @property
    def still_s(self) -> float:
        """Return the time from the last completed step until the job was over."""
        done = [note["at"] for note in self.of("done")]
        return self.ended_s - max(done, default=0.0)

    @property
    def has_hung(self) -> bool:
        """Return whether it had to be ended, and did nothing any more; on a busy machine a job may be slow."""
        return self.code is None and self.still_s > _HANG_S

    @property
    def changes(self) -> list[dict[str, Any]]:
        """All changes of the membership, as the ranks saw them that came to the end."""
        return [change for end in self.ends for change in end["history"]]


def run_job(job: Job, folder: Path) -> Outcome:
    """Run it, and wait for its end. Blocks, at most `limit_s` and some seconds."""
    mark = uuid.uuid4().hex
    command = [job.python, "-m", "paceline", "run", "--nproc-per-node", str(job.num_ranks)]
    command += ["--min-ranks", str(job.min_ranks), "--lost-after", f"{job.lost_after_s:g}", "-m", _TRAINING]
    command += [str(folder), *job.options]
    for fault in job.faults:
        command += ["--fault", str(fault)]
    launches = folder / "launches"
    launches.mkdir()
    more = {_MARK: mark, "OMP_NUM_THREADS": "1", "PACELINE_LAUNCH_FOLDERS": str(launches)}
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(command, stderr=said, stdout=said, env={**os.environ, **more})
        kills = _kill_at_random(job, process, folder)
        try:
            code: int | None = process.wait(job.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        ended_s = time.monotonic()
        if code is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
    num_left = _end_what_is_left(mark) + len(list(launches.iterdir()))
    for group in GROUPS.glob(f"paceline-{folder.name}-*"):
        group.rmdir()
    return Outcome(
        code,
        (folder / "said.txt").read_text(),
        [read_notes(file) for file in sorted(folder.glob("rank-*.jsonl"))],
        [torch.load(file, weights_only=True) for file in sorted(folder.glob("model-*.pt"))],
        num_left,
        kills,
        ended_s=ended_s,
    )


def read_notes(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _kill_at_random(job: Job, process: subprocess.Popen[bytes], folder: Path) -> list[float]:
    """Kill ranks that train, from without; returns when."""
    dice = random.Random(job.seed)
    kills: list[float] = []
    until_s = time.monotonic() + job.limit_s
    while len(kills) < job.num_kills and process.poll() is None and time.monotonic() < until_s:
        time.sleep(job.kills_every_s * dice.uniform(0.5, 1.5))
        victims = [pid for pid in _training(folder) if Path(f"/proc/{pid}").exists()]
        if len(victims) > job.min_ranks:
            victim = dice.choice(victims)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                kills.append(time.monotonic())
    return kills


def _training(folder: Path) -> list[int]:
    """Return the processes that have trained a step, and have not come to the end."""
    found = []
    for file in folder.glob("rank-*.jsonl"):
        text = file.read_text()
        if '"what": "try"' in text and '"what": "end"' not in text:
            found.append(int(file.stem.removeprefix("rank-")))
    return sorted(found)


def _end_what_is_left(mark: str) -> int:
    """Return how many processes of the job there still are; they are ended."""
    needle, count = f"{_MARK}={mark}".encode(), 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
                count += 1
    return count


def wait_until(happens: Callable[[], bool], until_s: float) -> bool:
    """Wait until something happens, at most until this time of `time.monotonic`. Return whether it happened."""
    while not happens():
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True


def outcome_of_hosts(
    folder: Path, code: int | None, num_left: int, num_blows: int, ended_s: float
) -> Outcome:
    """Return the outcome of a job on several hosts, with the output, notes and models that they left in the folder."""
    return Outcome(
        code=code,
        said="\n".join(file.read_text() for file in sorted(folder.glob("host*.txt"))),
        notes=[read_notes(file) for file in sorted(folder.glob("host*/rank-*.jsonl"))],
        models=[torch.load(file, weights_only=True) for file in sorted(folder.glob("host*/model-*.pt"))],
        num_left=num_left,
        num_blows=num_blows,
        ended_s=ended_s,
    )


# ---- what must hold


@dataclass(frozen=True)
class Trained:
    """The number of times that each sample counted in the parameters.

    Attributes:
        num_lost: Samples of a whole epoch that did not count.
        num_doubled: Samples that counted more than once.
        num_tries: Steps that were tried under a membership.
        num_steps: Steps that were completed.
    """

    num_lost: int
    num_doubled: int
    num_tries: int
    num_steps: int


def trained(outcome: Outcome, num_samples: int, num_epochs: int) -> Trained:
    """Count: of each step the samples of all ranks, of the last membership in which it was completed."""
    completed: dict[int, int] = {}
    tries: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for note in (note for notes in outcome.notes for note in notes):
        if note["what"] == "done":
            completed[note["step"]] = max(completed.get(note["step"], 0), note["under"])
        elif note["what"] == "try":
            tries.setdefault((note["step"], note["under"]), []).append(note)
    counted: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(num_epochs)}
    for step, under in completed.items():
        for note in tries[step, under]:
            counted[note["of"]].update(note["samples"])
    lost = sum(num_samples - len(each) for each in counted.values())
    doubled = sum(count > 1 for each in counted.values() for count in each.values())
    return Trained(lost, doubled, len(tries), len(completed))


def reference(options: tuple[str, ...], num_parts: int) -> Mapping[str, torch.Tensor]:
    """The parameters of the same training in one process, without any of this, of so many logical ranks."""
    given = vars(parser_of().parse_args(["/", *options]))
    matter = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    return _reference(tuple(sorted(matter.items())), num_parts)


@functools.cache
def _reference(arguments: tuple[tuple[str, Any], ...], num_parts: int) -> Mapping[str, torch.Tensor]:
    args = Namespace(**dict(arguments))
    data, net = Data(args), make_model(args)
    shuffle = GlobalShuffle(data, GlobalBatch.of(args.batch, num_parts), rank=0, seed=5)
    shuffle.move(shuffle.batch, 0, 0, 0, logical=range(num_parts))
    loader = torch.utils.data.DataLoader(data, batch_sampler=shuffle)
    optimizer = make_optimizer(args.optimizer, net)
    scheduler, by_epoch = make_schedules(optimizer)
    for _ in range(args.epochs):
        for batches in shuffle.steps(loader):
            total, sums = sum(len(y) for _, _, y in batches), dict[torch.nn.Parameter, torch.Tensor]()
            for _, x, y in batches:
                torch.nn.functional.cross_entropy(net(x), y).backward()
                scale = num_parts * len(y) / total * (1 / num_parts)
                for each in net.parameters():
                    assert each.grad is not None
                    part = each.grad * scale
                    sums[each] = sums[each] + part if each in sums else part
                    each.grad = None
            for each, gradient in sums.items():
                each.grad = gradient
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        by_epoch.step()
    return {name: each.detach() for name, each in net.state_dict().items()}


def problems(job: Job, outcome: Outcome, *, rounding: float = 1e-9) -> list[str]:
    """Return what did not hold, in words; empty if all did.

    The final parameters have to be those of one process, up to `rounding`; with `--deterministic` to the bit.
    """
    args = parser_of().parse_args(["/", *job.options])
    found = []
    if outcome.code is None:
        how = "hung" if outcome.has_hung else "was too slow"
        found.append(f"it {how}: ended {outcome.still_s:.0f} s after its last step")
    elif outcome.code:
        found.append(f"the launcher ended with code {outcome.code}")
    if outcome.num_left:
        found.append(f"{outcome.num_left} process(es) or launch folder(s) were left behind")
    if len({(end["bits"], end["step"]) for end in outcome.ends}) != 1:
        found.append(f"the ranks ended with {[(end['bits'], end['step']) for end in outcome.ends]}")
    counts = trained(outcome, args.samples, args.epochs)
    if counts.num_lost or counts.num_doubled:
        found.append(f"{counts.num_lost} samples were lost, {counts.num_doubled} doubled")
    num_deadly = sum(note["how"] != "pause" for note in outcome.of("fault"))  # which no rank notices
    num_strokes = num_deadly + len(outcome.kills) + 2 * outcome.num_blows
    if counts.num_tries - counts.num_steps > num_strokes:
        found.append(
            f"{counts.num_tries - counts.num_steps} steps were computed again after {num_strokes} faults"
        )
    last = max((note["step"] for note in outcome.of("done")), default=0)
    if old := [note["step"] for note in outcome.of("saved") if note["step"] < last]:
        found.append(f"checkpoints after {old} steps were written when others had done step {last}")
    if outcome.code == 0 and not outcome.models:
        found.append("no rank left its parameters")
    if outcome.models:
        expected = reference(job.options, job.num_ranks if args.deterministic else 1)
        rounding = 0.0 if args.deterministic else rounding
        worst = max(float((outcome.models[0][name] - each).abs().max()) for name, each in expected.items())
        if not worst <= rounding:
            found.append(f"final parameters differ by {worst:.2e} from those of one process")
    return found
