"""Provenance of a measurement: command, commit, versions, machine and its load."""

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
from paceline_lab.checkout import repository

SOURCES = tuple(
    f":/{folder}src" for folder in ("", "adasum/", "lab/", "lossy/", "plan/", "recipes/", "servers/", "svm/")
)  # not results


@dataclass(frozen=True)
class Provenance:
    """Everything that is needed to run a benchmark again, and to distrust it."""

    command: str
    date: str
    paceline_version: str
    git_hash: str  # of the checkout that this package was imported from; "unknown" without one
    git_dirty: bool  # uncommitted changes of `SOURCES`
    torch_version: str
    python_version: str
    cpu_model: str
    num_cores: int
    num_ranks: int
    num_threads_per_rank: int
    load_average_before: float  # of the last minute, when the command began: a busy machine shows here
    load_average_after: float
    environment: dict[str, str] = field(default_factory=dict)


def load_average() -> float:
    """Return the number of runnable processes, averaged over one minute."""
    return round(os.getloadavg()[0], 2)


_LOAD_AT_START = load_average()


def collect(
    num_ranks: int, load_average_before: float | None = None, num_threads_per_rank: int = 1
) -> Provenance:
    """Describe this run, after it.

    Args:
        num_ranks: Number of ranks of the largest job.
        load_average_before: Load before the measurement; None: when this process began.
        num_threads_per_rank: Number of threads that computed on each rank.
    """
    return Provenance(
        command=_command(),
        date=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        paceline_version=paceline.__version__,
        git_hash=_git("rev-parse", "HEAD") or "unknown",
        git_dirty=bool(_git("status", "--porcelain", "--", *SOURCES)),
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        cpu_model=_cpu_model(),
        num_cores=os.cpu_count() or 0,
        num_ranks=num_ranks,
        num_threads_per_rank=num_threads_per_rank,
        load_average_before=_LOAD_AT_START if load_average_before is None else load_average_before,
        load_average_after=load_average(),
        environment={
            key: os.environ[key] for key in sorted(os.environ) if key.startswith(("GLOO_", "OMP_", "TORCH_"))
        },
    )


def _command() -> str:
    words = "paceline" if Path(sys.argv[0]).name in ("paceline", "__main__.py") else f"python {sys.argv[0]}"
    return " ".join([words, shlex.join(sys.argv[1:])]).strip()


def _git(*arguments: str) -> str:
    """Return git's output about this package's checkout; empty if it was installed from a wheel."""
    root = repository()
    if root is None:
        return ""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
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
