"""A step begins anew: nothing of an earlier forward, of a backward that raised, or of a reducer that was replaced."""

import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.models import Mlp, digest, random_batch, squares
from harness.ranks import pool
from harness.rebuilding import batch, mlp
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError, PeerAbortedError

pytestmark = pytest.mark.processes


class StumbleError(Exception):
    """What a user's code raises."""


class Branches(nn.Module):
    """Three linear layers beside each other: the second is used if asked for, the third once it is unfrozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.later = (nn.Linear(2, 2) for _ in range(3))
        self.later.requires_grad_(False)

    def forward(self, x, uses_second):
        branches = [self.always, *[self.sometimes] * uses_second]
        return sum(branch(x) for branch in [*branches, *[self.later] * self.later.weight.requires_grad])


def unfrozen_in_a_step(rank, _num_ranks, unfreezes):
    """The gradient of a layer that only the unsynchronized backward of a step has used."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    x = torch.full((1, 2), float(rank + 1))
    with model.no_sync():
        model(x, True).sum().backward()
    model.module.later.requires_grad_(unfreezes)
    model(x, False).sum().backward()
    return model.module.sometimes.weight.grad.flatten().tolist()


@pytest.mark.parametrize("unfreezes", [False, True])
def test_unfreezing_a_layer_within_a_step_keeps_what_no_sync_has_used(unfreezes):
    """Rank 0 has 1 everywhere, rank 1 has 2: the mean is 1.5, also after another reducer has taken over."""
    assert pool(2).run(unfrozen_in_a_step, unfreezes) == [[1.5] * 4] * 2


def frozen_while_another_is_unfrozen(rank, _num_ranks):
    """The gradient of a layer that is frozen behind its unsynchronized backward, while another one is unfrozen."""
    model = DistributedDataParallel(Branches())
    x = torch.full((1, 2), float(rank + 1))
    with model.no_sync():
        model(x, True).sum().backward()
    model.module.sometimes.requires_grad_(False)
    model.module.later.requires_grad_(True)
    model(x, False).sum().backward()
    return model.module.sometimes.weight.grad.flatten().tolist()


@pytest.mark.filterwarnings("ignore")  # it is not used by then
def test_a_layer_that_is_frozen_within_a_step_keeps_its_gradients_of_that_step():
    """Another reducer takes over, and reduces what the frozen layer has gathered."""
    assert pool(2).run(frozen_while_another_is_unfrozen) == [[1.5] * 4] * 2


def unfrozen_between(rank, _num_ranks):
    """Gradients of a forward that was open when another forward met an unfrozen layer, and of the other one."""
    model = DistributedDataParallel(Branches())
    x = torch.full((1, 2), float(rank + 1))
    before = model(x, True).sum()
    model.module.later.requires_grad_(True)
    after = model(x, True).sum()
    found = []
    for loss in (before, after):
        loss.backward()
        found.append([digest([p.grad for p in model.parameters() if p.grad is not None])])
        found[-1] += model.module.always.weight.grad.flatten().tolist()
    return found


@pytest.mark.filterwarnings("ignore")  # the first does not use the new layer
def test_a_forward_that_was_open_when_a_layer_was_unfrozen_synchronizes():
    """Rank 0 has 1 everywhere, rank 1 has 2: the mean is 1.5, and the second backward adds as much."""
    first, second = pool(2).run(unfrozen_between)
    assert first == second
    assert [values for _, *values in first] == [[1.5] * 4, [3.0] * 4]


def unfrozen_before_a_sync(rank, _num_ranks):
    """The gradient that an unfrozen layer got by a backward around the wrapper, summed by `sync_gradients`."""
    model = DistributedDataParallel(Branches())
    model.module.later.requires_grad_(True)
    model.module(torch.full((1, 2), float(rank + 1)), False).sum().backward()
    model.sync_gradients()
    return model.module.later.weight.grad.flatten().tolist()


@pytest.mark.filterwarnings("ignore")  # that backward stays local, as the warning says
def test_sync_gradients_takes_in_an_unfrozen_layer():
    assert pool(2).run(unfrozen_before_a_sync) == [[1.5] * 4] * 2


def unfrozen_in_a_window(rank, _num_ranks):
    """The error of a window in which each rank unfreezes a layer in its first micro-batch; then a good step."""
    model = DistributedDataParallel(Branches())
    words = ""
    try:
        with model.accumulate([1.0] * (3 - 2 * rank)) as window:
            for each in window:
                loss = model(torch.full((1, 2), each), True).sum()
                model.module.later.requires_grad_(True)
                loss.backward()
    except (ConfigurationError, PeerAbortedError) as error:
        words = f"{type(error).__name__} {error}"
    left = [p.grad for p in model.parameters() if p.grad is not None]
    squares(model(torch.full((1, 2), rank + 1.0), True)).backward()
    return words, len(left), digest([p.grad for p in model.parameters()])


def test_unfreezing_within_a_window_is_refused():
    """Ranks with other numbers of micro-batches would meet in other collectives. The next step takes the layer in."""
    (first, *rest), (second, *others) = pool(2).run(unfrozen_in_a_window)
    assert first.startswith("ConfigurationError later.weight was unfrozen within a window")
    assert second.startswith("PeerAbortedError")
    assert rest == others
    assert rest[0] == 0


def differentiated_twice(rank, _num_ranks):
    """Gradients of both backwards of one weighed forward; those of one process."""
    model, alone = DistributedDataParallel(mlp(), weight=len), mlp()
    batches = [random_batch(4, each, shape=(2 * each + 1, 8), dtype=torch.float64) for each in range(2)]
    loss = squares(model(batches[rank]))
    found = []
    for keeps in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=keeps)
        found.append([p.grad.clone() for p in model.parameters()])
    squares(alone(torch.cat(batches))).backward()
    wanted = [p.grad for p in alone.parameters()]
    return [max((p - q).abs().max().item() for p, q in zip(each, wanted, strict=True)) for each in found]


def test_the_second_backward_of_a_weighed_forward_weighs_as_much():
    """With batches of 1 and 3 samples both backwards give the mean over all four."""
    for first, second in pool(2).run(differentiated_twice):
        assert max(first, second) < 1e-12


def two_forwards(rank, _num_ranks):
    """Buffers after a step of two forwards, of which the second ran under `no_sync`."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    loss = model(random_batch(0, rank)).sum()
    with model.no_sync():
        loss = loss + model(random_batch(1, rank)).sum()
    loss.backward()
    return digest(list(model.module.buffers()))


def test_buffers_are_equal_behind_a_step_whose_last_forward_ran_under_no_sync():
    first, second = pool(2).run(two_forwards)
    assert first == second


class Stumbling(Mlp):
    """Raises in forward, or in backward, where it is told to."""

    where = ""

    def forward(self, x):
        if self.where == "forward":
            raise StumbleError
        output = super().forward(x)
        if self.where == "backward":
            output.register_hook(self._stumble)
        return output

    def _stumble(self, _):
        raise StumbleError


def records_behind_dropped_steps(rank, _num_ranks, where):
    """Micro-steps of each good step's timing; number and samples of each record; the errors."""
    model = DistributedDataParallel(Stumbling())
    recorder = model._paceline_coordinator.recording.recorder
    micro_steps, errors, ended = [], [], []
    recorder.end_step = ended.append
    steps = itertools.count()
    while len(micro_steps) < 4:
        step = next(steps)
        model.zero_grad()
        model.module.where = where if step == 2 and rank == 1 else ""
        try:
            squares(model(random_batch(step, rank, shape=(10, 8)))).backward()
        except (StumbleError, PeerAbortedError) as error:
            errors.append(type(error).__name__)
            continue
        micro_steps.append((model.timings.last.step, model.timings.last.num_micro_steps))
    return micro_steps, [work.num_samples for work in ended], errors


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_behind_a_dropped_one_is_recorded_alone(where):
    """Each good step had one micro-step of 10 samples, whatever was dropped before it; numbers have no gaps."""
    for micro_steps, samples, errors in pool(2).run(records_behind_dropped_steps, where):
        assert errors
        assert micro_steps == [(number, 1) for number in range(1, 5)]
        assert samples == [10] * len(micro_steps)


def graph_that_is_kept(rank, _num_ranks, by):
    """How many buckets of before live on with a graph that the script keeps over another reducer's coming."""
    model = DistributedDataParallel(Branches() if by == "unfreezing" else mlp())
    x = torch.ones(1, 2) if by == "unfreezing" else batch(0, rank)
    more = (True,) if by == "unfreezing" else ()
    model(x, *more).sum().backward()
    kept = model(x, *more).sum()
    before = [weakref.ref(bucket) for bucket in model.reducer.buckets]
    if by == "unfreezing":
        model.module.later.requires_grad_(True)
        squares(model(x, *more)).backward()
    else:
        model.membership.rebuild(dist.new_group())
    gc.collect()
    return kept.requires_grad, sum(bucket() is not None for bucket in before)


@pytest.mark.parametrize("by", ["unfreezing", "rebuild"])
def test_a_graph_that_is_kept_holds_no_bucket_of_before(by):
    assert pool(2).run(graph_that_is_kept, by) == [(True, 0)] * 2
