"""One training run: a task, a row, a global batch, a rate and a seed in; accuracies out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.lab.study.combinations import make_combination
from paceline.lab.study.rates import rate_at
from paceline.lab.study.rows import ROWS
from paceline.lab.study.samples import Part, Samples
from paceline.lab.study.store import Outcome, Trial
from paceline.lab.study.tasks import TASKS


def run_trial(trial: Trial, samples: Samples) -> Outcome:
    """Train and measure. A run whose loss is no longer finite ends there, and counts as it stands."""
    start_s = time.perf_counter()
    task, row = TASKS[trial.task], ROWS[trial.row]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)
        model = task.make_model()
    combination = make_combination(row, model, trial.factor)
    num_steps = trial.epochs * trial.num_train // (task.rank_batch * trial.factor)
    losses = []
    for step, batch in enumerate(batches(samples.train, task.rank_batch * trial.factor, trial)):
        rate = rate_at(row, trial.rate, trial.factor, step, num_steps)
        losses.append(combination.step(samples.train.inputs[batch], samples.train.labels[batch], rate))
        if not math.isfinite(losses[-1]):
            break
    combination.finish()
    tail = losses[-max(1, len(losses) // 10) :]
    loss = sum(tail) / len(tail)
    return Outcome(
        accuracy(model, samples.validation),
        accuracy(model, samples.test),
        loss if math.isfinite(loss) else None,
        combination.sent_bytes / len(losses),
        round(time.perf_counter() - start_s, 3),
    )


def batches(part: Part, size: int, trial: Trial) -> Iterator[Tensor]:
    """Yield each global batch's samples: one shuffle an epoch, the same for every row and batch of a seed."""
    for epoch in range(trial.epochs):
        source = torch.Generator().manual_seed(1_000_003 * trial.seed + epoch)
        order = torch.randperm(len(part), generator=source)
        yield from order[: len(order) // size * size].split(size)


@torch.no_grad()
def accuracy(model: nn.Module, part: Part) -> float:
    """Which share of the samples the model puts into the right class."""
    model.eval()
    pairs = zip(part.inputs.split(1024), part.labels.split(1024), strict=True)
    num_right = sum(int((model(x).argmax(dim=1) == y).sum()) for x, y in pairs)
    model.train()
    return num_right / len(part)
