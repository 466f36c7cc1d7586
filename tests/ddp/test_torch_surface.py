"""What frameworks and tools read of torch's class besides its gradients: ours answers the same."""

import contextlib
import functools
import inspect
import itertools
import re
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel.distributed import _MixedPrecision

from harness.models import Mlp, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

TorchDdp = nn.parallel.DistributedDataParallel
CLASSES = {"ours": DistributedDataParallel, "torch's": TorchDdp}


class Branches(nn.Module):
    """Three layers, of which a forward uses those that it is told."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, used):
        for index in used:
            x = self.layers[index](x)
        return x


def what_was_used(ddp_class, rank):
    """The used map and whether the graph was static, after each of several steps."""
    torch.manual_seed(1)
    model = ddp_class(Branches(), find_unused_parameters=True)
    seen = []
    for used in ([(0,), (0, 1)], [(0,), (0, 1)], [(0, 2), (0, 1)], [(0,), (0,)]):
        model.zero_grad()
        model(torch.ones(2, 4), used[rank]).sum().backward()
        missing = [parameter.grad is None for parameter in model.parameters()]
        seen.append(
            (model.reducer._get_local_used_map().tolist(), model.reducer._ddp_graph_static(), missing)
        )
    return seen


def positional(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def what_hooks_are_called(ddp_class, _):
    hooks = [
        (None, positional),
        (None, default_hooks.fp16_compress_hook),
        (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        (powerSGD_hook.PowerSGDState(None), powerSGD_hook.batched_powerSGD_hook),
        (None, quantization_hooks.quantization_pertensor_hook),
    ]
    names = []
    for state, hook in hooks:
        model = ddp_class(nn.Linear(3, 3))
        names.append("comm_hook" in model._get_ddp_logging_data())
        model.register_comm_hook(state, hook)
        names.append(model._get_ddp_logging_data()["comm_hook"])
    model = ddp_class(nn.Linear(3, 3))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return [*names, model._get_ddp_logging_data()["comm_hook"]]


def what_refusals_leave(ddp_class, _):
    """Words of refusals, and what the logging data say of the last one."""
    module = Branches()
    ddp_class._set_params_and_buffers_to_ignore_for_model(module, ["layers.1.weight"])
    model = ddp_class(module)
    mapping = model._build_debug_param_to_name_mapping
    attempts = [
        lambda: mapping([]),
        lambda: mapping(list(module.parameters())),
        lambda: mapping(list(Branches().parameters())),
        lambda: model.register_comm_hook(None, 3),
        lambda: model._set_ddp_runtime_logging_sample_rate(0),
    ]
    said = [mapping(model._build_params_for_reducer()[0]), "has_error" in model._get_ddp_logging_data()]
    for attempt in attempts:
        try:
            attempt()
        except (TypeError, ValueError) as error:
            data = model._get_ddp_logging_data()
            said.append(
                (type(error).__name__, str(error), data["error"], data["has_error"], data["iteration"])
            )
    return said


def what_caps_are(ddp_class, rank):
    """Caps as attributes, and the buckets that they cut."""
    kib = 1 / 1024
    found = []
    for options in (
        {},
        {"bucket_cap_mb": 2},
        {"bucket_cap_mb_list": [1, 2]},
        {"bucket_cap_mb_list": (0.25 * kib, kib, 0.6 * kib), "bucket_cap_mb": 7},
    ):
        torch.manual_seed(2)
        model = ddp_class(nn.Sequential(*[nn.Linear(8, 8, bias=i % 2 == 0) for i in range(12)]), **options)
        for _ in range(3):  # torch says in the third what it has rebuilt in the second
            model(torch.ones(2, 8)).sum().backward()
        data = model._get_ddp_logging_data()
        found += [
            (model.bucket_bytes_cap, model.bucket_bytes_cap_list, model.bucket_bytes_cap_default),
            {
                key: data[key]
                for key in data
                if "bucket" in key and "initial" not in key and key != "bucket_sizes"
            },
            sorted(key for key in data if "time" not in key),
            rank,
        ]
    return found


def what_mixed_precision_leaves(ddp_class, _):
    module = Branches()
    ddp_class._set_params_and_buffers_to_ignore_for_model(module, ["layers.1.weight"])
    config = _MixedPrecision(param_dtype=torch.bfloat16)
    model = ddp_class(module, mixed_precision=config)
    copies = {name: getattr(p, "_mp_param", None) for name, p in model.module.named_parameters()}
    return {name: None if copy is None else copy.dtype for name, copy in copies.items()}, [
        hasattr(parameter, "_fp_param") for parameter in model.parameters()
    ]


ASPECTS = [
    what_was_used,
    what_hooks_are_called,
    what_refusals_leave,
    what_caps_are,
]
# From torch 2.15 on its class makes a stream for mixed precision, which a CUDA build cannot do without a driver.
if torch.version.cuda is None or torch.cuda.is_available():
    ASPECTS.append(what_mixed_precision_leaves)


def aspects(rank, _num_ranks):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            aspect.__name__: {name: aspect(ddp_class, rank) for name, ddp_class in CLASSES.items()}
            for aspect in ASPECTS
        }


def test_it_answers_as_torchs_class():
    """Used maps, static graphs, hooks' names, refusals, caps and buckets, low-precision copies: equal to torch's."""
    for found in pool(2).run(aspects):
        for aspect, answers in found.items():
            assert answers["ours"] == answers["torch's"], aspect


def reported_times(rank, _num_ranks):
    """Moments after each step; a layer is unfrozen on the way, which makes another reducer."""
    model = DistributedDataParallel(Branches().requires_grad_(requires_grad=False).requires_grad_())
    model.module.layers[2].requires_grad_(requires_grad=False)
    model = DistributedDataParallel(model.module)
    seen = []
    for step in range(6):
        if step == 3:
            model.module.layers[2].requires_grad_(requires_grad=True)
        model(torch.ones(2, 4), (0, 1, 2)).sum().backward()
        data = model._get_ddp_logging_data()
        moments = [data[key] for key in data if key.endswith(("_time_start", "_time_end"))]
        overlap = data["backward_compute_comm_overlap_time"]
        is_bounded = 0 <= overlap <= min(data["backward_comm_time"], data["backward_compute_time"])
        seen.append((data["iteration"], moments, time.time_ns(), is_bounded, rank))
    return seen


def test_times_of_steps_grow():
    """Moments are those of the wall clock, each later than in the step before; iterations are not counted anew."""
    for steps in pool(2).run(reported_times):
        assert [iteration for iteration, *_ in steps] == list(range(6))
        assert all(is_bounded for *_, is_bounded, _ in steps)
        for (_, before, *_), (_, after, now, *_) in itertools.pairwise(steps):
            assert len(after) == 5
            assert all(earlier < later <= now + 1e9 for earlier, later in zip(before, after, strict=True))
            assert min(after) > now - 3600e9


class Undefined(torch.autograd.Function):
    """Uses its second argument, and gives it a gradient only if told."""

    @staticmethod
    def forward(ctx, x, parameter, gives):
        ctx.shape = parameter.shape if gives else None
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None if ctx.shape is None else torch.ones(ctx.shape), None


class WithUndefined(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.small = nn.Parameter(torch.ones(4))
        self.large = nn.Parameter(torch.ones(200, 200))
        self.rows = nn.Embedding(5, 4, sparse=True)

    def forward(self, x, gives):
        for parameter in (self.small, self.large, self.rows.weight):
            x = Undefined.apply(x, parameter, gives and parameter is not self.rows.weight)
        return self.linear(x)


def undefined_gradients(rank, _num_ranks):
    """Of each option: gradients of the three parameters, where no rank and where one rank defines them."""
    found = {}
    for name, options in {
        "plain": {},
        "find": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "early": {"bucket_cap_mb": 1e-6},
    }.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = DistributedDataParallel(WithUndefined(), **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
            values = []
            for gives in (False, False, rank == 1):
                optimizer.zero_grad()
                with model.no_sync():
                    model(torch.ones(2, 4), gives=False).sum().backward()
                model(torch.ones(2, 4), gives).sum().backward()
                gradients = [model.module.small.grad, model.module.large.grad, model.module.rows.weight.grad]
                values.append([None if g is None else g.to_dense().unique().tolist() for g in gradients])
                optimizer.step()
                if len(values) == 2:
                    unmoved = all(bool((p == 1).all()) for p in (model.module.small, model.module.large))
            found[name] = (values, unmoved, model.reducer._get_local_used_map().tolist())
    return found


def test_gradients_that_no_rank_defines_stay_none():
    """A function that gives no gradient leaves None, and weight decay moves nothing; with one rank's it is the mean."""
    first, second = pool(2).run(undefined_gradients)
    assert first == second
    for name, (values, unmoved, used) in first.items():
        assert values[:2] == [[None, None, None]] * 2, name
        assert unmoved, name
        assert values[2] == [[0.5], [0.5], None], name
        assert used == [1, 1, 2, 2, 0], name


class GivesLater(nn.Module):
    """Beside a layer two parameters, to which a function gives a gradient of this value, or none; one may be spare."""

    def __init__(self, with_spare):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first, self.second = (nn.Parameter(torch.ones(4)) for _ in range(2))
        self.spare = nn.Parameter(torch.ones(4)) if with_spare else None

    def forward(self, x, *gives):
        for parameter, value in zip((self.first, self.second), gives, strict=True):
            x = x + _Gives.apply(parameter, value)
        return self.linear(x)


class _Gives(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, value):
        ctx.value = value
        return torch.zeros_like(parameter)

    @staticmethod
    def backward(ctx, gradient):
        return None if ctx.value is None else torch.full_like(gradient, ctx.value), None


GIVEN = [(1.0, 2.0), (1.0, -0.0), (-0.0, -0.0), (1.0, None), (-0.0, None), (None, 3.0), (0.5, -0.0)]


def undefined_later(_rank, _num_ranks, in_no_sync, with_spare):
    """Gradients of the two parameters, step by step."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = DistributedDataParallel(GivesLater(with_spare))
    found = []
    for given in GIVEN:
        model.zero_grad()
        with model.no_sync() if in_no_sync else contextlib.nullcontext():
            model(torch.ones(2, 4), *given).sum().backward()
        if in_no_sync:
            model.sync_gradients()
        gradients = (model.module.first.grad, model.module.second.grad)
        found.append(tuple(None if g is None else g.unique().tolist() for g in gradients))
    return found


@pytest.mark.parametrize("with_spare", [False, True])
@pytest.mark.parametrize("in_no_sync", [False, True])
def test_gradients_that_are_not_defined_any_more(in_no_sync, with_spare):
    """From some step on a function gives none: None; gradients of -0.0, the filling, are gradients."""
    expected = [tuple(None if value is None else [value] for value in given) for given in GIVEN]
    assert pool(2).run(undefined_later, in_no_sync, with_spare) == [expected] * 2


class StrictWork(dist.Work):
    """A work as torch calls it: its `wait` has an argument and no default."""

    def __init__(self, work, waits):
        super().__init__()
        self.work, self.waits = work, waits

    def wait(self, timeout):
        self.waits.append(timeout)
        return self.work.wait(timeout)

    def is_completed(self):
        return self.work.is_completed()

    def get_future(self):
        return self.work.get_future()


class StrictGroup(dist.ProcessGroup):
    """A process group in Python whose works are strict; everything goes over the default group."""

    work = StrictWork

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.waits = []

    def getBackendName(self):  # noqa: N802
        return "strict"

    def __getattribute__(self, name):
        if name in ("allreduce", "broadcast", "allgather"):
            call = getattr(dist.distributed_c10d._get_default_group(), name)
            return lambda *arguments: self.work(call(*arguments), self.waits)
        return super().__getattribute__(name)


class SilentFuture(torch.futures.Future):
    """Does not say when it is done, as torchft's."""

    def add_done_callback(self, _callback):
        raise NotImplementedError


class SilentWork(StrictWork):
    def get_future(self):
        return SilentFuture()


class SilentGroup(StrictGroup):
    work = SilentWork


class FailingWork(dist.Work):
    """A work that never says that it is completed, and raises at once."""

    def wait(self, timeout):
        raise RuntimeError("the switch is off")


class FailingGroup(StrictGroup):
    def __getattribute__(self, name):
        if name == "allreduce" and self.is_failing:
            return lambda *_: FailingWork()
        return super().__getattribute__(name)

    is_failing = False


def python_works(rank, num_ranks):
    gradients = set()
    for group in (SilentGroup(rank, num_ranks), StrictGroup(rank, num_ranks)):
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=group, bucket_cap_mb=1e-5)
        model(torch.full((1, 2), float(rank))).sum().backward()
        gradients |= set(model.module.weight.grad.flatten().tolist())
    failing = FailingGroup(rank, num_ranks)
    broken = DistributedDataParallel(nn.Linear(2, 2), process_group=failing)
    failing.is_failing = True
    try:
        broken(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        said = str(error)
    return gradients, len(group.waits) > 0, "the switch is off" in said


def test_works_written_in_python_are_waited_for_as_torch_does():
    """`wait` is always given its argument; one that fails is an error; a future need not take callbacks."""
    assert pool(2).run(python_works) == [({0.5}, True, True)] * 2


def python_works_of_one_rank(rank, num_ranks):
    group = StrictGroup(rank, num_ranks)
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    told = len(group.waits)
    model(torch.ones(1, 2)).sum().backward()
    return set(model.module.weight.grad.flatten().tolist()), told > 0, len(group.waits) - told


def test_one_rank_waits_for_no_reduction_of_its_own():
    """Torch reduces with one rank, too, and asks for a future (its `test_ddp_invoke_work_object`). Same gradients."""
    assert pool(1).run(python_works_of_one_rank) == [({1.0}, True, 0)]


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])

    def forward(self, x):
        return self.layers(x)


def graphs(rank, _num_ranks):
    """Into how many graphs `torch.compile` cuts a wrapped module: torch's class, ours, and ours over one rank."""
    pieces = []

    def backend(module, _):
        pieces[-1] += 1
        return module.forward

    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for name, options in (("torch's", {}), ("ours", {}), ("ours", {"process_group": alone})):
        torch._dynamo.reset()
        pieces.append(0)
        model = torch.compile(CLASSES[name](Compiled(), bucket_cap_mb=1, **options), backend=backend)
        model(torch.ones(2, 512)).sum().backward()
    return pieces


def test_compiled_modules_are_cut_at_the_buckets():
    """A graph for each bucket, as under torch's class; with one rank, too."""
    assert pool(2).run(graphs) == [[4, 4, 4]] * 2


def wraps_of_wraps(_rank, _num_ranks):
    """What is said to a second wrapper, whichever is outside and however deep."""
    made = {name: ddp_class(nn.Linear(2, 2)) for name, ddp_class in CLASSES.items()}
    said = []
    for inner, outer in (("ours", "ours"), ("ours", "torch's"), ("torch's", "ours")):
        for module in (made[inner], nn.Sequential(made[inner])):
            try:
                CLASSES[outer](module)(torch.ones(1, 2))
            except ValueError as error:
                said.append(str(error))
    values = made["ours"](torch.ones(1, 2)).shape
    inspect.getmembers(made["ours"])
    return said, values, hasattr(made["ours"], "_ddp_params_and_buffers_to_ignore")


def test_one_module_has_one_wrapper():
    """Ours around ours, torch's around ours, ours around torch's: refused, with the same rule."""
    for said, shape, has_attribute in pool(2).run(wraps_of_wraps):
        assert len(said) == 6
        assert all("A module is synchronized by one wrapper" in words for words in said)
        assert all("accelerate.prepare" in words for words in said)
        assert shape == (1, 2)
        assert not has_attribute


WRONG = {
    "group name": (lambda: {"process_group": "gloo"}, "'gloo' is no process group"),
    "ranks": (lambda: {"process_group": [0, 1]}, "0 is no process group"),
    "group of groups": (lambda: {"process_group": []}, "names no process group"),
    "mesh": (lambda: {"device_mesh": "cpu"}, "device_mesh='cpu' is not a device mesh"),
    "device": (lambda: {"device_ids": 0}, "device_ids=0 is not a list"),
    "text cap": (lambda: {"bucket_cap_mb": "25"}, "bucket_cap_mb: '25' is not a cap"),
    "nan cap": (lambda: {"bucket_cap_mb": float("nan")}, "bucket_cap_mb: nan is not a cap"),
    "infinite cap": (lambda: {"bucket_cap_mb": float("inf")}, "bucket_cap_mb: inf is not a cap"),
    "negative cap": (lambda: {"bucket_cap_mb": -1}, "bucket_cap_mb: -1 is not a cap"),
    "list as cap": (lambda: {"bucket_cap_mb": []}, "bucket_cap_mb: [] is not a cap"),
    "no caps": (lambda: {"bucket_cap_mb_list": []}, "bucket_cap_mb_list=[] is no list of caps"),
    "text caps": (lambda: {"bucket_cap_mb_list": "25"}, "bucket_cap_mb_list='25' is no list of caps"),
    "negative caps": (lambda: {"bucket_cap_mb_list": [1, -1]}, "bucket_cap_mb_list: -1 is not a cap"),
}


def refusals(_rank, _num_ranks):
    said = {}
    for case, (options, _) in WRONG.items():
        try:
            DistributedDataParallel(**{"module": Mlp(), **options()})
        except ValueError as error:
            said[case] = str(error)
    model = DistributedDataParallel(Mlp())
    for case, (batches, weight) in {
        "text weight": ([1, 2], lambda _: "a"),
        "number text": ([1, 2], lambda _: "3"),
        "tensor weight": ([1, 2], lambda _: torch.ones(2)),
        "no function": ([1, 2], "a"),
        "generator": (iter([1, 2]), None),
    }.items():
        try:
            with model.accumulate(batches, weight=weight):
                pass
        except ValueError as error:
            said[case] = str(error)
    dist.all_reduce(torch.ones(()))  # all ranks are at the same place
    return said


def test_arguments_that_cannot_be_are_refused_in_words():
    """The message names argument and value, on every rank; so do those of `accumulate`."""
    words = {case: expected for case, (_, expected) in WRONG.items()} | {
        "text weight": "micro-batch 0 of 2 has weight 'a'",
        "number text": "micro-batch 0 of 2 has weight '3'",
        "tensor weight": "micro-batch 0 of 2 has weight tensor([1., 1.])",
        "no function": "accumulate(weight='a'): give a function",
        "generator": "give a list of the micro-batches of one step",
    }
    for said in pool(2).run(refusals):
        assert sorted(said) == sorted(words)
        for case, expected in words.items():
            assert expected in said[case], case


def lazily(rank, _num_ranks):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedDataParallel(Mlp(), lazy_bucket_allocation=True)
    squares(model(torch.randn(3, 8, generator=generator(1, rank)))).backward()
    return model.lazy_bucket_allocation, [str(warning.message) for warning in caught]


class WithHookOfItsOwn(DistributedDataParallel):
    """A subclass with names that a wrapper may want for itself, as torchft's class has `_comm_hook`."""

    def __init__(self, module):
        super().__init__(module)
        self.register_comm_hook(None, self._comm_hook)
        self._steps, self._setting, self._low_precision = 0, {}, None

    @staticmethod
    def _comm_hook(state, bucket):
        return default_hooks.allreduce_hook(state, bucket)

    def _set_up(self):
        """Never called."""
        raise AssertionError

    _trains = _call_module = _check_not_within = _set_up


def names_of_our_own(rank, num_ranks):
    """Private names besides torch's and those with the prefix; and whether the subclass's gradient is the mean."""
    ours = DistributedDataParallel(nn.Linear(4, 1), mixed_precision=_MixedPrecision(torch.bfloat16))
    classes = [each for each in DistributedDataParallel.__mro__ if each.__module__.startswith("paceline")]
    names = set(vars(ours)).union(*map(vars, classes)) - set(vars(nn.Module()))
    theirs = re.findall(r"\w+", inspect.getsource(inspect.getmodule(TorchDdp)) + inspect.getsource(join))
    own = [name for name in names if name.startswith("_") and not name.startswith(("__", "_paceline_"))]
    own = sorted(set(own) - {*theirs, "_abc_impl"})
    model = WithHookOfItsOwn(nn.Linear(4, 1, bias=False))
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    return own, model.module.weight.grad.unique().tolist() == [(num_ranks + 1) / 2]


def test_private_names_have_a_prefix():
    """So a subclass may use any other name, as torchft's does."""
    assert pool(2).run(names_of_our_own) == [([], True)] * 2


def test_lazy_bucket_allocation_is_taken():
    """Torch 2.15's argument is accepted under every version, and said to have no effect."""
    for value, (warning,) in pool(2).run(lazily):
        assert value is True
        assert "lazy_bucket_allocation=True is ignored" in warning


def shapes(rank, _num_ranks):
    """Names and shapes of the collectives in a profile of one step, with three buckets."""
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    model = DistributedDataParallel(layers, bucket_cap_mb=1e-6, find_unused_parameters=True)
    step = functools.partial(model, torch.ones(2, 8) * rank)
    step().sum().backward()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profiler:
        step().sum().backward()
    searches = [event for event in profiler.events() if event.name.endswith("::search_unused_parameters")]
    assert len(searches) == 1
    events = [
        event for event in profiler.events() if event.name in ("c10d::allreduce_", "paceline:all_reduce")
    ]
    assert all(event.is_async for event in events if event.name == "paceline:all_reduce")
    sizes = sorted(
        event.input_shapes[0][0] for event in events if event.input_shapes and event.input_shapes[0]
    )
    return (
        sizes,
        sum(event.name == "paceline:all_reduce" for event in events),
        [bucket.message.numel() for bucket in model.reducer.buckets],
    )


def test_profiles_show_collectives_and_their_shapes():
    """In shared memory as over Gloo: a range and an operator with the message's shape for each bucket."""
    for sizes, ranges, messages in pool(2).run(shapes):
        assert sizes == sorted(messages)
        assert ranges == len(messages)
