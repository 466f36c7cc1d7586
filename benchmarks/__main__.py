"""All benchmarks, one after another: `python -m benchmarks [--quick]`.

Each runs as its own command, printed before it starts, so that any line can be repeated alone.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.options import REPOSITORY, RESULTS_FOLDER, Quick, ResultsFolder, run_cli

WORKLOADS = ("tiny", "wide_mlp", "resnet50", "transformer", "mlstm")  # those that two cores can compute
WITHOUT_SIDES = (
    "optimizers",
    "svm",
    "svm_ranks",
    "adasum",
    "adasum_updates",
    "collectives",
    "compression",
    "auto_compression",
    "unequal",
    "forward_overlap_loss",
    "time_to_loss",
    "hetseq_table",
    "guidelines",
    "minibatch_memory",
    "predicted_steps",
    "predicted_papers",
    "fuzz",
)
SKIPPED_CASES = ("depth", "backbone")
SERVER_CASES = ("lemma", "symmetric", "asymmetric")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("overhead",),
    ("memory",),
    ("overlap", "--rate", "1Gbit", "--rounds", "5") if os.geteuid() == 0 else ("overlap",),
    *(
        [
            ("forward_overlap",),
            ("forward_overlap_loss",),
            ("bucket_caps",),
            *[("skipped_layers", "--case", case) for case in SKIPPED_CASES],
        ]
        if os.geteuid() == 0
        else []
    ),
    *[("parameter_servers", "--case", case) for case in SERVER_CASES if os.geteuid() == 0],
    ("optimizers",),
    ("adasum",),
    ("adasum", "--ranks", "4"),
    *([("adasum", "--hosts", "2", "--rate", "1Gbit")] if os.geteuid() == 0 else []),
    *([("adasum_updates",)] if os.geteuid() == 0 else []),
    ("collectives",),
    ("compression",),
    *([("auto_compression",), ("time_to_loss",)] if os.geteuid() == 0 else []),
    ("unequal",),
    ("hetseq_table",),
    ("guidelines",),
    ("minibatch_memory",),
    ("predicted_steps",),
    ("predicted_papers",),
    ("svm",),
    ("svm_ranks",),
    ("fuzz",),
    *[
        ("step_time", "--workload", workload, "--ranks", ranks)
        for ranks in ("2", "1")
        for workload in WORKLOADS
    ],
)


def main(
    quick: Quick = False,
    sides: Annotated[str | None, typer.Option(help="Compare these; default: each benchmark's own.")] = None,
    results_folder: ResultsFolder = RESULTS_FOLDER,
) -> None:
    """Run everything; go on after a failure, and exit with 1 if there was one."""
    failed = []
    for command in COMMANDS:
        arguments = [*command, "--results-folder", str(results_folder.resolve())]
        arguments += ["--quick"] if quick else []
        arguments += ["--sides", sides] if sides and command[0] not in WITHOUT_SIDES else []
        if _run(arguments) != 0:
            failed.append(shlex.join(command))
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
        sys.exit(1)


def _run(arguments: list[str]) -> int:
    print(f"\n$ python -m benchmarks.{shlex.join(arguments)}", flush=True)
    module = [sys.executable, "-m", f"benchmarks.{arguments[0]}", *arguments[1:]]
    return subprocess.run(module, cwd=REPOSITORY, env=_environment(), check=False).returncode


def _environment() -> dict[str, str]:
    """Return our environment, with a checkout's `src` importable where the package is not installed."""
    source = str(Path(REPOSITORY, "src"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), source]))}


if __name__ == "__main__":
    run_cli(main)
