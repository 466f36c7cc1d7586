"""Runs of the training in which ranks die, compared with a run that lost no rank, bit by bit."""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from device.late import build
from device.nccl.exchange import FOLDER, GARBAGE
from harness import terminal

TRAINING = Path(__file__).with_name("training.py")
_SHARED = Path("/dev/shm")
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Run:
    """One job of four ranks.

    Attributes:
        deaths: What happens to ranks, "RANK STEP MOMENT" each (`training.py`).
        optimizer: A name of `training.OPTIMIZERS`.
        lead: Steps that the host may be ahead.
        schedule: Of the device.
        hears_late_s: Seconds after which rank 0 hears of a loss.
        garbage: What an abort leaves: "old" bytes or "wild" ones.
        options: Further options of the training.
        mutant: What is left out.
        limit_s: After which the job hangs.
    """

    deaths: tuple[str, ...] = ()
    optimizer: str = "adamw"
    lead: int = 2
    schedule: str = "latest"
    hears_late_s: float = 0.0
    garbage: str = "old"
    options: tuple[str, ...] = ()
    mutant: str = ""
    limit_s: float = 150.0

    @property
    def rounding(self) -> float | None:
        """How far parameters may be from the CPU's, by the ranks' number or the device's kernels; None: not at all."""
        said = " ".join(self.options)
        if "sync-batch-norm" in said or "compression" in said:
            return math.inf  # they depend on the number of ranks: finite, and the same on all ranks
        return _ROUNDING if "--ordinary" in said or self.optimizer == "lars" else None


@dataclass(frozen=True)
class Outcome:
    """What a job has left.

    Attributes:
        wrong: What does not hold, in words; "" if all does.
        num_killed: Processes that were killed, by the launcher's words.
        ends: What each rank has saved.
        said: The launcher's output.
    """

    wrong: str
    num_killed: int
    ends: list[dict[str, Any]]
    said: str


def perform(run: Run, folder: Path, num_ranks: int = 4) -> Outcome:
    """Run a job in this folder, and compare."""
    expected = _expected(run.optimizer, _healthy(run.options), num_ranks)
    code, said, ends = _started(run, folder, num_ranks, on_device=True)
    return Outcome(_compared(code, ends, expected, run), said.count("was killed by SIGKILL"), ends, said)


def _healthy(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return the options of the run that loses no rank, without those that leave its bits as they are."""
    kept = [each for each in options if each not in ("--saves", "--reads-loss")]
    for name in ("--fails-with-peer", "--behind", "--pause"):
        if name in kept:
            place = kept.index(name)
            del kept[place : place + 2]
    return tuple(kept)


@functools.cache
def _expected(optimizer: str, options: tuple[str, ...], num_ranks: int) -> dict[str, Any]:
    """Return what one rank has left of the run that lost no rank: on the CPU, if its kernels compute the same bits."""
    folder = Path(tempfile.mkdtemp(prefix="late-expected-"))
    try:
        code, said, ends = _started(
            Run(optimizer=optimizer, options=options), folder, num_ranks, on_device="--autocast" in options
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if code != 0 or len(ends) != num_ranks:
        raise RuntimeError(f"the run that loses no rank ended with {code}:\n{said[-3000:]}")
    return ends[0]


def _started(
    run: Run, folder: Path, num_ranks: int, on_device: bool
) -> tuple[int | None, str, list[dict[str, Any]]]:
    build.ensure()
    out = folder / "end"
    options = ["--optimizer", run.optimizer, *run.options, "--device", "late" if on_device else "cpu"]
    if on_device:
        options += ["--deaths", ";".join(run.deaths), "--lead", str(run.lead), "--schedule", run.schedule]
        options += ["--hears-late", str(run.hears_late_s), "--mutant", run.mutant]
    command = [
        "paceline",
        "run",
        "--nproc-per-node",
        str(num_ranks),
        "--min-ranks",
        "2",
        str(TRAINING),
        str(out),
        *options,
    ]
    parts = Path(tempfile.mkdtemp(prefix="late-", dir=_SHARED if _SHARED.is_dir() else None))
    env = {FOLDER: str(parts), GARBAGE: run.garbage}
    code, said = None, ""
    try:
        with terminal.started(command, folder, env) as process:
            said = "".join(process.communicate(timeout=run.limit_s))
            code = process.returncode
    except subprocess.TimeoutExpired:
        pass
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return code, said, [torch.load(each) for each in sorted(folder.glob("end.rank*.pt"))]


def _compared(code: int | None, ends: list[dict[str, Any]], expected: dict[str, Any], run: Run) -> str:
    """Return what does not hold of the ranks' ends, in words; "" if all does."""
    if code != 0:
        return "hangs" if code is None else f"exit {code}"
    if not ends:
        return "no rank came to its end"
    for end in ends:
        for part in ("state", "kept", "buffers"):
            for number, (one, other) in enumerate(zip(end[part], ends[0][part], strict=True)):
                if not torch.equal(one, other):
                    return f"ranks differ in {part} {number}"
            for number, (one, other) in enumerate(zip(end[part], expected[part], strict=True)):
                gap = (one.double() - other.double()).abs().max().item()
                # A gap that is no number is none that is allowed.
                if not (gap <= run.rounding if run.rounding is not None else torch.equal(one, other)):
                    return f"{part} {number} differs by {gap:.3g}"
        if end["ahead"] > run.lead:
            return f"a host was {end['ahead']} steps ahead, and {run.lead} are allowed"
        for part in ("step", "rate", "scale"):
            if end[part] != expected[part]:
                return f"{part} is {end[part]} instead of {expected[part]}"
    return ""
