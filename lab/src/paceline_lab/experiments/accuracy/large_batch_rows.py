"""The rows of the large-batch study's tables: how each trains when the global batch grows, or the messages shrink.

A row says how its learning rate grows and warms up, which optimizer steps, and what becomes of the ranks' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD, Optimizer

from paceline.errors import ConfigurationError
from paceline.reductions.by_name import COMPRESSIONS
from paceline_lab.experiments.accuracy.tasks import MOMENTUM, WEIGHT_DECAY
from paceline_recipes import LAMB, LARS, Curve, parameter_groups, rate_factor

BASELINE, UNCOMPRESSED, EVERY_STEP = "small batch", "no compression", "1 local step"
BATCHES, CODECS, LOCAL = "batches", "codecs", "local steps"
_AUTO = "auto"  # chooses by speed, which ranks in one process do not have
CODEC_FACTOR = 8  # ranks, and so global batch over reference batch, of the rows about messages


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        name: Name in `--rows`.
        table: Table of the row.
        scaling: Growth of the reference rate with the global batch: none, sqrt or linear.
        warmup: none; constant (the reference rate, then the full one); gradual (from one to the other).
        warmup_ratio: Part of the training that warms up.
        optimizer: sgd, lars or lamb.
        combination: Combination of the ranks' gradients: mean, adasum (of the ranks' updates), adasum of gradients,
            local, diloco, none (the mean, as a reduction). Otherwise a name that `compression=` understands.
        local_steps: Steps that a rank takes by itself between two averages of the parameters.
        factors: The only global batches (times the reference batch) of the row; empty: all that are asked for.
    """

    name: str
    table: str
    scaling: str
    warmup: str = "none"
    warmup_ratio: float = 0.5
    optimizer: str = "sgd"
    combination: str = "mean"
    local_steps: int = 1
    factors: tuple[int, ...] = ()


_LIST = [
    Row(BASELINE, BATCHES, "none", factors=(1,)),
    Row("unscaled", BATCHES, "none"),
    Row("sqrt", BATCHES, "sqrt"),
    Row("linear", BATCHES, "linear"),
    Row("constant warm-up", BATCHES, "linear", warmup="constant"),
    Row("gradual warm-up", BATCHES, "linear", warmup="gradual"),
    Row("lars", BATCHES, "sqrt", warmup="gradual", optimizer="lars"),
    Row("lamb", BATCHES, "sqrt", warmup="gradual", optimizer="lamb"),
    Row("adasum", BATCHES, "none", combination="adasum", factors=(16, 32)),
    Row("adasum of gradients", BATCHES, "none", combination="adasum of gradients", factors=(16, 32)),
    Row(UNCOMPRESSED, CODECS, "linear", warmup="gradual", combination="none"),
    *(
        Row(name, CODECS, "linear", warmup="gradual", combination=name)
        for name in COMPRESSIONS
        if name != _AUTO
    ),
    *(
        Row(
            f"{n} local step{'s' if n > 1 else ''}",
            LOCAL,
            "linear",
            warmup="gradual",
            combination="local",
            local_steps=n,
        )
        for n in (1, 2, 4, 8, 16)
    ),
    Row("diloco, 16 local steps", LOCAL, "none", combination="diloco", local_steps=16),
]
ROWS = {row.name: row for row in _LIST}


def choose_rows(names: Sequence[str]) -> list[Row]:
    """Return the rows of these names, in the table's order, the baseline always among them.

    Raises:
        ConfigurationError: There is no row of a name.
    """
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise ConfigurationError(f"--rows: there is no row {unknown[0]!r}. There are: {', '.join(ROWS)}.")
    return [row for name, row in ROWS.items() if not names or name in names or name == BASELINE]


def curve(row: Row, num_steps: int) -> Curve:
    """Warm-up, then a straight line down to nothing."""
    num_warm = 0 if row.warmup == "none" else round(row.warmup_ratio * num_steps)
    return Curve(num_steps, num_warm, row.warmup, decay="linear")


def rate_at(row: Row, reference: float, factor: int, step: int, num_steps: int) -> float:
    """The rate of a step of a training with `factor` times the reference batch, counted from 0."""
    peak = reference * rate_factor(row.scaling, factor, 1)
    return curve(row, num_steps).rate(step, reference, peak)


TRUST_COEFFICIENT = 0.02  # so large that LARS's rates suit biases, which it steps as SGD does


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """Make one for a model: sgd, lars or lamb. Its rate is set before each step.

    Biases and normalisation do not decay, and have no rate of their own layer.
    """
    groups = parameter_groups(model, WEIGHT_DECAY)
    if name == "sgd":
        return SGD(groups, lr=1.0, momentum=MOMENTUM, foreach=True)
    for group in groups:
        group["layerwise"] = group["weight_decay"] > 0
    if name == "lars":
        return LARS(groups, lr=1.0, momentum=MOMENTUM, trust_coefficient=TRUST_COEFFICIENT)
    return LAMB(groups, lr=1.0)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every group this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
