"""The study of bounded loss: what gradients that do not arrive cost in accuracy, on real data.

Four ranks in one process, with the library's reduction between them and a `LossyMemory` in place of the network: of
what a rank sends another of a bucket, exactly the bound is lost in every step, so a real network costs at most as much.

Source:
    Wang et al. 2020 (DLCP): 0.6 to 3.5 % cost no further epochs, 10 % do not harm the quality that is reached at last.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import ConfigurationError
from paceline.lab.report.figures import draw_figure
from paceline.lab.report.look import ROW_COLORS
from paceline.lab.report.panels import Line, Lines
from paceline.lab.report.terminal import progress_bar
from paceline.lab.studies.description import Findings, Measured, Study
from paceline.lab.studies.splits import Samples
from paceline.lab.studies.store import Trial
from paceline.lab.studies.tasks import TASKS
from paceline.lab.studies.trial_training import Reduced, accuracy, batches
from paceline.reductions import BoundedLoss
from paceline.reductions.bounded_loss_mean import COMPENSATIONS
from paceline.transports.lossy_in_memory import LossPattern, LossyMemory

RANDOM, TAIL, BURST = "random", "tail", "burst"
PATTERNS = (RANDOM, TAIL, BURST)
_MARGIN = 0.5  # percentage points that count as a loss of accuracy
_CHUNK_BYTES = 352  # a quarter of a datagram: this model then has as many chunks as one four times as large


@dataclass(frozen=True)
class LossOptions:
    """What is trained, and what is lost.

    Attributes:
        model: A task of `TASKS`.
        bounds: Lost ratios; 0 is what the others are compared with.
        patterns: Which chunks: any, those at the vector's end, or one run of neighbours.
        compensations: As of `BoundedLoss`.
        num_seeds: Runs behind each mean.
        num_ranks: Ranks.
        num_train: Samples.
        epochs: How often they are seen.
    """

    model: str = "mlp"
    bounds: tuple[float, ...] = (0.0, 0.01, 0.03, 0.1, 0.2, 0.3)
    patterns: tuple[str, ...] = PATTERNS
    compensations: tuple[str, ...] = COMPENSATIONS
    num_seeds: int = 3
    num_ranks: int = 4
    num_train: int = 16_384
    epochs: int = 2

    def __post_init__(self) -> None:
        if self.model not in TASKS:
            raise ConfigurationError(f"--model {self.model} is none of {', '.join(TASKS)}.")
        if 0.0 not in self.bounds:
            raise ConfigurationError("--bounds needs 0: the others are compared with it.")
        if self.num_train % (TASKS[self.model].rank_batch * self.num_ranks):
            raise ConfigurationError(
                f"{self.num_train} samples do not divide into steps of {self.num_ranks} ranks with "
                f"{TASKS[self.model].rank_batch} samples each."
            )


QUICK = LossOptions(
    model="digits", bounds=(0.0, 0.3), patterns=(RANDOM,), num_seeds=1, num_train=1024, epochs=1
)


@dataclass(frozen=True)
class Case:
    """One cell: what is lost, and what is done about it. A bound of 0 has neither pattern nor compensation."""

    bound: float
    pattern: str = ""
    compensation: str = ""


def cases(options: LossOptions) -> list[Case]:
    """All cells, that without loss first."""
    lossy = [bound for bound in options.bounds if bound > 0]
    return [
        Case(0.0),
        *(Case(*each) for each in itertools.product(lossy, options.patterns, options.compensations)),
    ]


def loss_pattern(case: Case, seed: int) -> LossPattern:
    """Which chunks are lost: of every transfer the same number, by the case's pattern and the seed alone."""

    def lose(collective: int, source: int, owner: int, chunks: int) -> NDArray[np.bool_]:
        dice = np.random.default_rng((seed, collective, source, owner))
        exact = case.bound * chunks
        count = int(exact) + (dice.random() < exact - int(exact))
        lost = np.zeros(chunks, bool)
        if case.pattern == TAIL:
            lost[chunks - count :] = True
        elif case.pattern == BURST:
            lost[(dice.integers(chunks) + np.arange(count)) % chunks] = True
        else:
            lost[dice.choice(chunks, count, replace=False)] = True
        return lost

    return lose


def train(case: Case, seed: int, options: LossOptions, samples: Samples) -> float:
    """Train once; returns the test accuracy in percent. A loss that is no longer finite ends it."""
    task = TASKS[options.model]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.make_model()
    world = LossyMemory(options.num_ranks, loss_pattern(case, seed), _CHUNK_BYTES)
    combination = Reduced(
        model,
        options.num_ranks,
        lambda: BoundedLoss(
            case.bound,
            compensation=case.compensation or COMPENSATIONS[0],
            connect=lambda group: world.transports[group.rank()],
        ),
    )
    size = task.rank_batch * options.num_ranks
    trial = Trial(task.name, "bounded_loss", options.num_ranks, 0.0, seed, options.epochs, options.num_train)
    num_steps = options.epochs * options.num_train // size
    rate = options.num_ranks * task.middle_rates["sgd"]
    for step, batch in enumerate(batches(samples.train, size, trial)):
        falling = rate * (1 - step / num_steps)
        loss = combination.step(samples.train.inputs[batch], samples.train.labels[batch], falling)
        if not math.isfinite(loss):
            break
    return 100 * accuracy(model, samples.test)


class LossStudy(Study[LossOptions]):
    """Accuracy by bound, pattern and compensation.

    Args:
        data: Where the samples are; None: the usual places.
    """

    def __init__(self, data: Path | None = None) -> None:
        self._data = data

    def report_name(self, options: LossOptions) -> str:
        return f"loss-bound-{options.model}"

    def measure(self, options: LossOptions) -> Measured:
        samples = TASKS[options.model].load(self._data, options.num_train)
        found: dict[Case, list[float]] = {}
        todo = cases(options)
        with progress_bar(f"loss-bound, {options.model}") as progress:
            for number, case in enumerate(todo):
                found[case] = [train(case, seed, options, samples) for seed in range(options.num_seeds)]
                progress((number + 1) / len(todo))
        return Measured(
            found, {"trials": [asdict(case) | {"test_percent": values} for case, values in found.items()]}
        )

    def find(self, outcomes: Mapping[Case, Sequence[float]], options: LossOptions) -> Findings:
        exact = outcomes[Case(0.0)]
        rows = [("none", "", *(_show(exact) if bound == 0 else "" for bound in options.bounds))]
        highest = {}
        for pattern, compensation in itertools.product(options.patterns, options.compensations):
            cells = {bound: outcomes.get(Case(bound, pattern, compensation), ()) for bound in options.bounds}
            rows.append((pattern, compensation, *(_show(values) for values in cells.values())))
            highest[f"{pattern}, {compensation}"] = _harmless(cells, exact)
        task = TASKS[options.model]
        return Findings(
            "What do gradients that are lost cost in accuracy?",
            ("lost", "compensation", *(f"{100 * bound:g} %" for bound in options.bounds)),
            rows,
            (
                (
                    f"{task.title}: {options.num_train:,} samples, {options.epochs} epochs, {options.num_ranks} ranks "
                    f"with {task.rank_batch} samples each; test accuracy in %, mean ± standard deviation over "
                    f"{options.num_seeds} seeds"
                ),
                (
                    "of every transfer exactly the bound is lost, in every step, before shards are summed; momentum, a "
                    "rate that falls linearly"
                ),
                f"harmless is a bound up to which each mean is within {_MARGIN} points of that without loss",
            ),
            {"harmless_up_to": highest, "without_loss": statistics.fmean(exact)},
        )

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        trials = record["samples"]["trials"]
        exact = next(statistics.fmean(t["test_percent"]) for t in trials if t["bound"] == 0)
        panels = []
        for pattern in dict.fromkeys(t["pattern"] for t in trials if t["pattern"]):
            lines = []
            for compensation, color in zip(COMPENSATIONS, ROW_COLORS, strict=False):
                points = [
                    (100 * t["bound"], statistics.fmean(t["test_percent"]))
                    for t in trials
                    if (t["pattern"], t["compensation"]) == (pattern, compensation)
                ]
                lines.append(Line(compensation, [(0.0, exact), *points], color))
            values = [y for line in lines for _, y in line.points]
            panels.append(
                Lines(
                    f"lost: {pattern}",
                    "of every transfer, %",
                    "test accuracy, %",
                    [line for line in lines if len(line.points) > 1],
                    bottom=min(values) - 1,
                    levels={"without loss": exact},
                )
            )
        worst = min(statistics.fmean(t["test_percent"]) for t in trials)
        title = f"Without loss {exact:.1f} % are right, in the worst case {worst:.1f} %"
        return draw_figure(path, title, panels, record["notes"][0], columns=len(panels))


def _show(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def _harmless(cells: Mapping[float, Sequence[float]], exact: Sequence[float]) -> float:
    """The largest bound up to which nothing is lost of the accuracy."""
    highest = 0.0
    for bound, values in sorted(cells.items()):
        if values and statistics.fmean(values) < statistics.fmean(exact) - _MARGIN:
            break
        highest = bound
    return highest
