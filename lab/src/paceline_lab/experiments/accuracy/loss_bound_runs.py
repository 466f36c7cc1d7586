"""One training run of the study of bounded loss: which gradients do not arrive, and how good the model becomes.

Four ranks are in one process, with the library's reduction between them and a `LossyMemory` in place of the network.
Each rank's messages to another lose exactly the bound of every bucket in every step. So a real network costs at most as
much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from paceline.errors import ConfigurationError
from paceline_lab.doubles.lossy_in_memory import LossPattern, LossyMemory
from paceline_lab.experiments.accuracy.splits import Part, Samples
from paceline_lab.experiments.accuracy.store import Trial
from paceline_lab.experiments.accuracy.tasks import TASKS
from paceline_lab.experiments.accuracy.trial_training import Reduced, batches
from paceline_lossy import BoundedLoss
from paceline_lossy.bounded_loss import COMPENSATIONS

RANDOM, TAIL, BURST = "random", "tail", "burst"
FRONT, BACK, SMALLEST, LARGEST = "front", "back", "smallest", "largest"
_GROUPS = ((RANDOM,), (TAIL, BURST), (FRONT, BACK, SMALLEST, LARGEST))
PATTERNS = tuple(itertools.chain(*_GROUPS))
_FIRST_SEEDS = 3  # of everything, before any cell gets more
_CHUNK_BYTES = (
    352  # a quarter of a datagram: these models then have as many chunks as ones four times as large
)
_SAMPLES = {"mlp": 16_384, "cnn": 12_288, "letter": 12_288, "bytes": 65_536, "digits": 1_024}


@dataclass(frozen=True)
class LossOptions:
    """The settings of the trainings, and of the losses.

    Attributes:
        model: A task of `TASKS`.
        bounds: Lost ratios. The baseline is 0.
        patterns: Patterns of `PATTERNS`; see `loss_pattern`.
        compensations: Compensations of `BoundedLoss`.
        num_seeds: Runs behind each mean.
        num_ranks: Number of ranks.
        num_train: Number of samples; 0: some thousands, by the task.
        epochs: Number of epochs.
    """

    model: str = "mlp"
    bounds: tuple[float, ...] = (0.0, 0.005, 0.01, 0.03, 0.1, 0.2, 0.3)
    patterns: tuple[str, ...] = PATTERNS
    compensations: tuple[str, ...] = COMPENSATIONS
    num_seeds: int = 3
    num_ranks: int = 4
    num_train: int = 0
    epochs: int = 2

    def __post_init__(self) -> None:
        if self.model not in TASKS:
            raise ConfigurationError(f"--model {self.model} must be one of {', '.join(TASKS)}.")
        if self.num_train == 0:
            object.__setattr__(self, "num_train", _SAMPLES[self.model])
        for option, given, known in (
            ("--patterns", self.patterns, PATTERNS),
            ("--compensations", self.compensations, COMPENSATIONS),
        ):
            if not set(given) <= set(known):
                raise ConfigurationError(f"{option} {','.join(given)}: there are {', '.join(known)}.")
        if 0.0 not in self.bounds:
            raise ConfigurationError("--bounds needs 0: the others are compared with it.")
        wrong = [f"{100 * bound:g}" for bound in self.bounds if not 0 <= bound <= 0.5]
        if wrong:
            raise ConfigurationError(
                f"--bounds {','.join(wrong)}: values are percentages from 0 to 50, because some patterns lose "
                "gradients of half of the layers only."
            )
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


@dataclass(frozen=True)
class LossTrial:
    """Everything that one training run depends on; the fields are those of `LossOptions` and `Case`."""

    model: str
    pattern: str
    compensation: str
    bound: float
    seed: int
    num_ranks: int
    num_train: int
    epochs: int

    @property
    def case(self) -> Case:
        """The cell to which it belongs."""
        return Case(self.bound, self.pattern, self.compensation)


@dataclass(frozen=True)
class LossOutcome:
    """The result of one run.

    Attributes:
        test_percent: Test accuracy.
        test_loss: Mean cross-entropy on the test set, nats; None where it is not finite.
    """

    test_percent: float
    test_loss: float | None


def cases(options: LossOptions, patterns: Iterable[str]) -> list[Case]:
    """The lossy cells of these patterns."""
    lossy = [bound for bound in options.bounds if bound > 0]
    return [Case(*each) for each in itertools.product(lossy, patterns, options.compensations)]


def trials(options: LossOptions) -> list[LossTrial]:
    """All runs. A stop leaves whole tables: random losses come first, and more seeds only once all cells have some."""
    found = []
    blocks = range(min(_FIRST_SEEDS, options.num_seeds)), range(_FIRST_SEEDS, options.num_seeds)
    for seeds, group in itertools.product(blocks, _GROUPS):
        todo = cases(options, [pattern for pattern in group if pattern in options.patterns])
        exact = [Case(0.0)] if group is _GROUPS[0] else []
        found += [_trial(case, seed, options) for seed in seeds for case in (*exact, *todo)]
    return found


def _trial(case: Case, seed: int, options: LossOptions) -> LossTrial:
    return LossTrial(
        options.model,
        case.pattern,
        case.compensation,
        case.bound,
        seed,
        options.num_ranks,
        options.num_train,
        options.epochs,
    )


def loss_pattern(case: Case, seed: int, num_ranks: int) -> LossPattern:
    """Return which chunks are lost: of all that is sent the same part, by the case's pattern and the seed alone.

    Of each transfer: random ones; those at its end; a run of neighbours; those of the smallest or largest mean
    magnitude. "front" and "back" take random ones, all of them of the first or last half of the model's elements.
    """
    num_front = num_ranks // 2

    def lose(collective: int, source: int, owner: int, magnitudes: NDArray[np.floating]) -> NDArray[np.bool_]:
        dice = np.random.default_rng((seed, collective, source, owner))
        chunks = len(magnitudes)
        exact = case.bound * chunks
        if case.pattern in (FRONT, BACK):
            is_front = owner < num_front
            num_hit = num_front if is_front else num_ranks - num_front
            exact *= num_ranks / num_hit if is_front == (case.pattern == FRONT) else 0
        count = min(chunks, int(exact) + int(dice.random() < exact - int(exact)))
        lost = np.zeros(chunks, bool)
        if case.pattern == TAIL:
            lost[chunks - count :] = True
        elif case.pattern == BURST:
            lost[(dice.integers(chunks) + np.arange(count)) % chunks] = True
        elif case.pattern == SMALLEST:
            lost[np.argsort(magnitudes, kind="stable")[:count]] = True
        elif case.pattern == LARGEST:
            lost[np.argsort(magnitudes, kind="stable")[chunks - count :]] = True
        else:
            lost[dice.choice(chunks, count, replace=False)] = True
        return lost

    return lose


def train(trial: LossTrial, samples: Samples) -> LossOutcome:
    """Train once. A loss that is no longer finite ends it; the model then counts as it is."""
    task, case = TASKS[trial.model], trial.case
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)
        model = task.make_model()
    world = LossyMemory(trial.num_ranks, loss_pattern(case, trial.seed, trial.num_ranks), _CHUNK_BYTES)
    combination = Reduced(
        model,
        trial.num_ranks,
        lambda: BoundedLoss(
            case.bound,
            compensation=case.compensation or COMPENSATIONS[0],
            connect=lambda group: world.transports[group.rank()],
        ),
    )
    size = task.rank_batch * trial.num_ranks
    order = Trial(task.name, "bounded_loss", trial.num_ranks, 0.0, trial.seed, trial.epochs, trial.num_train)
    num_steps = trial.epochs * trial.num_train // size
    rate = trial.num_ranks * task.middle_rates["sgd"]
    for step, batch in enumerate(batches(samples.train, size, order)):
        falling = rate * (1 - step / num_steps)
        loss = combination.step(samples.train.inputs[batch], samples.train.labels[batch], falling)
        if not math.isfinite(loss):
            break
    return outcome_of(model, samples.test)


@torch.no_grad()
def outcome_of(model: nn.Module, part: Part) -> LossOutcome:
    """Return how good a model is on these samples."""
    model.eval()
    num_right, total = 0, 0.0
    for inputs, labels in zip(part.inputs.split(1024), part.labels.split(1024), strict=True):
        logits = model(inputs)
        num_right += int((logits.argmax(dim=1) == labels).sum())
        total += functional.cross_entropy(logits, labels, reduction="sum").item()
    model.train()
    return LossOutcome(100 * num_right / len(part), total / len(part) if math.isfinite(total) else None)
