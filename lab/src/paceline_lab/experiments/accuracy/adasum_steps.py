"""Maleki et al. 2021: does Adasum need fewer steps than the mean, with Adam and LAMB, each at its best rate?

A BERT-shaped model (two layers of width 64) learns masked bytes of Shakespeare with 4 or 16 ranks, in one process. A
second part is least squares, whose optimum is known.

    mean      one optimizer on the mean of the ranks' gradients
    adasum    what `AdasumOptimizer` does: an optimizer a rank, whose updates Adasum combines. It is computed by
              `combine`, which the tests of `AdasumOptimizer` compare it with, for Adam and LAMB

Rules
1. A rate's quality is the number of steps to the target loss, interpolated between two evaluations. All trainings have
   the same validation windows. Rates grow linearly for the first 24 steps, then stay.
2. Rates are chosen with a seed that is not counted, from a grid by factors of two that grows until no edge is best.
3. A training that does not reach the target counts as the most steps; of two such, the lower loss is better.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from paceline.errors import ConfigurationError
from paceline.optim import LAMB
from paceline.reductions.adasum import combine
from paceline_lab.experiments.accuracy.large_batch_rows import set_rate
from paceline_lab.experiments.accuracy.store import TrialStore, complete
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    DataFolder,
    OnlyShow,
    ReportFolder,
    StoreFile,
    counts_in,
)
from paceline_lab.experiments.runner import Findings, Measured, Study, keeping, run_study
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE as MEAN_COLOR
from paceline_lab.report.look import OURS
from paceline_lab.report.panels import Line, Lines, Panel
from paceline_lab.report.summary import Spread, p_value
from paceline_lab.workloads.datasets import DATA_FOLDER, DOWNLOAD_SHAKESPEARE, load_text
from paceline_lab.workloads.transformer import MaskedWordModel

RANK_BATCH, LENGTH = 8, 16
MASK, MASKED_SHARE, IGNORED = 0, 0.25, -100  # no byte of the text is 0
MOST_STEPS, WARM_STEPS, EVERY = {16: 240, 4: 480}, 24, 8
TARGET = 2.9
NUM_SEEDS, CHOOSING_SEED = 5, 100
MEAN, ADASUM = "mean", "adasum"
SIDES = (MEAN, ADASUM)
OPTIMIZERS = {"adam": 1e-3, "lamb": 1.6e-2}  # the middle of the first grid
DIVERGED = 20.0  # nats: a loss that is not less
FIRST_GRID, MOST_POWER = (-1, 0, 1), 6  # powers of two


@dataclass(frozen=True)
class StepsTrial:
    """Everything that a training depends on: the exponents of the rate are of two, from the optimizer's middle."""

    optimizer: str
    side: str
    power: int
    seed: int
    num_ranks: int

    @property
    def rate(self) -> float:
        return OPTIMIZERS[self.optimizer] * 2.0**self.power


@dataclass(frozen=True)
class StepsOutcome:
    """The result of one training.

    Attributes:
        losses: Loss on the validation windows after every `EVERY` steps, up to the target.
        steps: Number of steps to the target, interpolated; None if it was not reached.
        wall_s: Duration of the training.
    """

    losses: list[float]
    steps: float | None
    wall_s: float


@cache
def windows(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Bytes to train on, and those to validate on.

    Raises:
        ConfigurationError: Shakespeare was not downloaded.
    """
    place = DATA_FOLDER if folder is None else folder
    text = load_text(place)
    if not text.is_shakespeare:
        raise ConfigurationError(f"Shakespeare is not in {place}. Fetch it: `{DOWNLOAD_SHAKESPEARE}`.")
    content = torch.frombuffer(bytearray(text.content), dtype=torch.uint8).long()
    cut = len(content) * 9 // 10
    return content[:cut], content[cut:]


class Neighbours(nn.Module):
    """Adds to each byte a convolution of it and the bytes next to it.

    Without it this model stays for hundreds of steps at what the bytes' frequencies tell, until attention has learnt
    which bytes stand beside each other.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape."""
        mixed: Tensor = self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + mixed


def network() -> MaskedWordModel:
    """Two encoder layers of width 64 on bytes."""
    model = MaskedWordModel(256, LENGTH, width=64, depth=2, num_heads=4)
    model.layers = nn.Sequential(Neighbours(64), *model.layers)
    for embedding in (model.words, model.positions):  # BERT's own: logits begin near 0, as the head is tied
        nn.init.normal_(embedding.weight, std=0.02)
    return model


def batch(content: Tensor, num: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return windows with masked bytes, shape (num, LENGTH), and the original bytes."""
    starts = torch.randint(len(content) - LENGTH, (num, 1), generator=source)
    words = content[starts + torch.arange(LENGTH)]
    masked = torch.rand(words.shape, generator=source) < MASKED_SHARE
    return words.masked_fill(masked, MASK), words.masked_fill(~masked, IGNORED)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the masked bytes, nats."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Adam or LAMB, without decay; its rate is set before each step."""
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), foreach=True)
    return LAMB(model.parameters(), lr=1.0, weight_decay=0.0)


def train(trial: StepsTrial, data: Path | None) -> StepsOutcome:
    """Train until the target is reached."""
    torch.set_num_threads(1)
    began_s = time.perf_counter()
    known, other = windows(data)
    torch.manual_seed(trial.seed)
    model = network()
    ranks = Ranks(model, trial)
    validation = batch(other, 384, torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(1_000 + trial.seed)
    losses = [DIVERGED]
    steps: float | None = None
    for step in range(1, MOST_STEPS[trial.num_ranks] + 1):
        rate = trial.rate * min(1.0, step / WARM_STEPS)
        ranks.step(*batch(known, trial.num_ranks * RANK_BATCH, source), rate)
        if step % EVERY == 0:
            with torch.no_grad():
                loss = float(loss_of(model, *validation))
            losses.append(round(loss, 4) if loss < DIVERGED else DIVERGED)  # not a number is not less
            if losses[-1] == DIVERGED:
                break
            if losses[-1] <= TARGET:
                steps = step - EVERY * (TARGET - losses[-1]) / (losses[-2] - losses[-1])
                break
    return StepsOutcome(losses[1:], steps, round(time.perf_counter() - began_s, 2))


class Ranks:
    """The ranks of one side; `model` holds the parameters that all have between steps."""

    def __init__(self, model: nn.Module, trial: StepsTrial) -> None:
        self.model, self.num_ranks = model, trial.num_ranks
        self.copies = [copy.deepcopy(model) for _ in range(trial.num_ranks)] if trial.side == "adasum" else []
        self.optimizers = [make_optimizer(trial.optimizer, each) for each in self.copies or [model]]

    def step(self, inputs: Tensor, targets: Tensor, rate: float) -> None:
        """One step of all with a global batch."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            set_rate(optimizer, rate)
        slices = list(zip(inputs.chunk(self.num_ranks), targets.chunk(self.num_ranks), strict=True))
        if not self.copies:
            for x, y in slices:  # masks differ in number: the mean of the ranks' means, as over processes
                (loss_of(self.model, x, y) / self.num_ranks).backward()
            self.optimizers[0].step()
            return
        parameters = list(self.model.parameters())
        with torch.no_grad():
            for each in self.copies:
                for own, start in zip(each.parameters(), parameters, strict=True):
                    own.copy_(start)
        for each, optimizer, (x, y) in zip(self.copies, self.optimizers, slices, strict=True):
            loss_of(each, x, y).backward()
            optimizer.step()
        with torch.no_grad():
            updates = [
                [end - start for end, start in zip(each.parameters(), parameters, strict=True)]
                for each in self.copies
            ]
            for parameter, update in zip(parameters, combine(updates), strict=True):
                parameter.add_(update)


@dataclass(frozen=True)
class Plan:
    """The trainings that the study needs, and the results that are stored."""

    store: TrialStore[StepsTrial, StepsOutcome]
    num_ranks: tuple[int, ...]
    num_seeds: int = NUM_SEEDS

    def cells(self) -> list[tuple[str, str, int]]:
        """Optimizer, side and ranks."""
        return [(name, side, ranks) for ranks in self.num_ranks for name in OPTIMIZERS for side in SIDES]

    def tried(self, cell: tuple[str, str, int]) -> dict[int, tuple[float, float]]:
        """Steps and last loss of each rate that the choosing seed has been tried with."""
        optimizer, side, ranks = cell
        found = {}
        for power in range(-MOST_POWER, MOST_POWER + 1):
            outcome = self.store.get(StepsTrial(optimizer, side, power, CHOOSING_SEED, ranks))
            if outcome is not None:
                found[power] = (self.steps_of(outcome, ranks), outcome.losses[-1])
        return found

    def steps_of(self, outcome: StepsOutcome, ranks: int) -> float:
        """Return the steps of a training; the most possible if it missed the target."""
        return float(MOST_STEPS[ranks]) if outcome.steps is None else outcome.steps

    def missing(self) -> list[StepsTrial]:
        """Return what can be run now: rates until the best is no edge, then its other seeds."""
        return [trial for cell in self.cells() for trial in self._missing_of(cell)]

    def _missing_of(self, cell: tuple[str, str, int]) -> list[StepsTrial]:
        optimizer, side, ranks = cell
        tried = self.tried(cell)
        wanted = [power for power in FIRST_GRID if power not in tried]
        best = self.best(cell)
        if not wanted and best is not None:
            wanted = [
                power for power in (best - 1, best + 1) if power not in tried and abs(power) <= MOST_POWER
            ]
        if wanted or best is None:
            return [StepsTrial(optimizer, side, power, CHOOSING_SEED, ranks) for power in wanted]
        trials = [StepsTrial(optimizer, side, best, seed, ranks) for seed in range(self.num_seeds)]
        return [trial for trial in trials if self.store.get(trial) is None]

    def best(self, cell: tuple[str, str, int]) -> int | None:
        """The power of the rate that the choosing seed liked best so far."""
        tried = self.tried(cell)
        return min(tried, key=lambda power: (tried[power], power)) if tried else None

    def outcomes(self, cell: tuple[str, str, int]) -> list[StepsOutcome]:
        """Return the outcomes at the best rate, by seed."""
        optimizer, side, ranks = cell
        best = self.best(cell)
        if best is None:
            return []
        trials = [StepsTrial(optimizer, side, best, seed, ranks) for seed in range(self.num_seeds)]
        return [outcome for outcome in map(self.store.get, trials) if outcome is not None]

    def spread(self, cell: tuple[str, str, int]) -> Spread | None:
        """Steps to the target."""
        found = self.outcomes(cell)
        return Spread(tuple(self.steps_of(one, cell[2]) for one in found)) if found else None


@dataclass(frozen=True)
class StepsStudy(Study[Plan]):
    """Train what is missing, solve the convex problem, and report what there is."""

    data: Path | None
    workers: int
    only_show: bool

    def report_name(self, options: Plan) -> str:
        return "adasum-steps"

    def measure(self, options: Plan) -> Measured:
        if not self.only_show:
            complete(options.store, options.missing, partial(train, data=self.data), self.workers)
        trials = [asdict(trial) | asdict(outcome) for trial, outcome in options.store.items()]
        num_missing = len(options.missing())
        notes = [f"not complete: {num_missing} trainings are missing; the same command goes on"]
        samples = {"trials": trials, "least squares": least_squares_table(options.num_seeds)}
        return Measured((options, samples), samples, notes if num_missing else [])

    def find(self, outcomes: tuple[Plan, dict[str, Any]], options: Plan) -> Findings:
        plan, samples = outcomes
        rows, summaries = [], {}
        for ranks in plan.num_ranks:
            for name, middle in OPTIMIZERS.items():
                mean, adasum = (plan.spread((name, side, ranks)) for side in SIDES)
                if mean is None or adasum is None:
                    continue
                rates = {side: middle * 2.0 ** (plan.best((name, side, ranks)) or 0) for side in SIDES}
                p = p_value(mean.values, adasum.values)
                rows.append(
                    (
                        f"{name}, {ranks} ranks",
                        *[f"{each} at {rates[side]:g}" for side, each in ((MEAN, mean), (ADASUM, adasum))],
                        f"{adasum.mean / mean.mean:.2f}",
                        f"{p:.3f}",
                    )
                )
                summaries[f"{name} {ranks}"] = {
                    MEAN: mean.mean,
                    ADASUM: adasum.mean,
                    "std": {MEAN: mean.std, ADASUM: adasum.std},
                    "fewer": 1 - adasum.mean / mean.mean,
                    "p": p,
                    "num_seeds": min(len(mean.values), len(adasum.values)),
                    "rates": rates,
                }
        squares = samples["least squares"]
        return Findings(
            f"How many steps do Adasum and the mean take to a loss of {TARGET}, each at its own best rate?",
            ("optimizer", MEAN, ADASUM, "adasum / mean", "p"),
            rows,
            (
                f"BERT-shaped, 2 layers of width 64, masked bytes; {RANK_BATCH} windows of {LENGTH} bytes a rank",
                f"mean ± standard deviation over {plan.num_seeds} seeds; the rates' seed is not among them",
                "p: exact permutation test, two-sided; no best rate is an edge of its grid",
                *[
                    f"least squares, {case}: {sides[MEAN]['left']:.0e} of the excess is left by the mean, "
                    f"{sides[ADASUM]['left']:.0e} by Adasum"
                    for case, sides in squares.items()
                ],
            ),
            {"steps": summaries, "least squares": squares},
        )

    def config(self, options: Plan) -> dict[str, Any]:
        return {"num_ranks": options.num_ranks, "num_seeds": options.num_seeds, "target": TARGET}

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        return draw(record, path)


# ---- least squares

SQUARES_RANKS, SQUARES_DIMENSIONS, SQUARES_ROWS, SQUARES_STEPS = 8, 20, 40, 2_000
SQUARES_RATES = tuple(0.0025 * 2.0**power for power in range(10))
# Case: noise of the observations, and how far each rank's inputs are from the others'.
SQUARES_CASES = {"one optimum for all ranks": (0.0, 0.5), "alike": (1.0, 0.0), "unlike": (1.0, 0.5)}


def least_squares_table(num_seeds: int) -> dict[str, Any]:
    """Return by case and side the excess loss after all steps: the median of the seeds, at the best rate."""
    table: dict[str, Any] = {}
    for case, (noise, apart) in SQUARES_CASES.items():
        table[case] = {}
        for side in SIDES:
            # By seed, then rate
            left = [least_squares(seed, side, noise, apart, SQUARES_STEPS) for seed in range(num_seeds)]
            medians = [statistics.median(of_rate) for of_rate in zip(*left, strict=True)]
            best = medians.index(min(medians))
            table[case][side] = {
                "left": medians[best],
                "each": [of_seed[best] for of_seed in left],
                "rate": SQUARES_RATES[best],
                "by rate": dict(zip(map(str, SQUARES_RATES), medians, strict=True)),
            }
    return table


def least_squares(seed: int, side: str, noise: float, apart: float, num_steps: int) -> list[float]:
    """The excess of the mean loss over its least, after all steps, as a part of the excess at the start; by rate.

    Args:
        seed: Seed of the problem.
        side: Combination of the ranks' whole gradients.
        noise: Standard deviation of what no parameters explain.
        apart: Difference of the ranks' inputs: each scales dimensions by its own factors.
        num_steps: Steps of gradient descent with a constant rate.
    """
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    scales = torch.exp(apart * normal(SQUARES_RANKS, 1, SQUARES_DIMENSIONS))
    x = normal(SQUARES_RANKS, SQUARES_ROWS, SQUARES_DIMENSIONS) * scales
    x /= x.square().mean().sqrt() * SQUARES_DIMENSIONS**0.5
    y = x @ normal(SQUARES_DIMENSIONS) + noise * normal(SQUARES_RANKS, SQUARES_ROWS) / SQUARES_DIMENSIONS**0.5
    optimum = torch.linalg.lstsq(x.flatten(0, 1), y.flatten()).solution
    # All rates at once: parameters (rates, dimensions), gradients (ranks, rates, dimensions)
    rates = torch.tensor(SQUARES_RATES, dtype=torch.float64)[:, None]
    products = x.transpose(1, 2) @ x / SQUARES_ROWS * SQUARES_DIMENSIONS
    targets = (x.transpose(1, 2) @ y[:, :, None])[:, :, 0] / SQUARES_ROWS * SQUARES_DIMENSIONS
    w = torch.zeros(len(rates), SQUARES_DIMENSIONS, dtype=torch.float64)
    for _ in range(num_steps):
        gradients = w @ products - targets[:, None, :]
        w = w - rates * (adasum_of(gradients) if side == ADASUM else gradients.mean(0))

    def excess(parameters: Tensor) -> float:
        # The loss less its least: a quadratic form of the distance, exact where the difference would round to 0.
        distance = parameters - optimum
        return float(torch.einsum("i,rij,j->", distance, products, distance))

    left = [excess(one) / excess(torch.zeros_like(optimum)) for one in w]
    return [value if math.isfinite(value) else DIVERGED for value in left]


def adasum_of(gradients: Tensor) -> Tensor:
    """Combine (ranks, problems, dimensions) as `combine` does, each problem by itself; ranks: 2, 4, 8, ..."""
    while len(gradients) > 1:
        a, b = gradients[0::2], gradients[1::2]
        dot = (a * b).sum(-1, keepdim=True) / 2
        squares = [each.square().sum(-1, keepdim=True).clamp_min(1e-300) for each in (a, b)]
        gradients = (1 - dot / squares[0]) * a + (1 - dot / squares[1]) * b
    return gradients[0]


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw the validation loss over steps, a panel for each optimizer and number of ranks."""
    panels: list[Panel] = []
    steps = record["summaries"]["steps"]
    for key, found in steps.items():
        optimizer, ranks = key.split()
        lines = []
        for side, color in ((MEAN, MEAN_COLOR), (ADASUM, OURS)):
            runs = [
                trial["losses"]
                for trial in record["samples"]["trials"]
                if (trial["optimizer"], trial["side"], str(trial["num_ranks"])) == (optimizer, side, ranks)
                and trial["seed"] != CHOOSING_SEED
                and math.isclose(OPTIMIZERS[optimizer] * 2.0 ** trial["power"], found["rates"][side])
            ]
            looks = [
                (EVERY * number, statistics.fmean(values), (min(values), max(values)))
                for number, values in enumerate(zip(*runs, strict=False), 1)
            ]
            points = [(float(at), mean) for at, mean, _ in looks]
            lines.append(Line(side, points, color, marker="", band=[band for *_, band in looks]))
        title = f"{optimizer.upper() if optimizer == 'lamb' else 'Adam'}, {ranks} ranks"
        panels.append(
            Lines(
                title, "step", "validation loss, nats", lines, bottom=2.7, top=5.0, levels={"target": TARGET}
            )
        )
    panels.append(_squares(record["summaries"]["least squares"]))
    title = "Adasum stops near the optimum of least squares, unless all ranks have the same one"
    note = "Eight ranks, whole gradients, a constant rate: the best of ten. 1e-9 stands for less."
    if steps:
        ratios = [found[ADASUM] / found[MEAN] for found in steps.values()]
        title = f"Adasum takes {min(ratios):.2f} to {max(ratios):.2f} of the mean's steps to a loss"
        masked = (
            "Masked bytes of Shakespeare: means and bands of all seeds, until the first is at the target."
        )
        note = f"{masked} Least squares: {note[0].lower()}{note[1:]}"
    return draw_figure(path, title, panels, note, columns=1 if len(panels) == 1 else 2)


def _squares(table: Mapping[str, Any]) -> Lines:
    """Return the panel of the excess loss by case. A loss below 1e-9 cannot be told from none."""
    cases = list(table)
    lines = [
        Line(
            side,
            [(float(at), max(1e-9, table[case][side]["left"])) for at, case in enumerate(cases)],
            color,
            "",
        )
        for side, color in ((MEAN, MEAN_COLOR), (ADASUM, OURS))
    ]
    words = ("one optimum\nfor all ranks", "alike", "unlike")
    return Lines(
        f"least squares after {SQUARES_STEPS} steps",
        "shards",
        "excess loss, of the start's",
        lines,
        dict(zip(map(float, range(len(cases))), words, strict=True)),
        y_ticks={10.0**-n: f"1e-{n}" for n in (9, 7, 5, 3, 1)},
    )


def main(
    data: DataFolder = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated: 4, 16.")] = "16",
    seeds: Annotated[int, typer.Option(min=1, help="Number of random seeds per mean.")] = NUM_SEEDS,
    workers: Annotated[int, typer.Option(min=1, help="Trainings at once, each on one core.")] = 1,
    store: StoreFile = None,
    report_folder: ReportFolder = REPORT_FOLDER,
    only_show: OnlyShow = False,
    as_json: AsJson = False,
) -> None:
    """Count the steps of Adasum and of the mean to a loss, with Adam and with LAMB, each at its own best rate."""
    file = store or report_folder / "adasum-steps.jsonl"
    numbers = counts_in("--ranks", ranks)
    if strays := set(numbers) - set(MOST_STEPS):
        raise ConfigurationError(f"--ranks: {min(strays)} is neither 4 nor 16.")
    plan = Plan(TrialStore(file, StepsTrial, StepsOutcome), tuple(sorted(numbers, reverse=True)), seeds)
    with keeping(file):
        found = run_study(StepsStudy(data, workers, only_show), plan, report_folder, as_json)
    if as_json:
        print(json.dumps(found.record()))
