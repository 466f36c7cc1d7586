"""The demo on a terminal: progress while it trains, tables when it is done."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from paceline.demo.comparison import STEP_PARTS, Difference, Training, mean_parts_s
from paceline.demo.progress_pipe import Progress as RankProgress
from paceline_lab.report import table
from paceline_lab.workloads.datasets import Images


class Screen:
    """Where the demo shows what it does.

    On a terminal every rank has a line that moves; elsewhere (a pipe, a CI log) every epoch of rank 0 is a line.

    Args:
        console: Where to write; a quiet console shows nothing.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Progress | None = None
        self._tasks: dict[int, object] = {}
        self._lock = threading.Lock()

    def note(self, line: str) -> None:
        """Show one line."""
        self._console.print(line, highlight=False)

    def begin(self, images: Images, num_ranks: int, epochs: int, global_batch: int, dtype: str) -> None:
        """Say what is going to happen."""
        self._console.print(
            f"[bold]paceline demo[/bold]: {images.name}, {len(images.train_labels):,} training and "
            f"{len(images.test_labels):,} test images of {images.side} x {images.side} pixels; {epochs} epochs of "
            f"batches of {global_batch} in {dtype}, first over {num_ranks} process(es) with "
            "paceline.DistributedDataParallel on Gloo, then the same batches in one process.",
            highlight=False,
        )

    @contextlib.contextmanager
    def training(self, name: str, num_ranks: int, epochs: int) -> Iterator[None]:
        """Show one training while it runs."""
        self._console.print(f"\n[bold]{name}[/bold]", highlight=False)
        self._epochs = epochs
        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("rank {task.fields[rank]}"),
            BarColumn(bar_width=24),
            TextColumn("epoch {task.fields[epoch]:>2}/{task.fields[epochs]}"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} samples/s"),
        )
        with Progress(*columns, console=self._console) as live:
            self._live = live
            self._tasks = {
                rank: live.add_task(
                    "", total=epochs, rank=rank, epoch=0, epochs=epochs, loss="   -  ", speed="   -"
                )
                for rank in range(num_ranks)
            }
            try:
                yield
            finally:
                self._live = None

    def update(self, report: RankProgress) -> None:
        """Show how far a rank is; called on the inbox's thread."""
        with self._lock:
            if self._live is not None:
                self._live.update(
                    self._tasks[report.rank],  # type: ignore[arg-type]
                    completed=report.epoch - 1 + report.step / report.num_steps,
                    epoch=report.epoch,
                    loss=f"{report.loss:.4f}",
                    speed=f"{report.samples_per_s:,.0f}",
                )
            elif report.epoch_done:
                self._console.print(
                    f"rank {report.rank}  epoch {report.epoch:>2}/{self._epochs}  loss {report.loss:.4f}  "
                    f"{report.samples_per_s:,.0f} samples/s",
                    highlight=False,
                )

    def end(self, parallel: Training, single: Training, apart: Difference, files: list[Path]) -> None:
        """Show what came out."""
        both = (parallel, single)
        self._console.print()
        self._console.print(
            table(
                "Result",
                ("", *(training.name for training in both)),
                [
                    ("test accuracy", *(f"{100 * training.accuracy:.2f} %" for training in both)),
                    ("final training loss", *(f"{training.losses[-1]:.6f}" for training in both)),
                    ("samples/s, all ranks", *(f"{training.samples_per_s:,.0f}" for training in both)),
                    ("seconds, with start-up", *(f"{training.wall_s:.1f}" for training in both)),
                ],
            )
        )
        parts = {training.name: mean_parts_s(training) for training in both}
        self._console.print(
            table(
                "Where a step's time goes (ms)",
                ("", *parts),
                [
                    *(
                        (part, *(f"{1e3 * parts_s[i]:.2f}" for parts_s in parts.values()))
                        for i, part in enumerate(STEP_PARTS)
                    ),
                    ("step", *(f"{1e3 * sum(parts_s):.2f}" for parts_s in parts.values())),
                ],
            )
        )
        self._console.print(_verdict(parallel, apart), highlight=False)
        self._console.print(
            "Report: " + ", ".join(str(path) for path in files), highlight=False, soft_wrap=True
        )


def _verdict(parallel: Training, apart: Difference) -> str:
    ranks = len(parallel.outcomes)
    agree = "bitwise the same" if parallel.ranks_agree else "[bold red]NOT the same[/bold red]"
    explained = (
        "summation order, as promised" if apart.is_rounding else "[bold red]MORE than rounding[/bold red]"
    )
    return (
        f"Parameters on the {ranks} ranks: {agree}. Largest difference to one process: {apart.largest:.2e} (in "
        f"{apart.parameter}; parameters reach {apart.scale:.2f}; {apart.dtype}): {explained}."
    )
