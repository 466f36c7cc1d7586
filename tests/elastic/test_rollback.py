"""A step that is given up leaves no trace: buffers, schedules."""

import torch

from paceline.elastic.rollback import Rollback, TrainingPosition


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
    """Statistics of a forward, extra state, and a schedule that was stepped behind the window."""
    model = Counts(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    rollback = Rollback(model, [optimizer], [schedule])
    rollback.note(TrainingPosition(0, 0, 0))
    before = {name: each.clone() for name, each in model.named_buffers()}
    model(torch.randn(4, 3))
    optimizer.step()
    schedule.step()
    rollback.undo()
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert schedule.last_epoch == 0
    assert model.counts == {"forwards": 0}


def test_a_learning_rate_that_is_a_tensor_is_undone_as_well():
    """A schedule writes it in place."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.5))
    rollback = Rollback(torch.nn.Module(), [optimizer], [])
    rollback.note(TrainingPosition(0, 0, 0))
    optimizer.param_groups[0]["lr"].fill_(0.1)
    rollback.undo()
    assert float(optimizer.param_groups[0]["lr"]) == 0.5


def test_a_host_that_is_ahead_goes_back_to_the_step_that_counts():
    """Notes of steps that are known to count are dropped; a note is of its own step, whatever came later."""
    model = Counts(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rollback = Rollback(model, [optimizer], [schedule])
    for step in range(5):
        rollback.note(TrainingPosition(step, 0, 8 * step), num_known=step - 2)
        model(torch.full((4, 3), float(step)))
        model.num_batches_tracked.fill_(step + 1)
        optimizer.step()
        schedule.step()
    assert rollback.undo(3) == TrainingPosition(3, 0, 24)
    assert (model.num_batches_tracked, optimizer.param_groups[0]["lr"], model.counts) == (
        3,
        0.125,
        {"forwards": 3},
    )
    rollback.note(TrainingPosition(3, 0, 24), num_known=3)
    assert rollback.undo().step == 3


def test_state_that_a_masked_step_has_made_is_dropped():
    """Fused SGD makes momentum of undefined values, and lets its first step fill it; a masked one does not."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, fused=True)
    rollback = Rollback(model, [optimizer], [])
    rollback.note(TrainingPosition(0, 0, 0))
    optimizer.found_inf = torch.ones(())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state
    rollback.undo(0)
    assert not optimizer.state


def test_a_scaler_is_undone_without_asking_its_device():
    """Its scale and growth counter, and what it has noted within a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    rollback = Rollback(torch.nn.Module(), [optimizer], [scaler])
    for expected in (8.0, 16.0):
        rollback.note(TrainingPosition(0, 0, 0))
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2 * expected
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        rollback.undo()
        assert scaler.get_scale() == expected
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def test_indices_of_a_bad_step_are_taken_back_on_the_device():
    """Numbers that are no indices stay as they are: they are undone with the step."""
    model = torch.nn.Module()
    model.register_buffer("index", torch.tensor([1, 2]))
    model.register_buffer("mean", torch.tensor([0.5]))
    rollback = Rollback(model, [], [])
    rollback.note(TrainingPosition(0, 0, 0))
    for is_good, expected in ((True, 99), (False, 1)):
        model.index.fill_(99)
        model.mean.fill_(99.0)
        rollback.keep_indices(torch.tensor(is_good))
        assert model.index[0] == expected
        assert model.mean == 99.0
