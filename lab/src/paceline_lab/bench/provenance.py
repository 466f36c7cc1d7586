"""Where a number comes from: command, commit, versions, machine and its load."""

import datetime as dt
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

import paceline

PACKAGE = Path(paceline.__file__).resolve().parent


@dataclass(frozen=True)
class Provenance:
    """Everything that is needed to run a benchmark again, and to distrust it."""

    command: str
    date: str
    paceline_version: str
    git_hash: str  # of the checkout that paceline was imported from; "unknown" without one
    git_dirty: bool  # uncommitted changes under src/ or benchmarks/ (results aside)
    torch_version: str
    python_version: str
    cpu_model: str
    num_cores: int
    num_ranks: int
    num_threads_per_rank: int
    load_average_before: float  # 1 minute; a busy machine shows here
    load_average_after: float
    environment: dict[str, str] = field(default_factory=dict)


def collect(num_ranks: int, load_average_before: float, num_threads_per_rank: int = 1) -> Provenance:
    """Describe this run, after it."""
    return Provenance(
        command=_command(),
        date=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        paceline_version=paceline.__version__,
        git_hash=_git("rev-parse", "HEAD") or "unknown",
        git_dirty=bool(
            _git("status", "--porcelain", "--", ":/src", ":/lab", ":/benchmarks", ":!/benchmarks/results")
        ),
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        cpu_model=_cpu_model(),
        num_cores=os.cpu_count() or 0,
        num_ranks=num_ranks,
        num_threads_per_rank=num_threads_per_rank,
        load_average_before=load_average_before,
        load_average_after=load_average(),
        environment={
            key: os.environ[key] for key in sorted(os.environ) if key.startswith(("GLOO_", "OMP_", "TORCH_"))
        },
    )


def load_average() -> float:
    """Return the number of runnable processes, averaged over one minute."""
    return round(os.getloadavg()[0], 2)


def _command() -> str:
    program = Path(sys.argv[0])
    if program.name == "paceline" or program.resolve().parent == PACKAGE:
        return shlex.join(["paceline", *sys.argv[1:]])
    name = program.stem if program.name != "__main__.py" else program.parent.name
    return shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])


def _git(*arguments: str) -> str:
    """What git says about the checkout that this package lies in; nothing where it was installed from a wheel."""
    if PACKAGE.parent.name != "src":
        return ""
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if not information.exists():
        return platform.processor()
    names = [
        line.split(":", 1)[1].strip() for line in information.read_text().splitlines() if "model name" in line
    ]
    return names[0] if names else platform.processor()
