"""Tasks of the large-batch study: a model, its data, the small batch and the rates one starts from, and a budget.

The models are small enough for hundreds of runs on one core.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import ConfigurationError
from paceline_lab.experiments.accuracy import splits
from paceline_lab.experiments.accuracy.splits import Samples
from paceline_recipes import zero_init_residual


def mlp(*sizes: int) -> nn.Sequential:
    """Fully connected layers of `sizes` units with ReLU between them; takes images too, shape (N, ...)."""
    layers: list[nn.Module] = [nn.Flatten()]
    for num_in, num_out in itertools.pairwise(sizes):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with normalisation beside a shortcut.

    Source: He et al. 2016.
    """

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(num_out)
        is_same = num_in == num_out and stride == 1
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, num_out, side / stride, side / stride)."""
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.last_norm(self.second(inner)) + self.shortcut(x))


def residual_cnn(num_classes: int, width: int = 8, num_blocks: int = 2) -> nn.Sequential:
    """Residual blocks for grey images, shape (N, 1, side, side), with batch normalisation throughout.

    Each block starts as its shortcut (Goyal et al. 2017, section 5.1).
    """
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        ResidualBlock(width, width, stride=1),
        *(ResidualBlock(width << block, width << block + 1, stride=2) for block in range(num_blocks - 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width << num_blocks - 1, num_classes),
    )
    zero_init_residual(model, "*.last_norm.weight")
    return model


def byte_model(context: int, embedding_size: int = 16, hidden_size: int = 128) -> nn.Sequential:
    """Predict a byte from the `context` before it, shape (N, context), int64.

    Source: Bengio et al. 2003, on bytes instead of words.
    """
    return nn.Sequential(
        nn.Embedding(256, embedding_size),
        nn.Flatten(),
        nn.Linear(context * embedding_size, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, 256),
    )


MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4


@dataclass(frozen=True)
class Task:
    """One line of the table of tasks.

    Attributes:
        name: Name in `--model`.
        title: Title in reports.
        load: Loads the samples from a folder (None: the usual places), given the number of training samples.
        make_model: Makes the model from the global random state.
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
            splits.fashion_mnist,
            partial(mlp, 784, 256, 128, 10),
            num_train=49_152,
            rank_batch=64,
            epochs=2,
            middle_rates={"sgd": 0.02, "lars": 0.2, "lamb": 0.004},
        ),
        Task(
            "cnn",
            "residual CNN with batch normalisation on Fashion-MNIST",
            splits.fashion_mnist,
            partial(residual_cnn, 10),
            num_train=12_288,
            rank_batch=32,
            epochs=4,
            middle_rates={"sgd": 0.04, "lars": 0.2, "lamb": 0.008},
        ),
        Task(
            "letter",
            "MLP 16-128-128-26 on Letter",
            splits.letter,
            partial(mlp, 16, 128, 128, 26),
            num_train=12_288,
            rank_batch=32,
            epochs=12,
            middle_rates={"sgd": 0.04, "lars": 0.2, "lamb": 0.008},
        ),
        Task(
            "bytes",
            "byte model on Shakespeare",
            splits.text_bytes,
            partial(byte_model, splits.BYTE_CONTEXT),
            num_train=65_536,
            rank_batch=64,
            epochs=4,
            middle_rates={"sgd": 0.1, "lars": 0.2, "lamb": 0.004},
        ),
        Task(
            "digits",
            "MLP 64-64-32-10 on handwritten digits",
            splits.digits,
            partial(mlp, 64, 64, 32, 10),
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
