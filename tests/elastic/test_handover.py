"""What a rank draws depends on how its script was seeded, and on the place in the data."""

import random

import numpy as np
import pytest
import torch

from paceline.elastic.handover import Carried
from paceline.elastic.rollback import TrainingPosition


@pytest.fixture(autouse=True)
def _generators():
    """Leave the generators of other tests as they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])


def carried(torch_seed=1, numpy_seed=2, python_seed=3):
    """The state of a script that has seeded its generators so, and has drawn some of torch's numbers since."""
    torch.manual_seed(torch_seed)
    np.random.seed(numpy_seed)  # noqa: NPY002
    random.seed(python_seed)
    torch.rand(torch_seed)
    return Carried(torch.nn.Module(), [], [], None)


def drawn(it, rank=0, epoch=0, num_samples=0, fetch=lambda: None):
    """The numbers of all three generators in one step. `fetch` draws while the step's data are fetched."""
    position = TrainingPosition(9, epoch, num_samples)
    it.seed(rank, position)
    fetch()
    it.seed(rank, position, is_fetched=True)
    return torch.rand(2).tolist(), np.random.randn(), random.random()  # noqa: NPY002


def test_a_step_that_comes_again_draws_the_same_numbers():
    """Also in a process whose script was seeded otherwise, whatever was drawn before, or for the seed of workers."""
    it, new = carried(), carried(7, 8, 9)
    it.seeds = new.seeds = (it.own_seeds, carried(4, 5, 6).own_seeds)
    first = drawn(it, rank=1, num_samples=24)
    np.random.randn()  # noqa: NPY002  numpy keeps a second normal number for later
    assert drawn(new, rank=1, num_samples=24, fetch=lambda: torch.rand(1)) == first
    assert drawn(new, rank=3, num_samples=24) == first  # there are more ranks than the job began with
    it.seed(0, TrainingPosition(9, 0, 0))
    fetched = torch.rand(2).tolist()
    assert drawn(it)[0] != fetched


def test_other_steps_and_ranks_draw_other_numbers():
    """So do ranks of which one generator alone was seeded otherwise; the others are alike then, as in the script."""
    it = carried()
    it.seeds = (it.own_seeds, carried(numpy_seed=5).own_seeds)
    found = [drawn(it), drawn(it, num_samples=8), drawn(it, epoch=1), drawn(it, rank=1)]
    for one in range(3):
        for other in range(one):
            assert all(ours != theirs for ours, theirs in zip(found[one], found[other], strict=True))
    alike = [ours == theirs for ours, theirs in zip(found[0], found[3], strict=True)]
    assert alike == [True, False, True]


def test_a_generator_that_numpy_cannot_seed_stays_as_it_is():
    """A script may have put another kind in the place of numpy's."""
    it = carried()
    it.seeds = (it.own_seeds,)
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        again = Carried(torch.nn.Module(), [], [], None)
        again.seeds = it.seeds
        first, second = drawn(again), drawn(again)
    finally:
        np.random.set_bit_generator(before)
    assert (first[0], first[2]) == (second[0], second[2])
    assert first[1] != second[1]
