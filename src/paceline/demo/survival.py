"""`paceline demo survive`: train over four ranks, do it again and kill one of them, and compare bit by bit."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.demo.comparison import PromiseBrokenError, heard, start
from paceline.demo.surviving_rank import SurvivalJob
from paceline.launch import Watchdog

KILL_AT, VICTIM = 60, 2  # the step, and the rank
_LINE_S = 1.0  # between two lines of progress


@dataclass
class Training:
    """The reports of one training's ranks."""

    # Samples of each step, for each membership that tried it.
    taken: dict[int, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)  # each process's last report
    # Each process's place, its first rank: a replacement takes the place of the lost process.
    places: dict[int | None, int] = field(default_factory=dict)
    losses: dict[int | None, float] = field(default_factory=dict)  # each process's last
    killed: int | None = None  # the process
    step: int = 0  # the latest that a rank has begun

    def receive(self, said: dict[str, Any]) -> None:
        pid = said["pid"]
        if "samples" in said:
            self.taken[said["step"]].setdefault(said["epoch"], []).extend(said["samples"])
            self.step = max(self.step, said["step"])
            if pid not in self.places:
                self.places[pid] = self.places.pop(self.killed, said["rank"])
        elif "loss" in said:
            self.losses[pid] = said["loss"]
        else:
            self.ends[pid] = said

    @property
    def computed_again(self) -> int:
        return sum(len(tries) > 1 for tries in self.taken.values())

    def wrong_samples(self, job: SurvivalJob) -> tuple[int, int]:
        """Return how many samples were lost, and how many counted twice, over all epochs.

        A step counts as the last membership that began it has trained it.
        """
        per_epoch = job.num_samples // job.global_batch
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for step, tries in self.taken.items():
            for sample in tries[max(tries)]:
                counts[step // per_epoch, sample] += 1
        lost = job.epochs * job.num_samples - len(counts)
        return lost, sum(count - 1 for count in counts.values())

    def dots(self) -> str:
        """Draw a dot for each process, and a cross for the one that was killed."""
        pids = sorted(self.places, key=self.places.__getitem__)
        return " ".join("[bold red]✗[/]" if pid == self.killed else "[green]●[/]" for pid in pids)


def run_survival(console: Console) -> dict[str, Any]:
    """Train twice, kill a rank of the second training, and print what that cost; returns the printed figures.

    Raises LaunchError, or PromiseBrokenError: a sample was lost or counted twice, or the bits differ.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # four processes share the cores
    with Watchdog(uuid.uuid4().hex) as watchdog:
        calm_job = SurvivalJob(pipe=str(watchdog.folder / "calm.pipe"))
        hit_job = SurvivalJob(pipe=str(watchdog.folder / "hit.pipe"), step_s=0.03, short_step_s=0.12)
        num_steps = calm_job.epochs * calm_job.num_samples // calm_job.global_batch
        _say(
            console,
            f"[bold]paceline demo survive[/]: {calm_job.num_ranks} processes train a small network,\n"
            f"{num_steps} steps of {calm_job.global_batch} images. They do it twice.\n"
            "In the second training one of them is killed.\n",
        )
        began_s = time.monotonic()
        calm, hit = Training(), Training()
        _say(console, "[bold]1[/]  Undisturbed")
        with heard(Path(calm_job.pipe), calm.receive):
            _launch(calm_job, console)
        passed_s = time.monotonic() - began_s
        _say(console, f"   {num_steps} steps, {passed_s:.0f} s with the start of all processes\n")
        _say(console, "[bold]2[/]  The same again, slower so that you can watch")
        with _killing(hit, hit_job, console):
            _launch(hit_job, console)
    return verdict(calm, hit, hit_job, console)


def _say(console: Console, words: str) -> None:
    console.print(words, highlight=False, soft_wrap=True)


def _launch(job: SurvivalJob, console: Console) -> None:
    words = ["--nproc-per-node", str(job.num_ranks), "--min-ranks", "2", "-m", "paceline.demo.surviving_rank"]
    start(job, words, lambda line: _say(console, f"   [cyan]{line}[/]"))


@contextmanager
def _killing(training: Training, job: SurvivalJob, console: Console) -> Iterator[None]:
    """Read the reports of the ranks, show a line now and then, and kill one rank on the way."""
    began_s, said_s = time.monotonic(), 0.0

    def line() -> None:
        nonlocal said_s
        said_s = time.monotonic()
        losses = [training.losses[pid] for pid in training.places if pid in training.losses]
        words = f"   {said_s - began_s:4.1f} s  step {training.step:>3}  {training.dots()}"
        loss = f"  loss {sum(losses) / len(losses):.4f}" if losses else ""
        _say(console, words + loss)

    def receive(said: dict[str, Any]) -> None:
        known = set(training.places)
        training.receive(said)
        is_victim = said.get("rank") == VICTIM and said.get("step", 0) >= KILL_AT
        if is_victim and training.killed is None:
            training.killed = said["pid"]
            os.kill(training.killed, signal.SIGKILL)
            words = f"kill -9 {training.killed}: rank {VICTIM} is gone"
            _say(console, f"   [bold red]{words}[/]")
            line()
        elif training.killed in known and said["pid"] not in known and "samples" in said:
            _say(console, "   [bold green]a new process has taken its place[/]")
            line()
        elif time.monotonic() - said_s > _LINE_S and len(training.places) == job.num_ranks:
            line()

    with heard(Path(job.pipe), receive):
        yield
    line()


def verdict(calm: Training, hit: Training, job: SurvivalJob, console: Console) -> dict[str, Any]:
    """Print what the loss of a rank has cost. Raises PromiseBrokenError if it has cost more than promised."""
    digests = [{end["digest"] for end in training.ends.values()} for training in (calm, hit)]
    same_bits = digests[0] == digests[1] and len(digests[0]) == 1
    lost, doubled = hit.wrong_samples(job)
    changes: list[dict[str, Any]] = max((end["changes"] for end in hit.ends.values()), key=len, default=[])
    stalls_s = [change["stalled_s"] for change in changes]
    rows = {
        "killed": hit.killed is not None,
        "steps_computed_again": hit.computed_again,
        "samples_lost": lost,
        "samples_doubled": doubled,
        "stalls_s": stalls_s,
        "replaced": any(change["num_new"] for change in changes),
        "same_bits": same_bits,
        "digests": [sorted(each) for each in digests],
    }
    bits = (
        "[bold green]same bits as the undisturbed run[/]" if same_bits else "[bold red]NOT the same bits[/]"
    )
    stall = f"{stalls_s[0]:.2f} s" if stalls_s else "none"
    if rows["replaced"]:
        stall += f", and {stalls_s[-1]:.2f} s when the new process came in"
    console.print()
    for name, value in (
        ("steps computed again", str(hit.computed_again)),
        ("samples lost", f"{lost} of {job.epochs * job.num_samples:,}; counted twice: {doubled}"),
        ("stall", stall),
        ("parameters", bits),
    ):
        _say(console, f"   {name:<22}{value}")
    if not hit.killed or lost or doubled or not same_bits:
        raise PromiseBrokenError(f"the promise is broken. Please report this: {json.dumps(rows)}")
    return rows
