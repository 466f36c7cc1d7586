"""Goyal et al. 2017 on a network with batch normalisation: batches up to 32 times as large, warm-ups, curves, BN's n.

A ResNet-20-shaped network (three stages, one residual block each) trains on Fashion-MNIST of 14 x 14 pixels. It follows
the paper:

1. 32 samples per worker, normalised by their statistics.
2. Nesterov momentum; decay by ten at a third, two thirds and eight ninths; warm-up for 5/90 of the training.
3. Zero-gamma; one shuffle for all workers.

The workers are in one process. `GhostBatchNorm` normalises each worker's samples by themselves within the global batch,
so gradients are those of workers. Running statistics are the mean of theirs.

Rules
1. The reference rate is chosen at the reference batch, by validation accuracy. It is the smallest of the grid within
   half a point of the best, and no edge of the grid. Rates over a factor of ten are as good as each other there. The
   smallest of them is the furthest from divergence.
2. Larger batches take it by their row's rule; nothing is tuned there.
3. BN's n varies at one global batch, from 4 samples to all of them, which is SyncBatchNorm. One row has workers that
   compute one after another, with rank 0's running statistics, as DistributedDataParallel broadcasts them.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.nn import functional

from paceline.errors import ConfigurationError
from paceline_lab.experiments.accuracy import splits
from paceline_lab.experiments.accuracy.in_process_ranks import backward_of_the_mean
from paceline_lab.experiments.accuracy.large_batch_rows import set_rate
from paceline_lab.experiments.accuracy.splits import Part, Samples
from paceline_lab.experiments.accuracy.store import TrialStore, complete
from paceline_lab.experiments.accuracy.tasks import MOMENTUM, WEIGHT_DECAY, residual_cnn
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    DataFolder,
    OnlyShow,
    ReportFolder,
    StoreFile,
)
from paceline_lab.experiments.runner import Findings, Measured, Study, keeping, run_study
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE as BASELINE_COLOR
from paceline_lab.report.look import CURVE_COLORS, LIMIT, OURS, PAPER
from paceline_lab.report.panels import Line, Lines, Panel
from paceline_lab.report.summary import Spread, p_value
from paceline_recipes import Curve, convert_ghost_batchnorm, parameter_groups, rate_factor

WORKER_BATCH = 32  # n, and the reference batch
EPOCHS, NUM_TRAIN, NUM_VALIDATION = 20, 8_192, 2_000
WARM_PART = 5 / 90
GRID = (0.0125, 0.025, 0.05, 0.1, 0.2)
NEAR = 0.005  # of the best accuracy
NUM_SEEDS, NUM_CHOOSING_SEEDS = 5, 2
BASELINE, GRADUAL = "small batch", "gradual warm-up"
# Row: how the rate grows with the batch, and how it warms up.
RULES = {
    BASELINE: ("none", "none"),
    GRADUAL: ("linear", "gradual"),
    "constant warm-up": ("linear", "constant"),
    "no warm-up": ("linear", "none"),
    "sqrt": ("sqrt", "gradual"),
    "unscaled": ("none", "none"),
}
FACTORS = (2, 4, 8, 16, 32)
BN_FACTOR = 8
# Row of BN's n: samples that are normalised together (0: the whole batch), and whether workers compute one by one.
PLAIN = "32 a worker"
STATISTICS = {
    "4 a worker": (4, False),
    "8 a worker": (8, False),
    PLAIN: (32, False),
    "32 a worker, rank 0's running statistics": (32, True),
    "128 a worker": (128, False),
    "all 256 (SyncBatchNorm)": (0, False),
}


@dataclass(frozen=True)
class ResnetTrial:
    """Everything that one training depends on.

    Attributes:
        row: Row of `RULES`.
        factor: Global batch over the reference batch.
        rate: The reference rate.
        seed: Seed of the parameters and of the samples' order.
        statistics: Name of `STATISTICS`.
        epochs: Number of epochs.
        num_train: Number of training samples.
    """

    row: str
    factor: int
    rate: float
    seed: int
    statistics: str = PLAIN
    epochs: int = EPOCHS
    num_train: int = NUM_TRAIN


@dataclass(frozen=True)
class ResnetOutcome:
    """The result of one training.

    Attributes:
        validation: Accuracy, 0 to 1; the rate is chosen by it.
        test: Accuracy, 0 to 1; only reported.
        losses: Mean training loss of each epoch; ends where a loss is not finite.
        errors: Error on the validation set after each epoch, 0 to 1.
        wall_s: Duration of the training.
    """

    validation: float
    test: float
    losses: list[float]
    errors: list[float]
    wall_s: float


@cache
def small_images(folder: Path | None, num_train: int) -> Samples:
    """Fashion-MNIST, each four pixels one."""
    samples = splits.fashion_mnist(folder, num_train)

    def halved(part: Part, most: int | None = None) -> Part:
        return Part(functional.avg_pool2d(part.inputs[:most], 2), part.labels[:most])

    return Samples(
        samples.source,
        halved(samples.train),
        halved(samples.validation, NUM_VALIDATION),
        halved(samples.test),
    )


def train(trial: ResnetTrial, data: Path | None) -> ResnetOutcome:
    """Train and measure; a training whose loss is not finite ends there and counts as it stands."""
    torch.set_num_threads(1)
    began_s = time.perf_counter()
    samples = small_images(data, trial.num_train)
    torch.manual_seed(trial.seed)
    group, one_by_one = STATISTICS[trial.statistics]
    batch = WORKER_BATCH * trial.factor
    num_passes = batch // group if one_by_one else 1
    model: nn.Module = residual_cnn(10, num_blocks=3)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if group and not one_by_one and group < batch:
        model = convert_ghost_batchnorm(model, group)
    optimizer = torch.optim.SGD(
        parameter_groups(model, WEIGHT_DECAY), lr=1.0, momentum=MOMENTUM, nesterov=True, foreach=True
    )
    scaling, warmup = RULES[trial.row]
    num_steps = trial.epochs * (trial.num_train // batch)
    curve = Curve(num_steps, round(WARM_PART * num_steps), warmup, decay="step")
    peak = trial.rate * rate_factor(scaling, trial.factor, 1)
    losses: list[float] = []
    errors: list[float] = []
    step = 0
    for epoch in range(trial.epochs):
        source = torch.Generator().manual_seed(1_000_003 * trial.seed + epoch)
        order = torch.randperm(trial.num_train, generator=source)
        total = 0.0
        for chosen in order.split(batch):
            set_rate(optimizer, curve.rate(step, trial.rate, peak))
            inputs, labels = samples.train.inputs[chosen], samples.train.labels[chosen]
            total += backward_of_the_mean(model, inputs, labels, num_passes)
            optimizer.step()
            step += 1
        if not math.isfinite(total):
            break
        losses.append(total * batch / trial.num_train)
        errors.append(1 - accuracy(model, samples.validation))
    return ResnetOutcome(
        1 - errors[-1] if errors else 0.0,
        accuracy(model, samples.test),
        [round(loss, 5) for loss in losses],
        [round(error, 5) for error in errors],
        round(time.perf_counter() - began_s, 2),
    )


@torch.no_grad()
def accuracy(model: nn.Module, part: Part) -> float:
    """Share of the samples that are put into the right class."""
    model.eval()
    right = sum(
        int((model(x).argmax(dim=1) == y).sum())
        for x, y in zip(part.inputs.split(500), part.labels.split(500), strict=True)
    )
    model.train()
    return right / len(part)


@dataclass(frozen=True)
class Plan:
    """The trainings that the study needs, and the results that are stored."""

    store: TrialStore[ResnetTrial, ResnetOutcome]
    num_seeds: int = NUM_SEEDS
    whole: bool = True  # or the most wanted cells only

    def reference_rate(self) -> float | None:
        """Return the rate of the grid at the reference batch; None while it is not known."""
        means = []
        for rate in GRID:
            found = [
                self.store.get(ResnetTrial(BASELINE, 1, rate, seed)) for seed in range(NUM_CHOOSING_SEEDS)
            ]
            if any(outcome is None for outcome in found):
                return None
            means.append(statistics.fmean(one.validation for one in found if one is not None))
        return next(rate for rate, mean in zip(GRID, means, strict=True) if mean >= max(means) - NEAR)

    def cells(self) -> list[list[tuple[str, int, str]]]:
        """Row, factor and statistics of every mean: the most wanted, then the others."""
        rows = [row for row in RULES if row != BASELINE]
        first = [(BASELINE, 1, PLAIN), *[(row, 32, PLAIN) for row in rows]]
        second = [(GRADUAL, 8, PLAIN)]
        second += [(GRADUAL, BN_FACTOR, which) for which in ("all 256 (SyncBatchNorm)", "8 a worker")]
        third = [(GRADUAL, 16, PLAIN)]
        fourth = [(row, factor, PLAIN) for factor in (8, 16, 4, 2) for row in rows]
        fourth += [(GRADUAL, BN_FACTOR, which) for which in STATISTICS]
        return [first, second, third, fourth] if self.whole else [first, second, third]

    def missing(self) -> list[ResnetTrial]:
        """Return the missing trials that can be computed now."""
        rate = self.reference_rate()
        if rate is None:
            wanted: Iterable[ResnetTrial] = (
                ResnetTrial(BASELINE, 1, one, seed) for seed in range(NUM_CHOOSING_SEEDS) for one in GRID
            )
        else:
            wanted = (
                ResnetTrial(row, factor, rate, seed, which)
                for cells in self.cells()
                for seed in range(self.num_seeds)
                for row, factor, which in cells
            )
        return [trial for trial in dict.fromkeys(wanted) if self.store.get(trial) is None]

    def outcomes(self, row: str, factor: int, which: str = PLAIN) -> list[ResnetOutcome]:
        """Return the stored outcomes, by seed."""
        rate = self.reference_rate()
        if rate is None:
            return []
        trials = [ResnetTrial(row, factor, rate, seed, which) for seed in range(self.num_seeds)]
        return [outcome for outcome in map(self.store.get, trials) if outcome is not None]

    def spread(self, row: str, factor: int, which: str = PLAIN) -> Spread | None:
        """Test accuracies in percent; None while seeds are missing."""
        found = self.outcomes(row, factor, which)
        return Spread(tuple(100 * one.test for one in found)) if len(found) == self.num_seeds else None


@dataclass(frozen=True)
class ResnetStudy(Study[Plan]):
    """Train what is missing, and report what there is."""

    data: Path | None
    workers: int
    only_show: bool

    def report_name(self, options: Plan) -> str:
        return "resnet-batches"

    def measure(self, options: Plan) -> Measured:
        if not self.only_show:
            complete(options.store, options.missing, partial(train, data=self.data), self.workers)
        trials = [asdict(trial) | asdict(outcome) for trial, outcome in options.store.items()]
        num_missing = len(options.missing())
        missing = f"not complete: {num_missing} trainings are missing; the same command goes on"
        return Measured(options, {"trials": trials}, [missing] if num_missing else [])

    def find(self, outcomes: Plan, options: Plan) -> Findings:
        factors = FACTORS
        baseline = outcomes.spread(BASELINE, 1)
        rows = [
            (row, *[_text(outcomes.spread(row, factor)) for factor in factors])
            for row in RULES
            if row != BASELINE
        ]
        at_one_batch = {which: outcomes.spread(GRADUAL, BN_FACTOR, which) for which in STATISTICS}
        first = outcomes.outcomes(BASELINE, 1)
        return Findings(
            "Up to which batch does the linear rule with warm-up keep a network with batch normalisation as it is?",
            ("accuracy, %", *[f"x{factor} ({factor * WORKER_BATCH})" for factor in factors]),
            rows,
            (
                f"small batch ({WORKER_BATCH}): {baseline} at {outcomes.reference_rate()}, of the grid {GRID}",
                f"{NUM_TRAIN:,} images of 14 x 14, {EPOCHS} epochs at any batch, {options.num_seeds} seeds",
                "test accuracies, mean ± standard deviation; p: exact permutation test, two-sided",
            ),
            {
                "baseline": _stored(baseline, baseline),
                "rate": outcomes.reference_rate(),
                "cells": {
                    f"{row} x{factor}": _stored(outcomes.spread(row, factor), baseline)
                    for row in RULES
                    for factor in factors
                    if outcomes.spread(row, factor) is not None
                },
                "statistics": {
                    which: _stored(spread, at_one_batch[PLAIN]) for which, spread in at_one_batch.items()
                },
                "grid": {str(rate): _choosing(outcomes, rate) for rate in GRID},
                "seconds": statistics.fmean(one.wall_s for one in first) if first else None,
            },
        )

    def config(self, options: Plan) -> dict[str, Any]:
        return {"epochs": EPOCHS, "num_train": NUM_TRAIN, "num_seeds": options.num_seeds, "grid": GRID}

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        return draw(record, path)


def _choosing(plan: Plan, rate: float) -> list[float]:
    found = [plan.store.get(ResnetTrial(BASELINE, 1, rate, seed)) for seed in range(NUM_CHOOSING_SEEDS)]
    return [one.validation for one in found if one is not None]


def _text(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread}"


def _stored(spread: Spread | None, other: Spread | None) -> dict[str, Any] | None:
    if spread is None or other is None:
        return None
    return {
        "mean": spread.mean,
        "std": spread.std,
        "num_seeds": len(spread.values),
        "lost": other.mean - spread.mean,
        "p": p_value(spread.values, other.values),
    }


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw the paper's figures 1 to 4: accuracy by batch, warm-ups, and both curves of every batch."""
    rate = record["summaries"]["rate"]
    trials = [trial for trial in record["samples"]["trials"] if trial["rate"] == rate]
    warm_ups = {row: (row, 32, color) for row, color in _COLORS.items() if row not in ("sqrt", "unscaled")}
    batches = {BASELINE: (BASELINE, 1, LIMIT)}
    batches |= {
        f"{factor * WORKER_BATCH:,}": (GRADUAL, factor, color)
        for factor, color in zip(FACTORS, (PAPER, *CURVE_COLORS[1:4], OURS), strict=True)
    }
    panels: list[Panel] = [
        _batches(record["summaries"]),
        _curves(trials, "warm-ups at 32 times the batch (figure 2)", "errors", warm_ups),
        _curves(trials, "gradual warm-up, by batch (figure 3)", "losses", batches),
        _curves(trials, "gradual warm-up, by batch (figure 4)", "errors", batches),
    ]
    kept = [
        factor
        for factor in FACTORS
        if (cell := record["summaries"]["cells"].get(f"{GRADUAL} x{factor}")) and cell["lost"] <= 1
    ]
    most = f"Up to {max(kept)} times" if kept else "At no multiple of"
    title = f"{most} the batch, linear scaling with warm-up keeps accuracy to within a point"
    note = (
        f"ResNet of three stages, Fashion-MNIST of 14 x 14 pixels, {NUM_TRAIN:,} images, {EPOCHS} epochs, "
        f"{record['config']['num_seeds']} seeds; bands: all seeds. Figures: of Goyal et al. 2017."
    )
    return draw_figure(path, title, panels, note, columns=2)


_COLORS = dict(zip(RULES, (LIMIT, OURS, BASELINE_COLOR, *CURVE_COLORS[4:1:-1]), strict=True))


def _curves(
    trials: list[dict[str, Any]], title: str, key: str, lines: Mapping[str, tuple[str, int, str]]
) -> Lines:
    """A line for each row and factor with all its seeds: their mean at each epoch, in the band of all."""
    drawn = []
    for label, (row, factor, color) in lines.items():
        at = 1 if row == BASELINE else factor
        runs = [
            trial[key]
            for trial in trials
            if (trial["row"], trial["factor"], trial["statistics"]) == (row, at, PLAIN)
            and trial["seed"] < NUM_SEEDS
        ]
        scale = 100 if key == "errors" else 1
        epochs = [[scale * one for one in epoch] for epoch in zip(*runs, strict=False)]
        if epochs and len(runs) == NUM_SEEDS:
            points = [(number, statistics.fmean(values)) for number, values in enumerate(epochs, 1)]
            band = [(min(values), max(values)) for values in epochs]
            drawn.append(Line(label, points, color, marker="", band=band))
    what, bottom, top = ("validation error, %", 8.0, 60.0) if key == "errors" else ("training loss", 0.0, 1.5)
    return Lines(title, "epoch", what, drawn, bottom=bottom, top=top)


def _batches(summaries: Mapping[str, Any]) -> Lines:
    lines = []
    for row, color in _COLORS.items():
        cells = {factor: summaries["cells"].get(f"{row} x{factor}") for factor in FACTORS}
        points = [(float(factor), cell["mean"]) for factor, cell in cells.items() if cell]
        if points:
            lines.append(Line(row, points, color))
    return Lines(
        "accuracy by batch (figure 1)",
        "global batch, samples",
        "test accuracy, %",
        lines,
        {float(f): f"{f * WORKER_BATCH:,}" for f in FACTORS},
        log_x=True,
        bottom=70.0,
        levels={BASELINE: summaries["baseline"]["mean"]},
    )


def main(
    data: DataFolder = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of random seeds per mean.")] = NUM_SEEDS,
    whole: Annotated[bool, typer.Option("--whole/--core", help="All cells, or the first ones only.")] = True,
    workers: Annotated[int, typer.Option(min=1, help="Trainings at once, each on one core.")] = 1,
    store: StoreFile = None,
    report_folder: ReportFolder = REPORT_FOLDER,
    only_show: OnlyShow = False,
    as_json: AsJson = False,
) -> None:
    """Train a small ResNet with batches up to 32 times as large by every rule, and with every n of normalisation."""
    file = store or report_folder / "resnet-batches.jsonl"
    if only_show and not file.exists():
        raise ConfigurationError(f"there are no trainings in {file} yet. Leave out --only-show.")
    plan = Plan(TrialStore(file, ResnetTrial, ResnetOutcome), seeds, whole)
    with keeping(file):
        found = run_study(ResnetStudy(data, workers, only_show), plan, report_folder, as_json)
    if as_json:
        print(json.dumps(found.record()))
