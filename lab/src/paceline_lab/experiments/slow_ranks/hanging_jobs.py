"""One job of three ranks under `paceline run` of which one hangs or takes long, and what was said of it."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline_lab.experiments.slow_ranks.hanging_training import HANGS, NUM_STEPS

NUM_RANKS, WITHIN_S = 3, 10.0
_LIMIT_S, _END_S = 180.0, 60.0
_TRAINING = "paceline_lab.experiments.slow_ranks.hanging_training"
_LAST_LINE = "explain hang"  # of what is said of a hang


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        how: A name in `HANGS` or `LONG`.
        wrapper: Library whose DDP trains.
        seed: Seed of the rank and the step.
    """

    how: str
    wrapper: str
    seed: int

    @property
    def rank(self) -> int:
        return self._draw().randrange(NUM_RANKS)

    @property
    def step(self) -> int:
        draw = self._draw()
        draw.random()
        return 1 if "first step" in self.how else draw.randrange(3, NUM_STEPS - 2)

    def _draw(self) -> random.Random:
        return random.Random(f"{self.how} {self.wrapper} {self.seed}")


@dataclass(frozen=True)
class Said:
    """The messages about a job that hung or took long.

    Attributes:
        how: See `Case`.
        wrapper: See `Case`.
        seed: See `Case`.
        rank: Rank that hung or took long.
        step: Step at which it did.
        told_s: Time from there until the first message; None: there was none.
        lines: Lines that the launcher wrote, from the first about a hang.
        told_ranks: Ranks whose own standard error had the message.
        code: Exit code of the launcher.
        analyzer: Last words of torch's analyzer of dumps.
        fewest: Rank whose dump had fewest entries; -1: several.
        load: Load of the machine at the end.
    """

    how: str
    wrapper: str
    seed: int
    rank: int
    step: int
    told_s: float | None
    lines: tuple[str, ...]
    told_ranks: tuple[int, ...]
    code: int
    analyzer: str = ""
    fewest: int = -1
    load: float = 0.0

    @property
    def is_hang(self) -> bool:
        return self.how in HANGS

    @property
    def is_in_time(self) -> bool:
        return self.told_s is not None and self.told_s <= WITHIN_S

    @property
    def is_rank_right(self) -> bool:
        """Return whether the first line names the rank, or all ranks where they are in different collectives."""
        first = self.lines[0] if self.lines else ""
        if self.how == "enters another collective":
            return (
                "different collectives" in first
                and f"rank {self.rank} is in torch.distributed.barrier" in first
            )
        return f"hang: rank {self.rank} is missing" in first

    @property
    def is_collective_right(self) -> bool:
        """Return whether the first line names what the other ranks wait for: this step's gradients."""
        first = self.lines[0] if self.lines else ""
        return "gradients" in first and f"step {self.step}," in first

    @property
    def is_stack_right(self) -> bool:
        """The line of the script that hangs. Who entered another collective is said by that."""
        if self.how == "enters another collective":
            return self.is_rank_right
        return any(f"{HANGS[self.how].__name__} (" in line for line in self.lines[1:-1])

    @property
    def is_everywhere(self) -> bool:
        """Return whether each other rank's standard error and the launcher's last message say it."""
        others = set(range(NUM_RANKS)) - {self.rank}
        return others <= set(self.told_ranks) and "Before that: hang: " in self.lines[-1]


def run(case: Case) -> Said:
    """Run one job to its end, or until something is said of a hang. Blocks for a minute at most."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(NUM_RANKS)]
        words += ["--log-dir", str(folder / "logs"), "--redirects", "2", "-m", _TRAINING]
        words += [str(folder), case.how, str(case.rank), str(case.step), case.wrapper]
        more = {"OMP_NUM_THREADS": "1"}
        if case.wrapper == "torch" and case.how in HANGS:
            more["TORCH_FR_BUFFER_SIZE"] = "2000"
        process = subprocess.Popen(
            words, stderr=subprocess.PIPE, text=True, env={**os.environ, **more}, start_new_session=True
        )
        try:
            at_s, lines = _listen(process)
            reached = folder / f"reached.{case.rank}"
            told_s = None if at_s is None or not reached.exists() else at_s - float(reached.read_text())
            logs = {path.parent.name: path.read_text() for path in folder.glob("logs/**/stderr.log")}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        analyzer, fewest = _flight(folder / "flight") if told_s is not None else ("", -1)
        told = (int(rank) for rank, text in logs.items() if "paceline: hang:" in text)
        return Said(
            **asdict(case),
            rank=case.rank,
            step=case.step,
            told_s=told_s,
            lines=tuple(lines),
            told_ranks=tuple(sorted(told)),
            code=process.returncode,
            analyzer=analyzer,
            fewest=fewest,
            load=os.getloadavg()[0],
        )


def _listen(process: subprocess.Popen[str]) -> tuple[float | None, list[str]]:
    """Return the time of the first line about a hang, and all lines from there on; then end the process with Ctrl-C."""
    assert process.stderr is not None
    limit = threading.Timer(_LIMIT_S, process.send_signal, (signal.SIGINT,))
    limit.start()
    at_s, lines = None, []
    for line in process.stderr:
        if at_s is None and "hang:" in line:
            at_s = time.monotonic()
        if at_s is not None:
            lines.append(line.strip().removeprefix("paceline: "))
        if _LAST_LINE in line:
            process.send_signal(signal.SIGINT)
    limit.cancel()
    process.wait(_END_S)
    return at_s, lines


def _flight(folder: Path) -> tuple[str, int]:
    if not folder.exists():
        return "", -1
    counts = {x.name: len(pickle.loads(x.read_bytes())["entries"]) for x in folder.iterdir()}
    least = [
        int(name.removeprefix("rank_")) for name, count in counts.items() if count == min(counts.values())
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-p", "rank_"],
        capture_output=True,
        text=True,
        check=False,
    )
    words = (done.stdout + done.stderr).strip().splitlines()
    return " ".join(words[-3:])[-300:], (least[0] if len(least) == 1 else -1)
