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
from paceline.errors import ReplicaMismatchError

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


class Changing(nn.Module):
    """Changes a buffer in its forward as it is told."""

    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mask", torch.zeros(1, 4))
        self.register_buffer("table", torch.full((2,), 7.0))
        self.change = change

    def forward(self, x):
        self.change(self)
        return self.linear(x)


def renamed(module):
    module.register_buffer("new", torch.ones(2))


def sized(num_rows):
    return lambda module: setattr(module, "mask", torch.full((num_rows, 4), float(num_rows)))


def unchanged(module):
    pass


# What two ranks do in a forward, and what all of them read.
DIFFERENT = {
    "size": ((unchanged, sized(3)), "buffer mask in this process (sizes [3, 4], torch.float32)"),
    "both": ((sized(2), sized(5)), "the same in process 0 (sizes [2, 4], torch.float32)"),
    "rank 0 alone": ((sized(2), unchanged), "the same in process 0 (sizes [2, 4], torch.float32)"),
    "dtype": (
        (unchanged, lambda module: setattr(module, "mask", module.mask.double())),
        "buffer mask in this process (sizes [1, 4], torch.float64)",
    ),
    "shape": ((unchanged, lambda module: setattr(module, "mask", torch.ones(4, 1))), "sizes [4, 1]"),
    "one rank's": ((unchanged, renamed), "buffer new in this process (sizes [2], torch.float32)"),
    "rank 0's": ((renamed, unchanged), "buffer new in this process (absent)"),
    "dropped": ((unchanged, lambda module: setattr(module, "table", None)), "(absent)"),
}


def said_of_different_buffers(rank, _num_ranks, how):
    """The error of one step, and of the next; by kind of difference. Parameters stay as they were."""
    said = {}
    for name, (changes, _) in DIFFERENT.items():
        model = DistributedDataParallel(Changing(unchanged))
        x = batch(1, rank)
        squares(model(x)).backward()
        model.zero_grad()
        if how == "copied":
            model = copy.deepcopy(model)
        if how == "before a forward":
            changes[rank](model.module)
        else:
            model.module.change = changes[rank]
        try:
            if how == "in a window":
                with model.accumulate([x, x]) as micro_batches:
                    for micro_batch in micro_batches:
                        squares(model(micro_batch)).backward()
            elif how == "joined":
                with model.join():
                    for _ in range(1 + rank):
                        squares(model(x)).backward()
            else:
                squares(model(x)).backward()
            said[name] = "nothing"
        except ReplicaMismatchError as error:
            said[name] = str(error)
        assert all(p.grad is None for p in model.parameters())
    return said


@pytest.mark.parametrize("how", ["in a forward", "before a forward", "in a window", "copied", "joined"])
def test_a_buffer_that_differs_between_ranks_is_named_on_all_of_them(how):
    """A size, a dtype, a shape, a buffer that one rank has alone: every rank names it, with what both have."""
    first, second = pool(2).run(said_of_different_buffers, how)
    assert first == second
    for name, (_, words) in DIFFERENT.items():
        assert words in first[name], name


def grown_alike(rank, _num_ranks):
    """Buffers that change on all ranks, in values that differ, and the names of a later step's collectives."""
    model = DistributedDataParallel(
        Changing(lambda module: setattr(module, "mask", torch.full((3, 4), rank + 1.0)))
    )
    model.module.change(model.module)  # between steps, too
    for step in range(3):
        if step == 1:
            renamed(model.module)
        with CountedCollectives() as counted:
            squares(model(batch(1, rank, step))).backward()
    return bits(model), model.module.mask.tolist(), sorted(set(counted.names))


def test_buffers_may_change_on_all_ranks():
    """The ranks compare once, in the step that brings the change; later steps send nothing besides."""
    first, second = pool(2).run(grown_alike)
    assert first[:2] == second[:2]
    assert first[1] == [[1.0] * 4] * 3
    assert not any("gather" in name for name in first[2] + second[2])


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def any_dtype(rank, _num_ranks):
    """Buffers after each rank has written other values into them, and brought the gradients of a step."""
    module = nn.Linear(4, 3)
    for place, dtype in enumerate(DTYPES):
        module.register_buffer(f"buffer_{place}", torch.tensor([rank + 1, 0]).to(dtype))
    module.quantized = nn.Parameter(torch.full((3,), rank + 1.0).to(torch.float8_e4m3fn), requires_grad=False)
    model = DistributedDataParallel(module)
    assert module.quantized.float().tolist() == [1.0] * 3
    found = [buffer.to(torch.complex128).tolist() for buffer in model.module.buffers()]
    for buffer in model.buffers():
        buffer.copy_(torch.tensor([rank, rank + 2]))
    squares(model(batch(1, rank))).backward()
    return found, [buffer.to(torch.complex128).tolist() for buffer in model.module.buffers()]


def test_buffers_of_any_dtype():
    """Those that the backend cannot sum or send by their type, too: they travel as bytes."""
    for found, brought in pool(2).run(any_dtype):
        assert found == [[1, 0]] * len(DTYPES)
        assert brought == [[0, 1]] + [[0, 2]] * (len(DTYPES) - 1)
