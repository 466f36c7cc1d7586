"""What is trained on what, from which small batch and rates one starts, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from paceline.errors import ConfigurationError
from paceline.lab.study import models, samples
from paceline.lab.study.samples import Samples

MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4


@dataclass(frozen=True)
class Task:
    """One line of the table of tasks.

    Attributes:
        name: As `--model` takes it.
        title: For people.
        load: From a folder (None: the usual places) and the number of training samples.
        make_model: From the global random state.
        num_train: Training samples; every global batch divides it, so each sees the same samples in an epoch.
        rank_batch: Samples a rank has in each step, whatever the number of ranks: the reference batch.
        epochs: The budget, the same for every global batch.
        middle_rates: An optimizer's rate at the reference batch, in the middle of its grid.
    """

    name: str
    title: str
    load: Callable[[Path | None, int], Samples]
    make_model: Callable[[], nn.Module]
    num_train: int
    rank_batch: int
    epochs: int
    middle_rates: Mapping[str, float]

    def steps(self, factor: int) -> int:
        """Steps of a whole training with `factor` ranks."""
        return self.epochs * self.num_train // (self.rank_batch * factor)


TASKS = {
    task.name: task
    for task in (
        Task(
            "mlp",
            "MLP 784-256-128-10 on Fashion-MNIST",
            samples.fashion_mnist,
            partial(models.mlp, 784, 256, 128, 10),
            num_train=49_152,
            rank_batch=64,
            epochs=2,
            middle_rates={"sgd": 0.02, "lars": 0.2, "lamb": 0.004},
        ),
        Task(
            "cnn",
            "residual CNN with batch normalisation on Fashion-MNIST",
            samples.fashion_mnist,
            partial(models.residual_cnn, 10),
            num_train=12_288,
            rank_batch=32,
            epochs=4,
            middle_rates={"sgd": 0.04, "lars": 0.2, "lamb": 0.008},
        ),
        Task(
            "letter",
            "MLP 16-128-128-26 on Letter",
            samples.letter,
            partial(models.mlp, 16, 128, 128, 26),
            num_train=12_288,
            rank_batch=32,
            epochs=12,
            middle_rates={"sgd": 0.04, "lars": 0.2, "lamb": 0.008},
        ),
        Task(
            "bytes",
            "byte model on Shakespeare",
            samples.text_bytes,
            partial(models.byte_model, samples.BYTE_CONTEXT),
            num_train=65_536,
            rank_batch=64,
            epochs=4,
            middle_rates={"sgd": 0.1, "lars": 0.2, "lamb": 0.004},
        ),
        Task(
            "digits",
            "MLP 64-64-32-10 on handwritten digits",
            samples.digits,
            partial(models.mlp, 64, 64, 32, 10),
            num_train=1_024,
            rank_batch=16,
            epochs=16,
            middle_rates={"sgd": 0.02, "lars": 0.2, "lamb": 0.008},
        ),
    )
}


def find_task(name: str) -> Task:
    """Return the task of this name.

    Raises:
        ConfigurationError: There is none.
    """
    if name not in TASKS:
        raise ConfigurationError(f"--model {name} is not one of {', '.join(TASKS)}.")
    return TASKS[name]
