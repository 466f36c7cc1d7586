"""The integer program that chooses a minibatch and every layer's algorithm."""

import itertools
import math
import random

import pytest

from paceline.errors import ConfigurationError
from paceline_plan.minibatch import (
    Alternative,
    Memory,
    choose_algorithms,
    choose_minibatch,
)


def test_the_integer_program_finds_what_trying_everything_finds() -> None:
    chance = random.Random(0)
    for _ in range(10):
        layers = [
            [
                Alternative(f"{l}", chance.random(), chance.choice([0, 1, 5, 20]) * 1e6)
                for l in range(chance.randint(1, 4))
            ]
            for _ in range(chance.randint(1, 6))
        ]
        before_s = math.inf
        for bound in (0.0, 1e6, 1e7, 3e7, 2e8):
            tried = [x for x in itertools.product(*layers) if sum(a.workspace_bytes for a in x) <= bound]
            found = choose_algorithms(layers, bound)
            if not tried:
                assert found is None
                continue
            assert found is not None
            assert found.time_s == pytest.approx(min(sum(a.time_s for a in x) for x in tried))
            assert found.workspace_bytes <= bound + 1
            assert found.time_s <= before_s + 1e-9  # more memory is never slower
            before_s = found.time_s


def test_the_best_minibatch_is_not_the_largest_that_fits() -> None:
    measured = {
        X: [[Alternative("small", 0.01 * X, 0), Alternative("fast", 0.006 * X, 40e6 * X / 8)]] * 3
        for X in (1, 2, 4, 8, 16, 32)
    }
    memory = Memory(device_bytes=400e6, fixed_bytes=50e6, sample_bytes=10e6)
    best, every = choose_minibatch(memory, measured)
    fits = [x.X for x in every if x.choice is not None]
    assert max(fits) > best.X
    assert best.choice is not None
    assert set(best.choice.names) == {"fast"}
    with pytest.raises(ConfigurationError, match="no minibatch fits"):
        choose_minibatch(Memory(40e6, 50e6, 1e6), measured)
    with pytest.raises(ConfigurationError):
        choose_minibatch(memory, {})
