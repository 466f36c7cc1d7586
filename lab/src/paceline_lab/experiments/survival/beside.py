"""The same training and the same kills under Paceline, torchrun's restart and torchft: what each costs, and loses.

Rules
1. Sides take turns, so that whatever else the machine does hits all; medians are compared.
2. A step's time is of rank 0, from one completed step to the next, without kills. What is measured from a kill is until
   any rank has completed a step that had not been completed before: a step that is only done again does not count.
3. Samples: of those that the epochs have, how many changed the final parameters, and how many did so twice.
4. Time limits are each side's defaults; torchft's lighthouse as its command starts it. Its replicas wait for each other
   before the first step: those that start sooner would train alone.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigurationError
from paceline_lab.bench.provenance import collect
from paceline_lab.experiments.survival.beside_training import KINDS
from paceline_lab.experiments.survival.job import Outcome, read_notes, trained
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, OURS
from paceline_lab.report.panels import Bar, Bars
from paceline_lab.report.summary import Summary

_SCRIPT = "paceline_lab.experiments.survival.beside_training"
_LIMIT_S = 600.0  # on a busy machine
_RANKS, _EPOCHS, _STEPS, _BATCH = 3, 2, 100, 48
_KILLS = ("40:2", "120:1")  # in which step, which rank: one that is there, whether or not the first is back
_WARM = 10
_MOST_RESTARTS = 10


@dataclass
class Side:
    """The measurements of one launcher.

    Attributes:
        steps_ms: Median step of each run without kills.
        to_next_s: Time from each kill to the next step that had not been completed before.
        share_trained: Part of the samples of all epochs that counts in the final parameters, of each run with kills.
        num_twice: Samples that counted twice in an epoch, of each such run.
        num_again: Steps that were computed again, those that were not completed included, of each such run.
        failures: Runs that did not end well, with their last output.
    """

    steps_ms: list[float] = field(default_factory=list)
    to_next_s: list[float] = field(default_factory=list)
    share_trained: list[float] = field(default_factory=list)
    num_twice: list[int] = field(default_factory=list)
    num_again: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def words(self, name: str) -> str:
        """Return the measurements in a line."""
        if not self.steps_ms or not self.to_next_s:
            return f"{name}: nothing was measured; {'; '.join(self.failures)}"
        share = statistics.fmean(self.share_trained) * 100
        return (
            f"{name}: a step {statistics.median(self.steps_ms):.1f} ms; from a kill to the next step "
            f"{statistics.median(self.to_next_s):.2f} s ({min(self.to_next_s):.2f} to {max(self.to_next_s):.2f}, "
            f"{len(self.to_next_s)} kills); {share:.2f} % of the samples trained, {sum(self.num_twice)} twice; "
            f"{statistics.fmean(self.num_again):.1f} steps again a run; {len(self.failures)} failures"
        )


def compare(kinds: Sequence[str], rounds: int, path: Path | None) -> dict[str, Side]:
    """Run all sides in turn; what has been measured is stored after each run."""
    if unknown := set(kinds) - set(KINDS):
        raise ConfigurationError(f"--beside: {', '.join(sorted(unknown))}. Possible are {', '.join(KINDS)}.")
    sides = {kind: Side() for kind in kinds}
    loads = []
    for _, kills, kind in itertools.product(range(rounds), ((), _KILLS), kinds):
        _measure(kind, kills, sides[kind])
        loads.append(round(os.getloadavg()[0], 1))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {"provenance": asdict(collect(_RANKS)), "loads": loads}
            whole = {**about, "sides": {name: asdict(side) for name, side in sides.items()}}
            path.write_text(json.dumps(whole, indent=2) + "\n")
    return sides


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw what is stored: seconds from a kill to the next new step, and a step without kills."""
    num_kills = {kind: len(side["to_next_s"]) for kind, side in record["sides"].items()}
    if not num_kills["paceline"]:
        return False  # its runs failed, which was said

    def bars(name: str) -> list[Bar]:
        return [
            Bar(kind, Summary.of(side[name]), OURS if kind == "paceline" else BASELINE)
            for kind, side in record["sides"].items()
            if side[name]
        ]

    panels = [
        Bars("From a kill to the next new step", "seconds; lower is better", bars("to_next_s")),
        Bars("A step without kills", "ms; lower is better", bars("steps_ms")),
    ]
    kills = ", ".join(f"{kind} {number}" for kind, number in num_kills.items())
    note = f"three ranks over Gloo on two cores; medians, whiskers are quartiles; kills: {kills}"
    ours_s = statistics.median(record["sides"]["paceline"]["to_next_s"])
    return draw_figure(
        path, f"With Paceline the next new step is done {ours_s:.2f} s after a kill", panels, note
    )


def _measure(kind: str, kills: Sequence[str], side: Side) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, said = _run(kind, kills, folder)
        outcome = Outcome(
            code, said, [read_notes(file) for file in sorted(folder.glob("rank-*.jsonl"))], [], 0
        )
    if code != 0:
        side.failures.append(f"{kind} {'with' if kills else 'without'} kills: code {code}: {said[-300:]}")
        return
    if not kills:
        side.steps_ms.append(_median_step_ms(outcome))
        return
    counts = trained(outcome, _STEPS * _BATCH, _EPOCHS)
    notes = [note for each in outcome.notes for note in each]
    counted: Counter[tuple[int, int]] = Counter()
    under = {
        note["step"]: max(n["under"] for n in notes if n["what"] == "done" and n["step"] == note["step"])
        for note in notes
        if note["what"] == "done"
    }
    for note in notes:
        if note["what"] == "try" and under.get(note["step"]) == note["under"]:
            counted.update((note["of"], each) for each in note["samples"])
    total = _EPOCHS * _STEPS * _BATCH
    side.share_trained.append(sum(epoch < _EPOCHS for epoch, _ in counted) / total)
    side.num_twice.append(sum(count > 1 for count in counted.values()))
    side.num_again.append(counts.num_tries - counts.num_steps)
    side.to_next_s += _to_next_s(notes)


def _median_step_ms(outcome: Outcome) -> float:
    times: list[float] = max(
        ([n["at"] for n in notes if n["what"] == "done"] for notes in outcome.notes), key=len
    )
    return statistics.median(b - a for a, b in itertools.pairwise(times[_WARM:])) * 1e3


def _to_next_s(notes: Sequence[dict[str, Any]]) -> list[float]:
    done = sorted((note["at"], note["step"]) for note in notes if note["what"] == "done")
    found = []
    for kill in (note["at"] for note in notes if note["what"] == "fault"):
        furthest = max((step for at, step in done if at <= kill), default=-1)
        later = [at for at, step in done if at > kill and step > furthest]
        found += [later[0] - kill] if later else []
    return found


def _run(kind: str, kills: Sequence[str], folder: Path) -> tuple[int | None, str]:
    """Return a training's exit code (None: it had to be ended) and output."""
    words = ["-m", _SCRIPT, kind, str(folder), "--ranks", str(_RANKS), "--epochs", str(_EPOCHS)]
    words += ["--steps", str(_STEPS), "--batch", str(_BATCH), *(w for k in kills for w in ("--kill", k))]
    restarts = ["--max-restarts", str(_MOST_RESTARTS if kills else 0)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", *restarts]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if kind == "torchrun":
        # torch 2.13's restarted ranks else share a store with those before, and find the addresses of dead ones in it
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with ExitStack() as stack, (folder / "said.txt").open("w") as said:
        if kind == "guest":
            environment |= {"PACELINE_PEERS": "local", "PACELINE_RANKS_PER_HOST": str(_RANKS)}
            environment |= {
                "PACELINE_JOB_FOLDER": str(folder)
            }  # what torchrun starts after the end trains nothing
        if kind == "torchft":
            environment |= {"TORCHFT_LIGHTHOUSE": stack.enter_context(_lighthouse(folder, environment, said))}
        if kind == "paceline":
            run = [sys.executable, "-m", "paceline", "run", "--min-ranks", "1"]
            commands = [[*run, "--nproc-per-node", str(_RANKS), *words]]
        elif kind == "torchrun":
            commands = [[*torchrun, "--standalone", "--nproc-per-node", str(_RANKS), *words]]
        else:
            commands = [[*torchrun, "--standalone", "--nproc-per-node", "1", *words]] * _RANKS
        processes = [
            stack.enter_context(_ended(command, {**environment, "REPLICA_GROUP_ID": str(number)}, said))
            for number, command in enumerate(commands)
        ]
        until_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < until_s and any(each.poll() is None for each in processes):
            time.sleep(0.1)
        codes = [each.poll() for each in processes]
    code = None if None in codes else next((code for code in codes if code), 0)
    return code, (folder / "said.txt").read_text()


@contextmanager
def _ended(
    command: Sequence[str], environment: dict[str, str], said: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process, and end it with its children afterwards."""
    process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _lighthouse(folder: Path, environment: dict[str, str], said: Any) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    start = folder / "lighthouse.py"  # it reads the process's arguments behind a file's name
    start.write_text("from torchft._torchft import lighthouse_main\nlighthouse_main()\n")
    words = ["--min_replicas", "1", "--bind", f"127.0.0.1:{port}"]
    with _ended([sys.executable, str(start), *words], environment, said) as process:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
