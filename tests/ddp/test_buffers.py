"""Buffers: rank 0's, whenever gradients will be synchronized; never a collective when they will not."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.models import digest, random_batch, squares
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes


class Normalised(nn.Module):
    """Batch normalisation (float and integer buffers) and a boolean buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("flag", torch.tensor([True, False]))

    def forward(self, x):
        return self.norm(self.linear(x))


def build(seed, **options):
    torch.manual_seed(seed)
    return DistributedDataParallel(Normalised(), **options)


batch = partial(random_batch, shape=(6, 4))


def bits(model):
    return digest(list(model.module.buffers()))


class CountedCollectives:
    """Counts collectives on the default group while open, by the profiler's names."""

    def __enter__(self):
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profiler.__enter__()
        return self

    def __exit__(self, *error):
        self._profiler.__exit__(*error)
        self.names = [e.name for e in self._profiler.events() if e.name.startswith(("gloo:", "c10d::"))]


def before_forward(rank, _num_ranks, seed, how):
    """Buffers as the module saw them in a training forward after ranks' buffers went apart in `how`."""
    model = build(seed)
    seen = []
    model.module.norm.register_forward_pre_hook(lambda *_: seen.append(bits(model)))
    squares(model(batch(seed, rank, 0))).backward()
    if how == "eval forward":
        model.eval()
        with torch.no_grad():
            model(batch(seed, rank, 1))
        model.train()
    elif how == "no_grad forward in training mode":
        with torch.no_grad():
            model(batch(seed, rank, 1))
    elif how == "no_sync step":
        with model.no_sync():
            squares(model(batch(seed, rank, 1))).backward()
    elif how == "written by hand":
        with torch.no_grad():
            model.module.norm.running_mean.fill_(rank + 7)
            model.module.flag.fill_(rank == 0)
    elif how == "buffer object replaced":
        model.module.norm.running_mean = torch.full((3,), float(rank + 7))
    seen.clear()
    squares(model(batch(seed, rank, 2))).backward()
    return seen[0], bits(model)


@pytest.mark.parametrize(
    "how",
    [
        "nothing",
        "eval forward",
        "no_grad forward in training mode",
        "no_sync step",
        "written by hand",
        "buffer object replaced",
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_synchronized_forward_starts_from_rank_0s_buffers(num_ranks, how):
    """Every training forward that will be synchronized sees the same buffers on all ranks, and so does its end."""
    results = pool(num_ranks).run(before_forward, 1, how)
    assert len({seen for seen, _ in results}) == 1, "buffers differ during the forward"
    assert len({after for _, after in results}) == 1, "buffers differ after the backward"


def rank_0s_history(rank, _num_ranks, seed):
    """Buffers after three steps, and those of a bare module that saw rank 0's data only."""
    model = build(seed)
    alone = copy.deepcopy(model.module)
    for step in range(3):
        squares(model(batch(seed, rank, step))).backward()
        alone(batch(seed, 0, step))
    return bits(model), digest(list(alone.buffers()))


def test_all_ranks_hold_rank_0s_running_statistics():
    """After a synchronized backward every rank's buffers are what rank 0's data alone would have made."""
    results = pool(2).run(rank_0s_history, 2)
    assert len(set(results[0] + results[1])) == 1


def evaluate_on_rank_0_only(rank, _num_ranks, seed, mode):
    model = build(seed)
    squares(model(batch(seed, rank, 0))).backward()
    if rank == 0:
        if mode != "no_grad":
            model.eval()
        context = contextlib.nullcontext() if mode == "eval" else torch.no_grad()
        with context:
            for _ in range(3):
                model(batch(seed, 9))
        model.train()
    model.zero_grad()
    squares(model(batch(seed, rank, 1))).backward()
    return digest([p.grad for p in model.parameters()]), bits(model)


@pytest.mark.parametrize("mode", ["eval and no_grad", "no_grad", "eval"])
def test_one_rank_can_evaluate_alone(mode):
    """Evaluating on rank 0 only neither hangs nor shifts the collectives of the next step."""
    first, second = pool(2).run(evaluate_on_rank_0_only, 3, mode)
    assert first == second


def names_in_evaluation(rank, _num_ranks, seed):
    model = build(seed)
    squares(model(batch(seed, rank, 0))).backward()
    model.eval()
    with CountedCollectives() as counted, torch.no_grad():
        model(batch(seed, rank, 1))
    return counted.names


def test_evaluation_communicates_nothing():
    """An eval forward under no_grad makes no collective."""
    assert pool(2).run(names_in_evaluation, 4) == [[], []]


def without_forward_sync(rank, _num_ranks, seed, options):
    torch.manual_seed(seed)
    module = Normalised()
    module.norm.running_mean.fill_(rank)
    model = DistributedDataParallel(module, **options)
    start = bits(model)
    squares(model(batch(seed, rank, 0))).backward()
    return start, bits(model), digest([p.grad for p in model.parameters()])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("options", "same_at_start"),
    [({"forward_sync_buffers": False}, True), ({"init_sync": False, "forward_sync_buffers": False}, False)],
)
def test_buffers_stay_local_when_asked(options, same_at_start):
    """forward_sync_buffers=False synchronizes buffers at construction only; init_sync=False not even then."""
    first, second = pool(2).run(without_forward_sync, 5, options)
    assert (first[0] == second[0]) is same_at_start
    assert first[1] != second[1]
    assert first[2] == second[2]


def two_forwards_one_backward(rank, _num_ranks, seed):
    model = build(seed)
    (squares(model(batch(seed, rank, 0))) + squares(model(batch(seed, rank, 1)))).backward()
    return digest([p.grad for p in model.parameters()]), bits(model)


def test_buffer_broadcast_does_not_break_a_pending_backward():
    """Two forwards through batch normalisation and one backward: no in-place error, same gradients."""
    first, second = pool(2).run(two_forwards_one_backward, 6)
    assert first == second


def synchronized_between(rank, _num_ranks, seed):
    model = build(seed)
    loss = squares(model(batch(seed, rank)))
    model.sync_gradients()
    loss.backward()
    return bits(model)


def test_sync_gradients_between_forward_and_backward_keeps_buffers_in_line():
    """The end of that backward brings rank 0's buffers, as of any other. Found by the random programs."""
    first, second = pool(2).run(synchronized_between, 9)
    assert first == second


def under_torch_func(rank, _num_ranks, seed):
    model = build(seed)
    model.module.norm.eval()  # batch statistics cannot be taken under vmap
    x = batch(seed, rank)
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return bool(tangent.isfinite().all())


def test_torch_func_transforms_pass_through():
    """A forward-mode derivative through the wrapped module works although it has buffers."""
    assert pool(2).run(under_torch_func, 7) == [True, True]


def custom_buffer_hook(rank, num_ranks, seed):
    model = build(seed)
    calls = []

    def average(state, buffers):
        calls.append((state, sorted(buffers)))
        mean = buffers["norm.running_mean"]
        return [dist.all_reduce(mean, async_op=True).get_future()]

    model._register_buffer_comm_hook(
        "state", average, torch.nn.parallel.distributed._BufferCommHookLocation.POST_FORWARD
    )
    squares(model(batch(seed, rank, 0))).backward()
    return calls, bits(model), num_ranks


def test_buffer_comm_hook():
    """A user's buffer hook gets (state, named buffers) after the forward; its futures are awaited by the end."""
    for calls, _, _ in pool(2).run(custom_buffer_hook, 8):
        names = ["flag", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
        assert calls == [("state", names)]
