"""The demo from its settings to its tables: train over ranks and in one process, show progress, compare."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress
from rich.table import Table

from paceline.demo.images import Images, load_digits
from paceline.demo.training import STEP_PARTS, Job
from paceline.errors import ConfigurationError, PacelineError
from paceline.launch import Watchdog, launch, num_cores, parse
from paceline.version import __version__

# Summation order changes the last bits of a gradient, and training amplifies them; anything larger than this,
# relative to the largest parameter, is not rounding.
ALLOWED_DIFFERENCE = {"float64": 1e-9, "float32": 1e-2}


class PromiseBrokenError(PacelineError, RuntimeError):
    """The demo's trainings differ by more than rounding: a defect of Paceline, or of the machine."""


def run_demo(ranks: int, epochs: int, seed: int, dtype: str, console: Console) -> dict[str, Any]:
    """Train twice and show it. Return the settings, the machine, and what both trainings measured.

    Raises ConfigurationError (nothing was trained), LaunchError, or PromiseBrokenError: results differ.
    """
    images, batch, cores = load_digits(), 64 * ranks, num_cores()
    _check(images, ranks, batch, cores)
    num_train, num_test = len(images.train_labels), len(images.test_labels)
    console.print(
        f"[bold]paceline demo[/bold]: {images.name}, {num_train:,} training and {num_test:,} test images of "
        f"{images.side} x {images.side} pixels. {epochs} epochs of batches of {batch} in {dtype}. First {ranks} "
        "process(es) train with paceline.DistributedDataParallel on Gloo, then one process trains the same batches.",
        highlight=False,
    )
    # Both trainings get the same number of threads a process, so that a process is compared with a process.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    with Watchdog(uuid.uuid4().hex) as watchdog:  # removes the folder even if we are killed
        files = [watchdog.folder / "parallel", watchdog.folder / "single"]
        jobs = [
            Job(epochs, batch, seed, dtype, i == 0, f"{files[i]}.pipe", f"{files[i]}.npz") for i in (0, 1)
        ]
        parallel, single = (_train(job, ranks if job.wrapped else 1, console) for job in jobs)
        apart = difference(Path(jobs[0].parameters), Path(jobs[1].parameters), dtype)
    agree = len({rank["fingerprint"] for rank in parallel["ranks"]}) == 1
    settings = {"data": images.name, "ranks": ranks, "epochs": epochs, "seed": seed, "dtype": dtype}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "paceline": __version__}
    rows: dict[str, Any] = {
        "settings": settings,
        "global_batch": batch,
        "machine": {"cores": cores, **versions},
        "trainings": [parallel, single],
        "ranks_bitwise_equal": agree,
        "difference": apart,
    }
    _show(console, rows)
    if not (agree and apart["is_rounding"]):
        raise PromiseBrokenError(
            f"the promise is broken: the ranks {'agree' if agree else 'do not agree bitwise'}, and the largest "
            f"difference to one process is {apart['largest']:.3g} in {apart['parameter']}, of parameters up to "
            f"{apart['scale']:.3g}. Please report this, with what `paceline doctor` prints."
        )
    return rows


def _check(images: Images, ranks: int, batch: int, cores: int) -> None:
    """Raise ConfigurationError for a number of ranks that cannot be trained here."""
    num_train = len(images.train_labels)
    if ranks > 4 * cores:
        raise ConfigurationError(
            f"--ranks-per-host {ranks} is too many for this machine: a rank is a whole process that wants a core, and "
            f"there are {cores}. The demo takes at most {4 * cores} (4 a core)."
        )
    if num_train < batch:
        raise ConfigurationError(
            f"there are {num_train} training images, and a step of {ranks} ranks takes {batch}. Pass fewer "
            "--ranks-per-host."
        )


@contextlib.contextmanager
def heard(pipe: Path, receive: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Hand what ranks report by a named pipe to `receive`, on a thread that ends by an empty line of our own.

    We hold the pipe open for writing, too: there is no end of file when ranks come and go. After an error of
    `receive`, raised at the end, reading goes on: ranks would wait for room in the pipe.
    """
    os.mkfifo(pipe)
    end, errors = os.open(pipe, os.O_RDWR), []

    def read() -> None:
        with os.fdopen(end, closefd=False) as lines:
            for line in iter(lines.readline, "\n"):
                try:
                    receive(json.loads(line))
                except Exception as error:  # noqa: BLE001  see above
                    errors.append(error)

    thread = threading.Thread(target=read, name="paceline-demo-reports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(end, b"\n")  # ranks have ended by now: nothing comes after it
        thread.join()
        os.close(end)
    if errors:
        raise errors[0]


def start(job: Any, words: Sequence[str], note: Callable[[str], None]) -> None:
    """Run a module by these words of `paceline run` on all ranks, which read the job from a file beside its pipe."""
    file = Path(job.pipe).with_suffix(".json")
    file.write_text(json.dumps(dataclasses.asdict(job)))
    launch(parse(["--standalone", "--share-devices", *words, str(file)]), note)


def _train(job: Job, ranks: int, console: Console) -> dict[str, Any]:
    """Train over `ranks` processes, showing progress; returns what it measured."""
    name = f"{ranks} processes" if ranks > 1 else ("1 process, wrapped" if job.wrapped else "1 process")
    losses: dict[int, list[float]] = {}
    outcomes: list[dict[str, Any]] = []
    live = Progress("{task.description}", BarColumn(24), console=console, disable=not console.is_terminal)
    for rank in range(ranks):
        live.add_task(f"rank {rank}", total=job.epochs)

    def receive(said: dict[str, Any]) -> None:
        if "epoch" not in said:
            outcomes.append(said)
            return
        words = f"rank {said['rank']}  epoch {said['epoch']:>2}/{job.epochs}  loss {said['loss']:.4f}"
        words += f"  {said['samples_per_s']:,.0f} samples/s"
        live.update(said["rank"], completed=said["done"], description=words)
        if said["done"] == said["epoch"]:
            losses.setdefault(said["epoch"], []).append(said["loss"])
            if live.disable:
                console.print(words, highlight=False)

    console.print(f"\n[bold]{name}[/bold]", highlight=False)
    started_s = time.perf_counter()
    with live, heard(Path(job.pipe), receive):
        words = ["--nproc-per-node", str(ranks), "-m", "paceline.demo.training"]
        start(job, words, lambda line: console.print(line, highlight=False))
    outcomes.sort(key=lambda outcome: outcome["rank"])
    return {
        "name": name,
        # The ranks' slices are of equal size.
        "losses": [float(np.mean(of_ranks)) for _, of_ranks in sorted(losses.items())],
        "accuracy": outcomes[0]["accuracy"],
        "samples_per_s": sum(rank["samples_per_s"] for rank in outcomes),
        "wall_s": time.perf_counter() - started_s,
        "step_s": {part: float(np.mean([rank["step_s"][part] for rank in outcomes])) for part in STEP_PARTS},
        "ranks": outcomes,
    }


def difference(one: Path, other: Path, dtype: str) -> dict[str, Any]:
    """Return how far two files of parameters are apart, where, and whether the order of sums explains it."""
    with np.load(one) as ours, np.load(other) as theirs:
        apart = {name: float(np.abs(ours[name] - theirs[name]).max()) for name in ours.files}
        scale = max(float(np.abs(theirs[name]).max()) for name in theirs.files)
    where = max(apart, key=lambda name: np.inf if np.isnan(apart[name]) else apart[name])
    is_rounding = apart[where] <= ALLOWED_DIFFERENCE[dtype] * scale
    return {
        "largest": apart[where],
        "parameter": where,
        "scale": scale,
        "dtype": dtype,
        "is_rounding": is_rounding,
    }


def _show(console: Console, rows: dict[str, Any]) -> None:
    both, apart = rows["trainings"], rows["difference"]
    steps_s = [training["step_s"] for training in both]
    results = {
        "test accuracy": [f"{100 * training['accuracy']:.2f} %" for training in both],
        "final training loss": [f"{training['losses'][-1]:.6f}" for training in both],
        "samples/s, all ranks": [f"{training['samples_per_s']:,.0f}" for training in both],
        "seconds, with start-up": [f"{training['wall_s']:.1f}" for training in both],
    }
    parts = {part: [f"{1e3 * step_s[part]:.2f}" for step_s in steps_s] for part in STEP_PARTS}
    parts["step"] = [f"{1e3 * sum(step_s.values()):.2f}" for step_s in steps_s]
    for title, cells in (("Result", results), ("Where a step's time goes (ms)", parts)):
        table = Table("", title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for training in both:
            table.add_column(training["name"], justify="right")
        for name, row in cells.items():
            table.add_row(name, *row)
        console.print(table)
    agree = "bitwise the same" if rows["ranks_bitwise_equal"] else "[bold red]NOT the same[/bold red]"
    too_far = "[bold red]MORE than rounding[/bold red]"
    console.print(
        f"Parameters on the {len(both[0]['ranks'])} ranks: {agree}. Largest difference to one process: "
        f"{apart['largest']:.2e} (in {apart['parameter']}; parameters reach {apart['scale']:.2f}; {apart['dtype']}): "
        f"{'summation order, as promised' if apart['is_rounding'] else too_far}.",
        highlight=False,
    )
