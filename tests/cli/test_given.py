"""Settings of compressors, reductions, optimizers and recipes that are no or impossible numbers: refused in words."""

import math

import numpy as np
import pytest
import torch

from paceline.compression import RandomK, TopK
from paceline.errors import ConfigurationError
from paceline.given import number
from paceline.planning import TrialConfig
from paceline.reductions import (
    Compressed,
    PowerSGD,
    choose_reduction,
)
from paceline_adasum import Adasum
from paceline_recipes import LAMB, LARS, Curve, DiLoCo, GhostBatchNorm, GradientNoiseScale, rate_factor

WEIGHTS = [torch.ones(2, 2)]
REFUSED = [
    (lambda: PowerSGD(start_step="1"), "start_step='1' must be at least 0"),
    (lambda: PowerSGD(rank="4"), "rank='4' must be a whole number"),
    (lambda: PowerSGD(rank=math.inf), "rank=inf must be a whole number"),
    (lambda: PowerSGD(min_compression_rate=[]), "min_compression_rate=[] must be more than 0"),
    (lambda: TopK("a"), "ratio='a' must be more than 0 and at most 1"),
    (lambda: TopK("0.1"), "ratio='0.1' must be more than 0 and at most 1"),
    (lambda: RandomK(None), "ratio=None must be more than 0"),
    (lambda: Compressed(TopK(), momentum="a"), "momentum='a' must be at least 0"),
    (lambda: Adasum(hosts=3), "hosts=3: give None"),
    (lambda: Adasum(hosts="b"), "hosts='b': give None"),
    (lambda: Adasum(hosts=["a"]), "hosts=['a']: give None"),
    (lambda: TrialConfig(gain_ratio="a"), "gain_ratio='a', num_sweeps=8"),
    (lambda: TrialConfig(num_sweeps=1.5), "num_sweeps=1.5, turn_steps=1"),
    (lambda: GradientNoiseScale(memory_steps="a"), "memory_steps='a' averages"),
    (lambda: GradientNoiseScale(every="a"), "every='a' measures no step"),
    (lambda: GradientNoiseScale(every=1.5), "every=1.5 measures no step"),
    (lambda: GradientNoiseScale(shares="a"), "shares='a' are not fractions"),
    (lambda: GradientNoiseScale(shares=()), "shares=() are not fractions"),
    (lambda: choose_reduction(None, TopK), "compression=TopK is a class. Make one of it: TopK()"),
    (lambda: choose_reduction(Adasum), "reduction=Adasum is a class"),
    (lambda: LARS(WEIGHTS, lr="a"), "lr='a' has to be a finite number"),
    (lambda: LARS(WEIGHTS, lr=0.1, max_trust_ratio="a"), "max_trust_ratio='a' has to be positive"),
    (lambda: LAMB(WEIGHTS, lr=0.1, betas=("a", 0.9)), "betas=('a', 0.9) have to be"),
    (lambda: LAMB(WEIGHTS, lr=0.1, weight_norm_bounds=("a", 1)), "weight_norm_bounds=('a', 1)"),
    (lambda: DiLoCo(torch.optim.SGD(WEIGHTS, 0.1), every=2, outer_lr="a"), "outer_lr='a'"),
    (lambda: Curve("a"), "total='a' is not a length"),
    (lambda: Curve(5, warmup="a"), "warmup='a' is not a length"),
    (lambda: rate_factor("linear", "a", 1), "batch='a' is not a positive number"),
    (lambda: GhostBatchNorm(3, num_samples="a"), "num_samples='a' has no statistics"),
    (lambda: GhostBatchNorm(3, num_samples=1.5), "num_samples=1.5 has no statistics"),
]


def test_what_is_no_number_is_refused_by_name():
    """Each message has the argument, the value as it was written, and the rule."""
    for make, words in REFUSED:
        with pytest.raises(ConfigurationError) as raised:
            make()
        assert words in str(raised.value)


def test_numbers_of_every_kind_are_taken():
    """Python's, numpy's, tensors of one element; texts and lists are none."""
    assert [number(value) for value in (3, 0.5, True, np.float32(2), np.int64(4), torch.tensor(5))] == [
        3, 0.5, 1, 2, 4, 5,
    ]  # fmt: skip
    for value in ("3", b"3", None, [1], torch.ones(2), object(), 1j, 10**400):
        assert math.isnan(number(value))
    assert TopK(np.float32(0.25)).ratio == TopK(torch.tensor(0.25)).ratio == 0.25
