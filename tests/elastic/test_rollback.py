"""A step that is given up leaves no trace: buffers, random numbers, schedules."""

import random

import numpy as np
import torch

from paceline.elastic.rollback import Randomness, Rollback
from paceline.elastic.state_tree import pack, unpack


def drawn():
    """The next numbers of all three generators."""
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()  # noqa: NPY002


class Counts(torch.nn.BatchNorm1d):
    """Counts its forwards where only `get_extra_state` shows it."""

    def __init__(self, size):
        super().__init__(size)
        self.counts = {"forwards": 0}

    def get_extra_state(self):
        return self.counts

    def set_extra_state(self, state):
        self.counts = state

    def forward(self, x):
        self.counts["forwards"] += 1
        return super().forward(x)


def test_what_a_given_up_step_has_changed_is_undone():
    """Statistics of a forward, what was drawn in it, extra state, and a schedule that was stepped behind the window."""
    model = Counts(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    rollback = Rollback(model, [optimizer], [schedule])
    rollback.note()
    before = {name: each.clone() for name, each in model.named_buffers()}
    numbers = drawn()
    model(torch.randn(4, 3))
    optimizer.step()
    schedule.step()
    rollback.undo()
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())
    assert drawn() == numbers
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert schedule.last_epoch == 0
    assert model.counts == {"forwards": 0}


def test_a_learning_rate_that_is_a_tensor_is_undone_as_well():
    """A schedule writes it in place."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.5))
    rollback = Rollback(torch.nn.Module(), [optimizer], [])
    rollback.note()
    optimizer.param_groups[0]["lr"].fill_(0.1)
    rollback.undo()
    assert float(optimizer.param_groups[0]["lr"]) == 0.5


def test_a_normal_number_that_numpy_keeps_is_drawn_again():
    """Two are made at once. A step that draws the second one changes no word of the generator."""
    rollback = Rollback(torch.nn.Module(), [], [])
    np.random.seed(4)  # noqa: NPY002
    first, second = np.random.randn(2)  # noqa: NPY002
    np.random.seed(4)  # noqa: NPY002
    rollback.note()
    assert np.random.randn() == first  # noqa: NPY002
    for _ in range(2):
        rollback.note()
        assert np.random.randn() == second  # noqa: NPY002
        rollback.undo()
    assert np.random.randn() == second  # noqa: NPY002


def test_random_numbers_go_on_on_another_rank():
    """After JSON and tensors of the state's kinds."""
    tree = unpack(pack(Randomness().as_tree()))
    numbers = drawn()
    drawn()
    Randomness.from_tree(tree).restore()
    assert drawn() == numbers
