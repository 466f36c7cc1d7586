"""`paceline demo doctor`: make one rank of a torch job slow, ask the doctor, repair it, score the prediction."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from paceline.diagnosis import Diagnosis
from paceline.diagnosis.findings import diagnose_folder
from paceline.diagnosis.remedies import scored
from paceline.launch import LaunchError, Watchdog
from paceline.launch.recorded_command import run_recorded

_SLOW_AFTER = 30


def run_slow_rank(console: Console) -> Diagnosis:
    """Record a job with a slow rank, then without; returns the first diagnosis. Raises LaunchError if a job fails."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets it too, and prints a banner about it
    script = Path(__file__).with_name("slow_script.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        str(script),
    ]
    console.print(
        "[bold]paceline demo doctor[/bold]: four ranks of a script with torch's own DDP, as it is.\n"
        f"After step {_SLOW_AFTER} the disk of one of them becomes slow. All ranks then seem equally slow.\n\n"
        "[bold]1[/bold]  $ paceline doctor -- torchrun --nproc-per-node 4 train.py",
        highlight=False,
    )
    with Watchdog(uuid.uuid4().hex) as watchdog:
        before, after = watchdog.folder / "before", watchdog.folder / "after"
        slow = [*command, str(_SLOW_AFTER)]
        diagnosis = _record(slow, before, lambda line: _print(console, line, "yellow"))
        _print(console, diagnosis.words, "yellow")
        console.print("\n[bold]2[/bold]  The same with a good disk", highlight=False)
        _record(command, after, lambda _: None)
        for line in scored(diagnose_folder(before), diagnose_folder(after)):
            _print(console, line, "green")
    return diagnosis


def _print(console: Console, words: str, style: str) -> None:
    console.print(Padding(Text(words, style), (0, 0, 0, 3)))


def _record(command: list[str], folder: Path, note: Callable[[str], None]) -> Diagnosis:
    """Run the job with its ranks recorded. `note` gets what the doctor says meanwhile."""
    diagnosis, code = run_recorded(command, folder, None, note)
    if code:
        raise LaunchError(f"the job of the demo ended with exit code {code}; its output is above.")
    return diagnosis
