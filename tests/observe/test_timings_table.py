"""`model.timings.table()`: every part of a step, micro-steps and the optimizer included, adds up to it."""

import pytest
import torch
import torch.distributed as dist
from torch.optim import optimizer as torch_optimizer

from paceline import DistributedDataParallel
from paceline.observe import timings as timings_module
from paceline.observe.timings import StepTiming, StepTimings, watches_optimizers


@pytest.fixture
def model(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(3, 1))
    dist.destroy_process_group()


class Clock:
    """Stands still until it is told to go on."""

    now_s = 0.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timings_module, "time", clock)
    return clock


def _begun(timings, started_s):
    """The record of a step whose backward began then."""
    timings.under_way.end_backward(started_s, started_s, started_s)
    return timings.under_way.record(1, exposed_s=0.0, buckets=())


def test_what_passes_between_two_backwards_is_told_apart(clock):
    timings = StepTimings()
    assert _begun(timings, 5.0).other_s == 0.0  # nothing was before
    clock.now_s = 10.0
    timings.begin_step()
    optimizers = timings_module._optimizers
    optimizers._begin()
    clock.now_s = 13.0
    optimizers._end()
    timings.under_way.note_forward(2.0)
    timings.under_way.note_earlier_backward(4.0)
    timings.under_way.note_forward(1.0)
    before = _begun(timings, 30.0)
    assert (before.forward_s, before.num_micro_steps, before.last_forward_s) == (3.0, 2, 1.0)
    assert (before.earlier_backward_s, before.optimizer_s, before.other_s) == (4.0, 3.0, 10.0)
    timings.begin_step()
    assert _begun(timings, 13.5).forward_s == 0.0


def test_waiting_for_the_step_before_is_not_part_of_this_one(clock):
    """Forward overlap waits within forward, within an optimizer, or wherever something is read."""
    timings = StepTimings()
    timings.begin_step()
    timings.under_way.note_wait(1.0, 3.0)  # neither in forward nor in an optimizer
    optimizers = timings_module._optimizers
    clock.now_s = 4.0
    optimizers._begin()
    timings.under_way.note_wait(4.0, 5.0)
    clock.now_s = 6.0
    optimizers._end()
    timings.under_way.note_wait(8.0, 11.0)
    clock.now_s = 12.0
    timings.under_way.note_forward(5.0)
    before = _begun(timings, 20.0)
    assert (before.forward_s, before.last_forward_s) == (2.0, 5.0)
    assert (before.optimizer_s, before.other_s) == (1.0, 20.0 - 2.0 - 1.0 - 2.0 - 1.0 - 3.0)


def test_a_decision_is_told_once_and_stands_in_the_table(monkeypatch):
    told = []
    monkeypatch.setattr(timings_module, "tell", lambda *words: told.append(words))
    timings = StepTimings()
    for words in ("on", "on", "off, because", "off, because"):
        timings.decide("overlap_forward", words, is_told=True)
    timings.decide("overlap_forward", "on again", is_told=False)
    assert [text for _, text in told] == ["overlap_forward=True: on", "overlap_forward=True: off, because"]
    timings.add(StepTiming(1, 0.01, 0.0, 0.02, 0.04, ()))
    assert str(timings).splitlines()[-1] == "overlap_forward: on again"


def test_the_table_adds_up():
    timings = StepTimings()
    assert timings.table() == str(timings) == "no step has been synchronized yet"
    for number in (1, 2, 3):
        timings.add(StepTiming(number, 0.01, 0.0, 0.02, 0.04, (), 2, 0.005, 0.01, 0.01, 0.01 * number))
    lines = str(timings).splitlines()
    assert lines[0] == "where the time of a step goes: steps 1 to 3, of 2 micro-steps"
    cells = {line[:24].strip(): line[24:].split() for line in lines[2:]}
    assert cells["backward"] == ["30.00", "30.00", "27%"]
    assert cells["optimizer"] == ["10.00", "10.00", "9%"]
    assert cells["loading and the rest"] == ["20.00", "30.00", "18%"]
    assert cells["step"] == ["110.00", "120.00", "100%"]
    assert "steps 3" not in timings.table(1)
    assert "step 3" in timings.table(1)


def test_forwards_of_all_micro_steps_count_and_evaluation_does_not(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with model.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(2, 3))
    last = model.timings.last
    assert last.num_micro_steps == 2
    assert last.forward_s > last.last_forward_s > 0
    assert last.earlier_backward_s > 0
    assert last.optimizer_s > 0
    assert last.other_s > 0
    assert "of 2 micro-steps" in str(model.timings)


def test_the_clock_of_optimizers_is_no_hook_that_needs_a_whole_step():
    """Any other hook of torch's for all optimizers ends the deferral of forward overlap."""
    StepTimings()
    assert all(map(watches_optimizers, torch_optimizer._global_optimizer_pre_hooks.values()))
    with_another = torch_optimizer.register_optimizer_step_pre_hook(print)
    assert not all(map(watches_optimizers, torch_optimizer._global_optimizer_pre_hooks.values()))
    with_another.remove()
